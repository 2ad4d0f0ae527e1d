/* RMSNorm, alone and behind a residual add; see rms_norm.py for the formula and the shapes. */
#include "native.h"

static void NAME(norm_row)(element *out, element *residual, const element *x, const element *weight, int64_t hidden,
                           float eps) {
    const element *source = residual ? residual : x;
    vec squares = splat(0.0f);
    float rest = 0.0f;
    int64_t i = 0;
    for (; i + LANES <= hidden; i += LANES) {
        if (residual) store(residual + i, load(residual + i) + load(x + i));
        vec v = load(source + i);
        squares += v * v;
    }
    for (; i < hidden; i++) {
        if (residual) residual[i] = narrow(widen(residual[i]) + widen(x[i]));
        float v = widen(source[i]);
        rest += v * v;
    }
    float scale = 1.0f / sqrtf((sum_lanes(squares) + rest) / (float)hidden + eps);
    for (i = 0; i + LANES <= hidden; i += LANES) store(out + i, load(source + i) * scale * load(weight + i));
    for (; i < hidden; i++) out[i] = narrow(widen(source[i]) * scale * widen(weight[i]));
}

static void NAME(norm_rows)(const void *job, int64_t begin, int64_t end) {
    const rms_norm_args *a = job;
    int64_t hidden = a->x.size[1];
    for (int64_t row = begin; row < end; row++) {
        element *out = (element *)a->out.data + row * hidden;
        NAME(norm_row)(out, 0, (const element *)a->x.data + row * a->x.stride[0], a->weight.data, hidden, (float)a->eps);
    }
}

static void NAME(add_norm_rows)(const void *job, int64_t begin, int64_t end) {
    const add_rms_norm_args *a = job;
    int64_t hidden = a->x.size[1];
    for (int64_t row = begin; row < end; row++) {
        element *out = (element *)a->out.data + row * hidden, *residual = (element *)a->residual.data + row * hidden;
        const element *x = (const element *)a->x.data + row * a->x.stride[0];
        NAME(norm_row)(out, residual, x, a->weight.data, hidden, (float)a->eps);
    }
}

KERNEL(rms_norm) { parallel(threads, NAME(norm_rows), a, a->x.size[0], items_of(PARALLEL_WORK, a->x.size[1])); }

KERNEL(add_rms_norm) { parallel(threads, NAME(add_norm_rows), a, a->x.size[0], items_of(PARALLEL_WORK, a->x.size[1])); }
