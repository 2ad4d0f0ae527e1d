/* The activations of gates; see act_mul.py for the formulas. */
#pragma once

#include "native.h"

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
