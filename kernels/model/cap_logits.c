/* Soft cap of logits; see cap_logits.py for the formula. */
#include "native.h"

#ifndef GRAPHDECODE_CAP_LOGITS
#define GRAPHDECODE_CAP_LOGITS
static inline vec capped(vec logits, float cap) { /* tanh(x) = 1 - 2 / (e^2x + 1) */
    return cap - 2.0f * cap / (exp_lanes(logits * (2.0f / cap)) + 1.0f);
}
#endif

static void NAME(cap_rows)(const void *job, int64_t begin, int64_t end) {
    const cap_logits_args *a = job;
    int64_t width = a->logits.size[1];
    for (int64_t row = begin; row < end; row++) {
        element *at = (element *)a->logits.data + row * width, tail[LANES] = {0};
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) store(at + i, capped(load(at + i), (float)a->cap));
        memcpy(tail, at + i, (width - i) * sizeof(element));
        store(tail, capped(load(tail), (float)a->cap));
        memcpy(at + i, tail, (width - i) * sizeof(element));
    }
}

KERNEL(cap_logits) {
    parallel(threads, NAME(cap_rows), a, a->logits.size[0], items_of(PARALLEL_WORK, a->logits.size[1]));
}
