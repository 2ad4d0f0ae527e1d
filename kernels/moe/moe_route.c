/* Routing of tokens to experts; see moe_route.py for the formula and the shapes. */
#include "native.h"

#ifndef GRAPHDECODE_MOE_ROUTE
#define GRAPHDECODE_MOE_ROUTE
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
#endif

/* Keep the largest logits of a row in `top`, the largest first; a later one goes behind its equals. */
static void NAME(choose)(int32_t *ids, float *top, const element *logits, int64_t experts, int64_t slots) {
    int64_t held = 0;
    for (int64_t expert = 0; expert < experts; expert++) {
        float logit = widen(logits[expert]);
        logit = logit > LOWEST ? logit : LOWEST;
        if (held == slots && !(logit > top[slots - 1])) continue;
        int64_t at = held < slots ? held++ : slots - 1;
        for (; at > 0 && logit > top[at - 1]; at--) top[at] = top[at - 1], ids[at] = ids[at - 1];
        top[at] = logit, ids[at] = (int32_t)expert;
    }
}

static void NAME(route_rows)(const void *job, int64_t begin, int64_t end) {
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
        NAME(choose)(ids, weights, logits, experts, slots);
        float largest = weights[0];
        for (int64_t expert = 0; expert < experts && !a->renormalise; expert++) {
            float logit = widen(logits[expert]);
            total += expf((logit > LOWEST ? logit : LOWEST) - largest);
        }
        for (int64_t slot = 0; slot < slots; slot++) {
            weights[slot] = expf(weights[slot] - largest);
            if (a->renormalise) total += weights[slot];
        }
        for (int64_t slot = 0; slot < slots; slot++) weights[slot] /= total;
    }
}

KERNEL(moe_route) {
    int64_t rows = a->ids.size[0], experts = a->logits.size[1];
    parallel(threads, NAME(route_rows), a, rows, items_of(PARALLEL_WORK, 4 * experts));
    list_pairs(a->order.data, a->offsets.data, a->ids.data, rows * a->ids.size[1], experts);
}
