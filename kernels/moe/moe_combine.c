/* The weighted sum of what a row's experts gave; see moe_combine.py. */
#include "native.h"

/* One row: `vectors` vectors of it at a time, whose sums stay in registers; `vectors` is a constant. */
INLINE void NAME(combine_columns)(const int vectors, const int is_wide, const int in_floats, const moe_combine_args *a,
                                  int64_t row, int64_t from, float share) {
    int64_t hidden = a->out.size[1], slots = a->ids.size[1];
    char *out = (char *)a->out.data + (row * hidden + from) * width_of(is_wide);
    vec sums[4];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) sums[v] = a->gate.data ? load_at(is_wide, out, v * LANES) * share : splat(0.0f);
    for (int64_t pair = row * slots; pair < (row + 1) * slots; pair++) {
        if (a->ids.data[pair] < 0) continue; /* nobody has written the parts of a dead row */
        const char *part = (const char *)a->parts.data + (pair * hidden + from) * width_of(in_floats);
        float weight = a->weights.data[pair];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sums[v] += load_at(in_floats, part, v * LANES) * weight;
    }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) store_at(is_wide, out, v * LANES, sums[v]);
}

/* One row; `is_wide` is of the sum, `in_floats` of its parts. */
INLINE void NAME(combine_row)(const int is_wide, const int in_floats, const moe_combine_args *a, int64_t row, float share) {
    int64_t hidden = a->out.size[1], slots = a->ids.size[1], i = 0;
    for (; i + 4 * LANES <= hidden; i += 4 * LANES) NAME(combine_columns)(4, is_wide, in_floats, a, row, i, share);
    for (; i + LANES <= hidden; i += LANES) NAME(combine_columns)(1, is_wide, in_floats, a, row, i, share);
    for (; i < hidden; i++) {
        int64_t place = row * hidden + i;
        float sum = a->gate.data ? widen_at(is_wide, a->out.data, place) * share : 0.0f;
        for (int64_t pair = row * slots; pair < (row + 1) * slots; pair++)
            if (a->ids.data[pair] >= 0)
                sum += widen_at(in_floats, a->parts.data, pair * hidden + i) * a->weights.data[pair];
        narrow_at(is_wide, a->out.data, place, sum);
    }
}

static void NAME(combine_rows)(const void *job, int64_t begin, int64_t end) {
    const moe_combine_args *a = job;
    int is_wide = IS_WIDE(a->out), in_floats = IS_WIDE(a->parts);
    for (int64_t row = begin; row < end; row++) {
        float share = 0.0f;
        if (a->gate.data) {
            float gate = widen_at(IS_WIDE(a->gate), a->gate.data, row * a->gate.stride[0]);
            share = 1.0f / (1.0f + expf(-gate));
        }
        if (is_wide && in_floats) NAME(combine_row)(1, 1, a, row, share);
        else if (is_wide) NAME(combine_row)(1, 0, a, row, share);
        else if (in_floats) NAME(combine_row)(0, 1, a, row, share);
        else NAME(combine_row)(0, 0, a, row, share);
    }
}

KERNEL(moe_combine) {
    int64_t work = a->out.size[1] * (a->ids.size[1] + 1);
    parallel(threads, NAME(combine_rows), a, a->out.size[0], items_of(PARALLEL_WORK, work));
}
