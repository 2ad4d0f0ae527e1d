/* The gate of a gated MLP; see act_mul.py for the formulas and the shapes. */
#include "native.h"

#ifndef GRAPHDECODE_ACT_MUL
#define GRAPHDECODE_ACT_MUL
static inline vec activate(vec gate, int64_t activation) {
    if (activation == ACTIVATION_SILU) return gate / (1.0f + exp_lanes(-gate));
    if (activation == ACTIVATION_GELU_TANH) { /* 0.5 (1 + tanh(z)) = sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3) */
        vec twice = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
        return gate / (1.0f + exp_lanes(-twice));
    }
    vec result;
    for (int i = 0; i < LANES; i++) result[i] = 0.5f * gate[i] * (1.0f + erff(gate[i] * 0.70710678f));
    return result;
}
#endif

static void NAME(gate_row)(element *out, const element *gate, const element *up, int64_t width, int64_t activation) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(out + i, activate(load(gate + i), activation) * load(up + i));
    if (i < width) {
        element tail[3][LANES] = {{0}};
        int64_t count = width - i;
        memcpy(tail[0], gate + i, count * sizeof(element));
        memcpy(tail[1], up + i, count * sizeof(element));
        store(tail[2], activate(load(tail[0]), activation) * load(tail[1]));
        memcpy(out + i, tail[2], count * sizeof(element));
    }
}

static void NAME(gate_rows)(const void *job, int64_t begin, int64_t end) {
    const act_mul_args *a = job;
    int64_t width = a->out.size[1];
    for (int64_t row = begin; row < end; row++) {
        const element *gate = (const element *)a->gate_up.data + row * a->gate_up.stride[0];
        NAME(gate_row)((element *)a->out.data + row * width, gate, gate + width, width, a->activation);
    }
}

KERNEL(act_mul) { parallel(threads, NAME(gate_rows), a, a->out.size[0], items_of(PARALLEL_WORK, a->out.size[1])); }
