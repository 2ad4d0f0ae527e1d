/* RMSNorm, alone and behind a residual add; see rms_norm.py for the formulas and the shapes. */
#include "native.h"

/* One over the root of the mean square of a row. */
INLINE float NAME(inverse_rms)(const int is_wide, const void *x, int64_t hidden, float eps) {
    vec squares = splat(0.0f);
    float tail = 0.0f;
    int64_t i = 0;
    for (; i + LANES <= hidden; i += LANES) squares += load_at(is_wide, x, i) * load_at(is_wide, x, i);
    for (; i < hidden; i++) tail += widen_at(is_wide, x, i) * widen_at(is_wide, x, i);
    return 1.0f / sqrtf((sum_lanes(squares) + tail) / (float)hidden + eps);
}

/* The norm of a row, or without a weight the row itself. */
INLINE void NAME(norm_row)(const int is_wide, element *out, const void *x, const float *weight, int64_t hidden, float eps) {
    float scale = weight ? NAME(inverse_rms)(is_wide, x, hidden, eps) : 1.0f;
    int64_t i = 0;
    for (; weight && i + LANES <= hidden; i += LANES)
        store(out + i, load_at(is_wide, x, i) * scale * load_f32(weight + i));
    for (; !weight && i + LANES <= hidden; i += LANES) store(out + i, load_at(is_wide, x, i));
    for (; i < hidden; i++) out[i] = narrow(weight ? widen_at(is_wide, x, i) * scale * weight[i] : widen_at(is_wide, x, i));
}

/* Add a row to the residual, normed where a gain is given; `is_wide` is the row's, `in_floats` the residual's. */
INLINE void NAME(add_row)(const int is_wide, const int in_floats, void *residual, const void *x, const float *gain,
                          float scale, float eps, int64_t hidden) {
    int64_t i = 0;
    if (gain) {
        scale *= NAME(inverse_rms)(is_wide, x, hidden, eps);
        for (; i + LANES <= hidden; i += LANES) {
            vec sum = load_at(in_floats, residual, i) + load_at(is_wide, x, i) * scale * load_f32(gain + i);
            store_at(in_floats, residual, i, sum);
        }
    }
    for (; i + LANES <= hidden; i += LANES)
        store_at(in_floats, residual, i, load_at(in_floats, residual, i) + load_at(is_wide, x, i) * scale);
    for (; i < hidden; i++) {
        float sum = widen_at(in_floats, residual, i) + widen_at(is_wide, x, i) * scale * (gain ? gain[i] : 1.0f);
        narrow_at(in_floats, residual, i, sum);
    }
}

static void NAME(norm_rows)(const void *job, int64_t begin, int64_t end) {
    const rms_norm_args *a = job;
    int64_t hidden = a->x.size[1], is_wide = IS_WIDE(a->x);
    for (int64_t row = begin; row < end; row++) {
        const char *x = (const char *)a->x.data + row * a->x.stride[0] * width_of(is_wide);
        element *out = (element *)a->out.data + row * hidden;
        BY_WIDTH(is_wide, NAME(norm_row), out, x, a->weight.data, hidden, (float)a->eps);
    }
}

INLINE void NAME(add_norm_row)(const int in_floats, const add_rms_norm_args *a, int64_t row) {
    int64_t hidden = a->x.size[1], is_wide = IS_WIDE(a->x);
    element *out = (element *)a->out.data + row * hidden;
    char *residual = (char *)a->residual.data + row * hidden * width_of(in_floats);
    const char *x = (const char *)a->x.data + row * a->x.stride[0] * width_of(is_wide);
    BY_WIDTH(is_wide, NAME(add_row), in_floats, residual, x, a->post_weight.data, (float)a->scale, (float)a->post_eps, hidden);
    NAME(norm_row)(in_floats, out, residual, a->weight.data, hidden, (float)a->eps);
}

static void NAME(add_norm_rows)(const void *job, int64_t begin, int64_t end) {
    const add_rms_norm_args *a = job;
    for (int64_t row = begin; row < end; row++) BY_WIDTH(IS_WIDE(a->residual), NAME(add_norm_row), a, row);
}

KERNEL(rms_norm) { parallel(threads, NAME(norm_rows), a, a->x.size[0], items_of(PARALLEL_WORK, a->x.size[1])); }

KERNEL(add_rms_norm) { parallel(threads, NAME(add_norm_rows), a, a->x.size[0], items_of(PARALLEL_WORK, a->x.size[1])); }
