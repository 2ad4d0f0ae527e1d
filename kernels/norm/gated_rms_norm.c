/* RMSNorm with a gate, in groups of channels; see gated_rms_norm.py for the formulas and the shapes. */
#include "native.h"

/* Values times silu(gate), or sigmoid(gate). */
NOINLINE void NAME(gate_values)(int64_t sigmoid, float *values, const float *gate, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vec z = load_f32(gate + i);
        store_f32(values + i, load_f32(values + i) * ((sigmoid ? splat(1.0f) : z) / (1.0f + exp_lanes(-z))));
    }
    for (; i < count; i++) values[i] *= (sigmoid ? 1.0f : gate[i]) / (1.0f + expf(-gate[i]));
}

static void NAME(gated_groups)(const void *job, int64_t begin, int64_t end) {
    const gated_rms_norm_args *a = job;
    const int64_t width = a->out.size[1], count = a->group, groups = width / count;
    const int64_t is_wide = IS_WIDE(a->x), gate_wide = IS_WIDE(a->gate), out_wide = IS_WIDE(a->out);
    float *memory = scratch(2 * (count + LANES)), *values = carved(&memory, count), *gate = carved(&memory, count);
    for (int64_t item = begin; item < end; item++) {
        const int64_t row = item / groups, at = item % groups * count;
        read_floats(values, is_wide, a->x.data, row * a->x.stride[0] + at, count);
        read_floats(gate, gate_wide, a->gate.data, row * a->gate.stride[0] + at, count);
        if (!a->norm_first) NAME(gate_values)(a->sigmoid, values, gate, count);
        if (a->weight.data) {
            const float *gain = a->weight.data + (a->weight.size[0] == width ? at : 0);
            float squares = 0.0f;
            for (int64_t i = 0; i < count; i++) squares += values[i] * values[i];
            const float scale = 1.0f / sqrtf(squares / (float)count + (float)a->eps);
            for (int64_t i = 0; i < count; i++) values[i] *= scale * gain[i];
        }
        if (a->norm_first) NAME(gate_values)(a->sigmoid, values, gate, count);
        write_floats(out_wide, a->out.data, row * width + at, values, count);
    }
}

KERNEL(gated_rms_norm) {
    const int64_t groups = a->out.size[1] / a->group;
    parallel(threads, NAME(gated_groups), a, a->out.size[0] * groups, items_of(PARALLEL_WORK, a->group));
}
