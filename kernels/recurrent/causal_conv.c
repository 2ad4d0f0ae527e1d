/* Causal convolution over the tokens of a sequence; see causal_conv.py for the formulas and the shapes. */
#include "native.h"

/* Some lanes from value `i` on; missing ones are 0. */
static inline vec NAME(some_at)(int64_t is_wide, const void *x, int64_t i, int64_t lanes) {
    if (lanes >= LANES) return load_at(is_wide, x, i);
    vec values = splat(0.0f);
    for (int64_t lane = 0; lane < lanes; lane++) values[lane] = widen_at(is_wide, x, i + lane);
    return values;
}

static inline void NAME(some_to)(int64_t is_wide, void *out, int64_t i, int64_t lanes, vec values) {
    if (lanes >= LANES) store_at(is_wide, out, i, values);
    else
        for (int64_t lane = 0; lane < lanes; lane++) narrow_at(is_wide, out, i + lane, values[lane]);
}

/* One vector of channels, over all tokens. */
static void NAME(convolve_lanes)(const causal_conv_args *a, int64_t first) {
    const int64_t channels = a->out.size[1], width = a->weight.size[0], live = live_of(a->live.data, a->out.size[0]);
    const int64_t lanes = least_of(LANES, channels - first);
    const int is_gated = a->x.size[1] != channels, is_wide = IS_WIDE(a->x), out_wide = IS_WIDE(a->out);
    const vec bias = a->bias.data ? NAME(some_at)(1, a->bias.data, first, lanes) : splat(0.0f);
    vec inputs[MAX_CONV_WIDTH], weights[MAX_CONV_WIDTH];
    float *state = 0;
    for (int64_t j = 0; j < width; j++) weights[j] = NAME(some_at)(1, a->weight.data, j * channels + first, lanes);
    for (int64_t token = 0; token < live; token++) {
        const int32_t row = a->rows.data[token];
        if (token == 0 || row != a->rows.data[token - 1]) {
            state = a->state.data + a->state_rows.data[row] * (width - 1) * channels + first;
            for (int64_t j = 1; j < width; j++)
                inputs[j] = a->positions.data[token] == 0 ? splat(0.0f)
                                                          : NAME(some_at)(1, state, (j - 1) * channels, lanes);
        }
        const char *x = (const char *)a->x.data + token * a->x.stride[0] * width_of(is_wide);
        for (int64_t j = 1; j < width; j++) inputs[j - 1] = inputs[j];
        inputs[width - 1] = NAME(some_at)(is_wide, x, first, lanes);
        if (is_gated) inputs[width - 1] *= NAME(some_at)(is_wide, x, 2 * channels + first, lanes);
        vec total = bias;
        for (int64_t j = 0; j < width; j++) total += inputs[j] * weights[j];
        if (a->silu) total = total / (1.0f + exp_lanes(-total));
        if (is_gated) total *= NAME(some_at)(is_wide, x, channels + first, lanes);
        NAME(some_to)(out_wide, a->out.data, token * channels + first, lanes, total);
        float *to = token + 1 == live || a->rows.data[token + 1] != row ? state : 0;
        if (a->output_state_rows.data) to = a->state.data + a->output_state_rows.data[token] * (width - 1) * channels + first;
        if (to)
            for (int64_t j = 1; j < width; j++) NAME(some_to)(1, to, (j - 1) * channels, lanes, inputs[j]);
    }
}

static void NAME(convolve)(const void *job, int64_t begin, int64_t end) {
    const causal_conv_args *a = job;
    for (int64_t block = begin; block < end; block++) NAME(convolve_lanes)(a, block * LANES);
}

KERNEL(causal_conv) {
    int64_t blocks = (a->out.size[1] + LANES - 1) / LANES;
    parallel(threads, NAME(convolve), a, blocks, items_of(PARALLEL_WORK, a->out.size[0] * LANES * a->weight.size[0]));
}
