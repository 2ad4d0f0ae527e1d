/* RMSNorm, alone and behind a residual add; see rms_norm.py for the formulas and the shapes. */
#include "native.h"

/* One over the root of the mean square of a row. */
static float NAME(inverse_rms)(const element *x, int64_t hidden, float eps) {
    vec squares = splat(0.0f);
    float rest = 0.0f;
    int64_t i = 0;
    for (; i + LANES <= hidden; i += LANES) squares += load(x + i) * load(x + i);
    for (; i < hidden; i++) rest += widen(x[i]) * widen(x[i]);
    return 1.0f / sqrtf((sum_lanes(squares) + rest) / (float)hidden + eps);
}

static void NAME(norm_row)(element *out, const element *x, const float *weight, int64_t hidden, float eps) {
    float scale = NAME(inverse_rms)(x, hidden, eps);
    int64_t i = 0;
    for (; i + LANES <= hidden; i += LANES) store(out + i, load(x + i) * scale * load_f32(weight + i));
    for (; i < hidden; i++) out[i] = narrow(widen(x[i]) * scale * weight[i]);
}

static void NAME(add_row)(element *residual, const element *x, const float *gain, float scale, int64_t hidden) {
    int64_t i = 0;
    if (gain) {
        for (; i + LANES <= hidden; i += LANES)
            store(residual + i, load(residual + i) + load(x + i) * scale * load_f32(gain + i));
        for (; i < hidden; i++) residual[i] = narrow(widen(residual[i]) + widen(x[i]) * scale * gain[i]);
        return;
    }
    for (; i + LANES <= hidden; i += LANES) store(residual + i, load(residual + i) + load(x + i) * scale);
    for (; i < hidden; i++) residual[i] = narrow(widen(residual[i]) + widen(x[i]) * scale);
}

static void NAME(norm_rows)(const void *job, int64_t begin, int64_t end) {
    const rms_norm_args *a = job;
    int64_t hidden = a->x.size[1];
    for (int64_t row = begin; row < end; row++) {
        const element *x = (const element *)a->x.data + row * a->x.stride[0];
        NAME(norm_row)((element *)a->out.data + row * hidden, x, a->weight.data, hidden, (float)a->eps);
    }
}

static void NAME(add_norm_rows)(const void *job, int64_t begin, int64_t end) {
    const add_rms_norm_args *a = job;
    int64_t hidden = a->x.size[1];
    for (int64_t row = begin; row < end; row++) {
        element *out = (element *)a->out.data + row * hidden, *residual = (element *)a->residual.data + row * hidden;
        const element *x = (const element *)a->x.data + row * a->x.stride[0];
        float scale = (float)a->scale;
        if (a->post_weight.data) scale *= NAME(inverse_rms)(x, hidden, (float)a->post_eps);
        NAME(add_row)(residual, x, a->post_weight.data, scale, hidden);
        if (a->weight.data) NAME(norm_row)(out, residual, a->weight.data, hidden, (float)a->eps);
        else memcpy(out, residual, hidden * sizeof(element));
    }
}

KERNEL(rms_norm) { parallel(threads, NAME(norm_rows), a, a->x.size[0], items_of(PARALLEL_WORK, a->x.size[1])); }

KERNEL(add_rms_norm) { parallel(threads, NAME(add_norm_rows), a, a->x.size[0], items_of(PARALLEL_WORK, a->x.size[1])); }
