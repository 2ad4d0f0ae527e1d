/* The weighted sum of what a row's experts gave; see moe_combine.py. */
#include "native.h"

/* One row: `vectors` vectors of it at a time, whose sums stay in registers; `vectors` is a constant. */
INLINE void NAME(combine_columns)(const int vectors, const moe_combine_args *a, int64_t row, int64_t from, float share) {
    int64_t hidden = a->out.size[1], slots = a->ids.size[1];
    element *out = (element *)a->out.data + row * hidden + from;
    vec sums[4];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) sums[v] = a->gate.data ? load(out + v * LANES) * share : splat(0.0f);
    for (int64_t pair = row * slots; pair < (row + 1) * slots; pair++) {
        if (a->ids.data[pair] < 0) continue; /* nobody has written the parts of a dead row */
        const element *part = (const element *)a->parts.data + pair * hidden + from;
        float weight = a->weights.data[pair];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sums[v] += load(part + v * LANES) * weight;
    }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) store(out + v * LANES, sums[v]);
}

static void NAME(combine_rows)(const void *job, int64_t begin, int64_t end) {
    const moe_combine_args *a = job;
    int64_t hidden = a->out.size[1], slots = a->ids.size[1];
    for (int64_t row = begin; row < end; row++) {
        float share = 0.0f;
        if (a->gate.data) share = 1.0f / (1.0f + expf(-widen(((const element *)a->gate.data)[row * a->gate.stride[0]])));
        int64_t i = 0;
        for (; i + 4 * LANES <= hidden; i += 4 * LANES) NAME(combine_columns)(4, a, row, i, share);
        for (; i + LANES <= hidden; i += LANES) NAME(combine_columns)(1, a, row, i, share);
        for (; i < hidden; i++) {
            element *out = (element *)a->out.data + row * hidden + i;
            float sum = a->gate.data ? widen(*out) * share : 0.0f;
            for (int64_t pair = row * slots; pair < (row + 1) * slots; pair++)
                if (a->ids.data[pair] >= 0)
                    sum += widen(((const element *)a->parts.data)[pair * hidden + i]) * a->weights.data[pair];
            *out = narrow(sum);
        }
    }
}

KERNEL(moe_combine) {
    int64_t work = a->out.size[1] * (a->ids.size[1] + 1);
    parallel(threads, NAME(combine_rows), a, a->out.size[0], items_of(PARALLEL_WORK, work));
}
