/* The gate of a gated MLP; see act_mul.py for the formula and the shapes. */
#include "activations.h"

INLINE void NAME(gate_row)(const int is_wide, element *out, const char *gate, int64_t width, int64_t activation) {
    const char *up = gate + width * width_of(is_wide);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        store(out + i, activate(load_at(is_wide, gate, i), activation) * load_at(is_wide, up, i));
    if (i < width) {
        float tail[2][LANES] = {{0}};
        element last[LANES];
        for (int64_t j = 0; i + j < width; j++)
            tail[0][j] = widen_at(is_wide, gate, i + j), tail[1][j] = widen_at(is_wide, up, i + j);
        store(last, activate(load_f32(tail[0]), activation) * load_f32(tail[1]));
        memcpy(out + i, last, (width - i) * sizeof(element));
    }
}

static void NAME(gate_rows)(const void *job, int64_t begin, int64_t end) {
    const act_mul_args *a = job;
    int64_t width = a->out.size[1], is_wide = IS_WIDE(a->gate_up);
    for (int64_t row = begin; row < end; row++) {
        const char *gate = (const char *)a->gate_up.data + row * a->gate_up.stride[0] * width_of(is_wide);
        BY_WIDTH(is_wide, NAME(gate_row), (element *)a->out.data + row * width, gate, width, a->activation);
    }
}

KERNEL(act_mul) { parallel(threads, NAME(gate_rows), a, a->out.size[0], items_of(PARALLEL_WORK, a->out.size[1])); }
