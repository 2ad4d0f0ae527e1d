/* Soft cap of logits; see cap_logits.py for the formula. */
#include "native.h"

static void NAME(cap_rows)(const void *job, int64_t begin, int64_t end) {
    const cap_logits_args *a = job;
    float cap = (float)a->cap, part = 1.0f / cap;
    int64_t width = a->logits.size[1];
    for (int64_t row = begin; row < end; row++) {
        element *at = (element *)a->logits.data + row * width, tail[LANES] = {0};
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) store(at + i, cap * tanh_lanes(load(at + i) * part));
        memcpy(tail, at + i, (width - i) * sizeof(element));
        store(tail, cap * tanh_lanes(load(tail) * part));
        memcpy(at + i, tail, (width - i) * sizeof(element));
    }
}

KERNEL(cap_logits) {
    parallel(threads, NAME(cap_rows), a, a->logits.size[0], items_of(PARALLEL_WORK, a->logits.size[1]));
}
