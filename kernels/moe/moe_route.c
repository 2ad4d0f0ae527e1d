/* Routing of tokens to experts, and the weighted sum of what these gave; see moe_route.py for formulas and shapes. */
#include "native.h"

#define LOWEST -3e38f

/* List the pairs by expert, in their own order: `offsets` counts, then says where the next pair goes, then is set back. */
static void list_pairs(int32_t *order, int32_t *offsets, const int32_t *ids, int64_t pairs, int64_t experts) {
    memset(offsets, 0, (experts + 1) * sizeof *offsets);
    for (int64_t pair = 0; pair < pairs; pair++)
        if (ids[pair] >= 0) offsets[ids[pair] + 1]++;
    for (int64_t expert = 0; expert < experts; expert++) offsets[expert + 1] += offsets[expert];
    for (int64_t pair = 0; pair < pairs; pair++)
        if (ids[pair] >= 0) order[offsets[ids[pair]]++] = (int32_t)pair;
    for (int64_t expert = experts; expert > 0; expert--) offsets[expert] = offsets[expert - 1];
    offsets[0] = 0;
}

/* Keep the largest logits of a row in `top`, the largest first; ties in order. */
static void choose_experts(int32_t *ids, float *top, const element *logits, int64_t experts, int64_t slots) {
    int64_t filled = 0;
    for (int64_t expert = 0; expert < experts; expert++) {
        float logit = widen(logits[expert]);
        logit = logit > LOWEST ? logit : LOWEST;
        if (filled == slots && !(logit > top[slots - 1])) continue;
        int64_t at = filled < slots ? filled++ : slots - 1;
        for (; at > 0 && logit > top[at - 1]; at--) top[at] = top[at - 1], ids[at] = ids[at - 1];
        top[at] = logit, ids[at] = (int32_t)expert;
    }
}

static void route_rows(const void *job, int64_t begin, int64_t end) {
    const moe_route_args *a = job;
    int64_t experts = a->logits.size[1], slots = a->ids.size[1], live = live_of(a->live.data, a->ids.size[0]);
    for (int64_t row = begin; row < end; row++) {
        int32_t *ids = a->ids.data + row * slots;
        float *weights = a->weights.data + row * slots, total = 0.0f;
        const element *logits = (const element *)a->logits.data + row * a->logits.stride[0];
        if (row >= live) {
            for (int64_t slot = 0; slot < slots; slot++) ids[slot] = -1, weights[slot] = 0.0f;
            continue;
        }
        choose_experts(ids, weights, logits, experts, slots);
        float largest = weights[0];
        for (int64_t expert = 0; expert < experts && !a->renormalize; expert++) {
            float logit = widen(logits[expert]);
            total += expf((logit > LOWEST ? logit : LOWEST) - largest);
        }
        for (int64_t slot = 0; slot < slots; slot++) {
            weights[slot] = expf(weights[slot] - largest);
            if (a->renormalize) total += weights[slot];
        }
        for (int64_t slot = 0; slot < slots; slot++) weights[slot] /= total;
    }
}

KERNEL(moe_route) {
    int64_t rows = a->ids.size[0], experts = a->logits.size[1];
    parallel(threads, route_rows, a, rows, items_of(PARALLEL_WORK, 4 * experts));
    list_pairs(a->order.data, a->offsets.data, a->ids.data, rows * a->ids.size[1], experts);
}

/* One row: `vectors` vectors of it at a time, whose sums stay in registers; `vectors` is a constant. */
INLINE void combine_columns(const int vectors, const int is_wide, const int in_floats, const moe_combine_args *a,
                                  int64_t row, int64_t from, float share) {
    int64_t hidden = a->out.size[1], slots = a->ids.size[1];
    char *out = (char *)a->out.data + (row * hidden + from) * width_of(is_wide);
    vec sums[4];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) sums[v] = a->gate.data ? load_at(is_wide, out, v * LANES) * share : splat(0.0f);
    for (int64_t pair = row * slots; pair < (row + 1) * slots; pair++) {
        if (a->ids.data[pair] < 0) continue; /* the parts of a dead row are not written */
        const char *part = (const char *)a->parts.data + (pair * hidden + from) * width_of(in_floats);
        float weight = a->weights.data[pair];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sums[v] += load_at(in_floats, part, v * LANES) * weight;
    }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) store_at(is_wide, out, v * LANES, sums[v]);
}

/* One row; `is_wide` is of the sum, `in_floats` of its parts. */
INLINE void combine_row(const int is_wide, const int in_floats, const moe_combine_args *a, int64_t row, float share) {
    int64_t hidden = a->out.size[1], slots = a->ids.size[1], i = 0;
    for (; i + 4 * LANES <= hidden; i += 4 * LANES) combine_columns(4, is_wide, in_floats, a, row, i, share);
    for (; i + LANES <= hidden; i += LANES) combine_columns(1, is_wide, in_floats, a, row, i, share);
    for (; i < hidden; i++) {
        int64_t offset = row * hidden + i;
        float sum = a->gate.data ? widen_at(is_wide, a->out.data, offset) * share : 0.0f;
        for (int64_t pair = row * slots; pair < (row + 1) * slots; pair++)
            if (a->ids.data[pair] >= 0)
                sum += widen_at(in_floats, a->parts.data, pair * hidden + i) * a->weights.data[pair];
        narrow_at(is_wide, a->out.data, offset, sum);
    }
}

static void combine_rows(const void *job, int64_t begin, int64_t end) {
    const moe_combine_args *a = job;
    int is_wide = IS_WIDE(a->out), in_floats = IS_WIDE(a->parts);
    for (int64_t row = begin; row < end; row++) {
        float share = 0.0f;
        if (a->gate.data) {
            float gate = widen_at(IS_WIDE(a->gate), a->gate.data, row * a->gate.stride[0]);
            share = 1.0f / (1.0f + expf(-gate));
        }
        if (is_wide && in_floats) combine_row(1, 1, a, row, share);
        else if (is_wide) combine_row(1, 0, a, row, share);
        else if (in_floats) combine_row(0, 1, a, row, share);
        else combine_row(0, 0, a, row, share);
    }
}

KERNEL(moe_combine) {
    int64_t work = a->out.size[1] * (a->ids.size[1] + 1);
    parallel(threads, combine_rows, a, a->out.size[0], items_of(PARALLEL_WORK, work));
}
