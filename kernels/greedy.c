/* The most likely token of each row that wants nothing else; see greedy.py. */
#include "native.h"

/* The first index of the largest value, or of the first NaN. */
static int64_t NAME(argmax)(const element *x, int64_t count) {
    float best = -INFINITY;
    int64_t found = 0, i = 0;
    for (; i + LANES <= count; i += LANES) {
        vec v = load(x + i);
        ivec beats = ~(v <= best); /* a NaN beats all */
        int64_t any = 0;
        for (int lane = 0; lane < LANES; lane++) any |= beats[lane];
        if (!any) continue;
        for (int lane = 0; lane < LANES; lane++) {
            if (v[lane] != v[lane]) return i + lane;
            if (v[lane] > best) best = v[lane], found = i + lane;
        }
    }
    for (; i < count; i++) {
        float value = widen(x[i]);
        if (value != value) return i;
        if (value > best) best = value, found = i;
    }
    return found;
}

/* sampled, logits, sampling_flags, live_rows, flags that a greedy row may have, vocabulary, stride of logits */
void NAME(greedy)(const arg *args) {
    int64_t *sampled = args[0].p;
    const element *logits = args[1].p;
    const int32_t *flags = args[2].p;
    int32_t live = *(const int32_t *)args[3].p;
    for (int64_t row = 0; row < live; row++)
        if ((flags[row] & ~args[4].i) == 0) sampled[row] = NAME(argmax)(logits + row * args[6].i, args[5].i);
}
