/* The gated delta rule, token after token; see gated_delta.py for the formulas and the shapes. */
#include "native.h"

#define DELTA_VECTORS 4 /* vectors of value channels per item */

static inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* A head's query or key as floats, of length `scale`. */
NOINLINE void NAME(unit_head)(int64_t is_wide, float *to, const void *x, int64_t at, int64_t dim, float scale) {
    float squares = 0.0f;
    read_floats(to, is_wide, x, at, dim);
    for (int64_t i = 0; i < dim; i++) squares += to[i] * to[i];
    scale /= sqrtf(squares + 1e-6f);
    for (int64_t i = 0; i < dim; i++) to[i] *= scale;
}

/* One token's update of `vectors` vectors of a head's value channels: the state is read, then read and written. */
INLINE void NAME(delta_step)(const int vectors, float *s, int64_t stride, const float *q, const float *k, int64_t dim,
                             float decay, float beta, float qk, const float *v, float *out) {
    vec predicted[DELTA_VECTORS], read[DELTA_VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++) predicted[i] = read[i] = splat(0.0f);
    for (int64_t key = 0; key < dim; key++)
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) {
            vec value = load_f32(s + key * stride + i * LANES);
            predicted[i] += value * k[key];
            read[i] += value * q[key];
        }
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++) {
        predicted[i] = (load_f32(v + i * LANES) - predicted[i] * decay) * beta;
        store_f32(out + i * LANES, read[i] * decay + predicted[i] * qk);
    }
    for (int64_t key = 0; key < dim; key++)
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) {
            float *at = s + key * stride + i * LANES;
            store_f32(at, load_f32(at) * decay + predicted[i] * k[key]);
        }
}

static inline float *NAME(delta_state)(const gated_delta_args *a, int64_t state_row, int64_t head) {
    return a->state.data + (state_row * a->state.size[1] + head) * a->state.size[2] * a->state.size[3];
}

/* Some value channels of one head, over all tokens; in a copy if they are not whole vectors, or states are kept. */
static void NAME(delta_block)(const gated_delta_args *a, int64_t head, int64_t first) {
    const int64_t heads = a->state.size[1], key_dim = a->state.size[2], value_dim = a->state.size[3];
    const int64_t key_size = (a->qkv.size[1] - heads * value_dim) / 2, key_heads = key_size / key_dim;
    const int64_t key_at = head / (heads / key_heads) * key_dim, live = live_of(a->live.data, a->out.size[0]);
    const int64_t count = least_of(DELTA_VECTORS * LANES, value_dim - first), padded = (count + LANES - 1) / LANES * LANES;
    const int32_t *output_state_rows = a->output_state_rows.data;
    const int is_whole = count == padded && !output_state_rows;
    const int is_wide = IS_WIDE(a->qkv), out_wide = IS_WIDE(a->out), ab_wide = IS_WIDE(a->ab);
    const float rate = -expf(a->a_log.data[head]), dt_bias = a->dt_bias.data[head];
    float *at = scratch(2 * (key_dim + LANES) + 2 * padded + (is_whole ? 0 : key_dim * padded));
    float *q = carved(&at, key_dim), *k = carved(&at, key_dim), *v = carved(&at, padded), *out = carved(&at, padded);
    float *stored = 0, *s = 0;
    int64_t stride = is_whole ? value_dim : padded;
    for (int64_t token = 0; token < live; token++) {
        const int32_t row = a->rows.data[token];
        if (token == 0 || row != a->rows.data[token - 1]) {
            const int is_new = a->positions.data[token] == 0;
            stored = NAME(delta_state)(a, a->state_rows.data[row], head) + first;
            s = is_whole ? stored : at;
            for (int64_t key = 0; key < key_dim; key++) {
                if (is_new) memset(s + key * stride, 0, (size_t)padded * sizeof *s);
                else if (!is_whole) memcpy(s + key * stride, stored + key * value_dim, (size_t)count * sizeof *s);
            }
        }
        const char *x = (const char *)a->qkv.data + token * a->qkv.stride[0] * width_of(is_wide);
        NAME(unit_head)(is_wide, q, x, key_at, key_dim, 1.0f / sqrtf((float)key_dim));
        NAME(unit_head)(is_wide, k, x, key_size + key_at, key_dim, 1.0f);
        float qk = 0.0f;
        for (int64_t key = 0; key < key_dim; key++) qk += q[key] * k[key];
        read_floats(v, is_wide, x, 2 * key_size + head * value_dim + first, count);
        for (int64_t i = count; i < padded; i++) v[i] = 0.0f;
        const char *ab = (const char *)a->ab.data + token * a->ab.stride[0] * width_of(ab_wide);
        const float decay = expf(rate * softplus(widen_at(ab_wide, ab, head) + dt_bias));
        const float beta = (float)a->strength / (1.0f + expf(-widen_at(ab_wide, ab, heads + head)));
        if (padded == DELTA_VECTORS * LANES)
            NAME(delta_step)(DELTA_VECTORS, s, stride, q, k, key_dim, decay, beta, qk, v, out);
        else
            for (int64_t i = 0; i < padded; i += LANES)
                NAME(delta_step)(1, s + i, stride, q, k, key_dim, decay, beta, qk, v + i, out + i);
        write_floats(out_wide, a->out.data, (token * heads + head) * value_dim + first, out, count);
        if (output_state_rows) stored = NAME(delta_state)(a, output_state_rows[token], head) + first;
        if (output_state_rows || (!is_whole && (token + 1 == live || a->rows.data[token + 1] != row)))
            for (int64_t key = 0; key < key_dim; key++)
                memcpy(stored + key * value_dim, s + key * stride, (size_t)count * sizeof *s);
    }
}

static void NAME(delta_blocks)(const void *job, int64_t begin, int64_t end) {
    const gated_delta_args *a = job;
    const int64_t blocks = (a->state.size[3] + DELTA_VECTORS * LANES - 1) / (DELTA_VECTORS * LANES);
    for (int64_t item = begin; item < end; item++)
        NAME(delta_block)(a, item / blocks, item % blocks * DELTA_VECTORS * LANES);
}

KERNEL(gated_delta) {
    const int64_t blocks = (a->state.size[3] + DELTA_VECTORS * LANES - 1) / (DELTA_VECTORS * LANES);
    const int64_t work = a->out.size[0] * a->state.size[2] * DELTA_VECTORS * LANES;
    parallel(threads, NAME(delta_blocks), a, a->state.size[1] * blocks, items_of(PARALLEL_WORK, work));
}
