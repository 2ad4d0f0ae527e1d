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
    const arg *args = job;
    element *out = args[0].p, *residual = args[1].p;
    const element *x = args[2].p, *weight = args[3].p;
    int64_t hidden = args[5].i, stride = args[6].i;
    float eps = (float)args[7].d;
    for (int64_t row = begin; row < end; row++)
        NAME(norm_row)
    (out + row * hidden, residual ? residual + row * hidden : 0, x + row * stride, weight, hidden, eps);
}

/* out, residual or null, x, weight, rows, hidden, stride of x, eps */
void NAME(rms_norm)(const arg *args) {
    parallel(NAME(norm_rows), args, args[4].i, items_of(PARALLEL_WORK, args[5].i));
}
