/* RMSNorm with a gate, in groups of channels; see gated_rms_norm.py for the formulas and the shapes. */
#include "native.h"

/* x times silu(gate), or sigmoid(gate), as floats. */
INLINE void NAME(gate_values)(const int gate_wide, const int sigmoid, float *values, const void *gate, int64_t at, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vec z = load_at(gate_wide, gate, at + i);
        store_f32(values + i, load_f32(values + i) * ((sigmoid ? splat(1.0f) : z) / (1.0f + exp_lanes(-z))));
    }
    for (; i < count; i++) {
        float z = widen_at(gate_wide, gate, at + i);
        values[i] *= (sigmoid ? 1.0f : z) / (1.0f + expf(-z));
    }
}

INLINE void NAME(gated_group)(const int is_wide, const gated_rms_norm_args *a, int64_t row, int64_t at, float *values) {
    const int64_t width = a->out.size[1], count = a->group;
    const int gate_wide = IS_WIDE(a->gate), out_wide = IS_WIDE(a->out);
    const char *x = (const char *)a->x.data + row * a->x.stride[0] * width_of(is_wide);
    const char *gate = (const char *)a->gate.data + row * a->gate.stride[0] * width_of(gate_wide);
    char *out = (char *)a->out.data + row * width * width_of(out_wide);
    for (int64_t i = 0; i < count; i++) values[i] = widen_at(is_wide, x, at + i);
    if (!a->norm_first) BY_WIDTH(gate_wide, NAME(gate_values), a->sigmoid, values, gate, at, count);
    if (a->weight.data) {
        const float *gain = a->weight.data + (a->weight.size[0] == width ? at : 0);
        float squares = 0.0f;
        for (int64_t i = 0; i < count; i++) squares += values[i] * values[i];
        const float scale = 1.0f / sqrtf(squares / (float)count + (float)a->eps);
        for (int64_t i = 0; i < count; i++) values[i] *= scale * gain[i];
    }
    if (a->norm_first) BY_WIDTH(gate_wide, NAME(gate_values), a->sigmoid, values, gate, at, count);
    for (int64_t i = 0; i < count; i++) narrow_at(out_wide, out, at + i, values[i]);
}

static void NAME(gated_groups)(const void *job, int64_t begin, int64_t end) {
    const gated_rms_norm_args *a = job;
    const int64_t groups = a->out.size[1] / a->group;
    float *values = scratch(a->group);
    for (int64_t item = begin; item < end; item++)
        BY_WIDTH(IS_WIDE(a->x), NAME(gated_group), a, item / groups, item % groups * a->group, values);
}

KERNEL(gated_rms_norm) {
    const int64_t groups = a->out.size[1] / a->group;
    parallel(threads, NAME(gated_groups), a, a->out.size[0] * groups, items_of(PARALLEL_WORK, a->group));
}
