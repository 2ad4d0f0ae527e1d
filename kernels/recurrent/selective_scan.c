/* The selective state update of Mamba2, token after token; see selective_scan.py for the formulas and the shapes. */
#include "native.h"

static inline float step_of(const selective_scan_args *a, float dt) {
    float step = dt > 20.0f ? dt : log1pf(expf(dt));
    return fminf(fmaxf(step, (float)a->least), (float)a->most);
}

/* One token's update of a head: its state is read and written once. */
INLINE void NAME(scan_step)(float *s, int64_t states, int64_t dim, const float *b, const float *c, float decay,
                            const float *dx, float *out) {
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) {
        vec added = load_f32(dx + i), sum = splat(0.0f);
        for (int64_t n = 0; n < states; n++) {
            vec value = load_f32(s + n * dim + i) * decay + added * b[n];
            store_f32(s + n * dim + i, value);
            sum += value * c[n];
        }
        store_f32(out + i, sum);
    }
    for (; i < dim; i++) {
        float sum = 0.0f;
        for (int64_t n = 0; n < states; n++) {
            s[n * dim + i] = s[n * dim + i] * decay + dx[i] * b[n];
            sum += s[n * dim + i] * c[n];
        }
        out[i] = sum;
    }
}

static void NAME(scan_head)(const selective_scan_args *a, int64_t head) {
    const int64_t heads = a->state.size[1], states = a->state.size[2], dim = a->state.size[3];
    const int64_t groups = (a->xbc.size[1] - heads * dim) / (2 * states), live = live_of(a->live.data, a->out.size[0]);
    const int64_t b_at = heads * dim + head / (heads / groups) * states;
    const int is_wide = IS_WIDE(a->xbc), out_wide = IS_WIDE(a->out), dt_wide = IS_WIDE(a->dt);
    const float rate = -expf(a->a_log.data[head]), skip = a->skip.data[head], bias = a->dt_bias.data[head];
    float *at = scratch(2 * (states + LANES) + 3 * (dim + LANES));
    float *b = carved(&at, states), *c = carved(&at, states), *x = carved(&at, dim), *dx = carved(&at, dim);
    float *out = carved(&at, dim), *s = 0;
    for (int64_t token = 0; token < live; token++) {
        const int32_t row = a->rows.data[token];
        if (token == 0 || row != a->rows.data[token - 1]) {
            s = a->state.data + (a->state_rows.data[row] * heads + head) * states * dim;
            if (a->positions.data[token] == 0) memset(s, 0, (size_t)(states * dim) * sizeof *s);
        }
        if (a->output_state_rows.data) {
            float *next = a->state.data + (a->output_state_rows.data[token] * heads + head) * states * dim;
            s = memcpy(next, s, (size_t)(states * dim) * sizeof *s);
        }
        const char *xbc = (const char *)a->xbc.data + token * a->xbc.stride[0] * width_of(is_wide);
        const char *dt = (const char *)a->dt.data + token * a->dt.stride[0] * width_of(dt_wide);
        const float step = step_of(a, widen_at(dt_wide, dt, head) + bias);
        read_floats(b, is_wide, xbc, b_at, states), read_floats(c, is_wide, xbc, b_at + groups * states, states);
        read_floats(x, is_wide, xbc, head * dim, dim);
        for (int64_t i = 0; i < dim; i++) dx[i] = x[i] * step;
        NAME(scan_step)(s, states, dim, b, c, expf(rate * step), dx, out);
        for (int64_t i = 0; i < dim; i++) out[i] += skip * x[i];
        write_floats(out_wide, a->out.data, (token * heads + head) * dim, out, dim);
    }
}

static void NAME(scan_heads)(const void *job, int64_t begin, int64_t end) {
    const selective_scan_args *a = job;
    for (int64_t head = begin; head < end; head++) NAME(scan_head)(a, head);
}

KERNEL(selective_scan) {
    const int64_t work = a->out.size[0] * a->state.size[2] * a->state.size[3];
    parallel(threads, NAME(scan_heads), a, a->state.size[1], items_of(PARALLEL_WORK, work));
}
