/* Sums across the lanes of vectors: of as many vectors as a vector has lanes, two at a time. */
#ifndef GRAPHDECODE_FOLD_LANES_H
#define GRAPHDECODE_FOLD_LANES_H

#include "native.h"

/* Lanes of two vectors: of each, from `from` on, the next `width` of every 2 * width. */
#define LANE(n, width, from) \
    ((n) / (LANES / 2) * LANES + (n) % (LANES / 2) / (width) * 2 * (width) + (n) % (width) + (from))
#define LANES_4(n, ...) LANE(n, __VA_ARGS__), LANE(n + 1, __VA_ARGS__), LANE(n + 2, __VA_ARGS__), LANE(n + 3, __VA_ARGS__)
#if LANES == 16
#define ALL_LANES(...) \
    LANES_4(0, __VA_ARGS__), LANES_4(4, __VA_ARGS__), LANES_4(8, __VA_ARGS__), LANES_4(12, __VA_ARGS__)
#elif LANES == 8
#define ALL_LANES(...) LANES_4(0, __VA_ARGS__), LANES_4(4, __VA_ARGS__)
#else
#define ALL_LANES(...) LANES_4(0, __VA_ARGS__)
#endif
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
#define FOLD(width) (SHUFFLE(a, b, ALL_LANES(width, 0)) + SHUFFLE(a, b, ALL_LANES(width, width)))

/* Add lanes of two vectors to the ones `width` beside them; `width` is a constant where this is used. */
INLINE vec fold_pair(const int width, vec a, vec b) {
#if LANES >= 16
    if (width == 8) return FOLD(8);
#endif
#if LANES >= 8
    if (width == 4) return FOLD(4);
#endif
    return width == 2 ? FOLD(2) : FOLD(1);
}
#endif
