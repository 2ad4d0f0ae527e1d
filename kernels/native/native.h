/* What the CPU kernels share: vectors of floats, bf16 and fp16, the exponential, and how arguments arrive.
 *
 * All kernels are compiled once for each element type, in libraries of its own: ELEMENT_F32, ELEMENT_BF16 or ELEMENT_F16 is
 * defined, and NAME() gives a function its type's ending. Vectors are GCC's and Clang's own. What a family of processors
 * does in fewer instructions stands in a header of its own: native_x86.h, native_arm.h. Sums run in an order that depends on
 * the row alone: not on how many rows there are, which other rows, or how many threads.
 */
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "native_threads.h"

/* the processor's registers: the compiler splits wider vectors badly */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define PARALLEL_WORK 8192 /* fewer elements are not shared between threads */

static inline int64_t items_of(int64_t work, int64_t item) { return 1 + work / (item > 0 ? item : 1); }

#define INLINE static inline __attribute__((always_inline)) /* for constants that unroll loops */
#define NOINLINE static __attribute__((noinline)) /* so that its loops have all registers */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));

/* Kernels are given one struct, which is made from the operation's signature (registration.py): a tensor is where it
 * begins, its sizes, its strides in elements and what its elements are where that can differ; null is no tensor. */
#define TENSOR(type)             \
    struct {                     \
        type *data;              \
        int64_t size[4];         \
        int64_t stride[4];       \
        int64_t code;            \
    }

#define HAND_OVER(to, from) memcpy(&(to), &(from), sizeof(to)) /* a tensor, whose struct has no name */

/* A kernel of an operation: it sees its arguments as `a`, and may have `threads` threads for each job of its. All kernels
 * have one type, so that a list of them can be run in one call. */
#define KERNEL(operation)                                                              \
    static void NAME(operation##_of)(const operation##_args *a, int64_t threads);      \
    void NAME(operation)(const void *args, int threads) {                          \
        NAME(operation##_of)(args, threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads); \
    }                                                                                  \
    static void NAME(operation##_of)(const operation##_args *a, int64_t threads)

/* Tensors that are floats or, where these are narrower, elements (`Wide` in registration.py): which they are is a constant
 * in BY_WIDTH's functions; values are `i` behind `at`. */
#define IS_WIDE(tensor) (sizeof(element) == sizeof(float) || (tensor).code == CODE_WIDE)
#define BY_WIDTH(is_wide, function, ...)         \
    do {                                         \
        if (is_wide) function(1, __VA_ARGS__);   \
        else function(0, __VA_ARGS__);           \
    } while (0)
#define width_of(is_wide) ((is_wide) ? sizeof(float) : sizeof(element))
#define load_at(is_wide, at, i) ((is_wide) ? load_f32((const float *)(at) + (i)) : load((const element *)(at) + (i)))
#define widen_at(is_wide, at, i) ((is_wide) ? ((const float *)(at))[i] : widen(((const element *)(at))[i]))
#define store_at(is_wide, at, i, values)                       \
    do {                                                       \
        if (is_wide) store_f32((float *)(at) + (i), values);   \
        else store((element *)(at) + (i), values);             \
    } while (0)
#define narrow_at(is_wide, at, i, value)                       \
    do {                                                       \
        if (is_wide) ((float *)(at))[i] = value;               \
        else ((element *)(at))[i] = narrow(value);             \
    } while (0)

static inline int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

/* The number of live rows, within bounds. */
static inline int64_t live_of(const int32_t *live, int64_t rows) { return *live < 0 ? 0 : least_of(*live, rows); }

static float *thread_floats(int which, int64_t floats) {
    size_t bytes = (size_t)(floats > 0 ? floats : 1) * sizeof(float);
    if (bytes > thread_memory[which].size) {
        free(thread_memory[which].at);
        thread_memory[which].size = (bytes + 4095) / 4096 * 4096;
        thread_memory[which].at = aligned_alloc(64, thread_memory[which].size);
        if (!thread_memory[which].at) { /* not reached if Linux overcommits memory */
            fprintf(stderr, "graphdecode: no memory for %zu bytes of a kernel's workspace\n", thread_memory[which].size);
            abort();
        }
        pthread_setspecific(memory_keys[which], thread_memory[which].at);
    }
    return thread_memory[which].at;
}

/* Memory of the calling thread, at least so many floats, aligned to a vector, valid until the next call. It is reused by the
 * next kernels: a step that has run before allocates nothing. */
static float *scratch(int64_t floats) { return thread_floats(0, floats); }

/* The same, beside it: for what a kernel's parts, which have scratch of their own, leave for its end. */
static float *lasting(int64_t floats) { return thread_floats(1, floats); }

/* The next `count` floats of `*at`, which goes on behind them, to the next whole vector. */
static inline float *carved(float **at, int64_t count) {
    float *start = *at;
    *at += (count + LANES - 1) / LANES * LANES;
    return start;
}

/* `value` in all lanes: not added to zeros, which takes an instruction. */
static inline vec splat(float value) {
#if LANES == 16
    return (vec){value, value, value, value, value, value, value, value,
                 value, value, value, value, value, value, value, value};
#elif LANES == 8
    return (vec){value, value, value, value, value, value, value, value};
#else
    return (vec){value, value, value, value};
#endif
}

static inline ivec lane_numbers(void) {
    ivec numbers;
    for (int lane = 0; lane < LANES; lane++) numbers[lane] = lane;
    return numbers;
}

static inline float sum_lanes(vec v) {
#if LANES == 4
    return (v[0] + v[2]) + (v[1] + v[3]);
#else /* by halves, in registers */
    typedef float quarter __attribute__((vector_size(16)));
    quarter parts[LANES / 4];
    memcpy(parts, &v, sizeof v);
    for (int width = LANES / 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) parts[i] += parts[i + width];
    return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
#endif
}

static inline float float_of_bf16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

static inline uint16_t bf16_of_float(float value) { /* to nearest, ties to even; a NaN stays one */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline vec load_f32(const float *at) {
    vec v;
    memcpy(&v, at, sizeof v);
    return v;
}

static inline void store_f32(float *at, vec v) { memcpy(at, &v, sizeof v); }

enum { FRESH, AS_THEY_ARE, SHRUNK }; /* what sums begin with: nothing, what stands there, or that times a vector */

/* to[m][lane] = what stands there or nothing, plus the sum of a[m * row + k * step] * b[k][lane] over `steps` k, for `rows`
 * m and `vectors` vectors of lanes; `rows`, `vectors` and `begin` are constants where this is used, and rows of `to` and
 * `b` are `padded` long. */
INLINE void add_lanes(const int rows, const int vectors, const int begin, float *to, const float *shrink, const float *a,
                      int64_t row, int64_t step, const float *b, int64_t steps, int64_t padded) {
    vec sums[8][8], lanes[8];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            sums[m][v] = begin == FRESH ? splat(0.0f) : load_f32(to + m * padded + v * LANES);
            if (begin == SHRUNK) sums[m][v] *= load_f32(shrink + v * LANES);
        }
    for (int64_t k = 0; k < steps; k++) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            vec lane = load_f32(b + k * padded + v * LANES);
#if LANES > 4
            __asm__("" : "+v"(lane)); /* GCC would reload it for each row */
#endif
            lanes[v] = lane;
        }
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) {
            vec factor = splat(a[m * row + k * step]);
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) sums[m][v] += lanes[v] * factor;
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) store_f32(to + m * padded + v * LANES, sums[m][v]);
}

static inline uvec load_words(const void *at) {
    uvec words;
    memcpy(&words, at, sizeof words);
    return words;
}

static inline void store_words(void *at, uvec words) { memcpy(at, &words, sizeof words); }

/* A family's header defines some of these functions, each with a macro of its name; else they are the compiler's. */
#if LANES > 4
#include "native_x86.h"
#elif defined(__ARM_NEON) && !defined(PORTABLE)
#include "native_arm.h"
#endif

#ifndef load_bytes /* bytes in words of 32 bits */
static inline uvec load_bytes(const void *at) {
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    bytes narrow;
    memcpy(&narrow, at, sizeof narrow);
    return __builtin_convertvector(narrow, uvec);
}
#endif

static inline vec load_i8(const void *at) { return __builtin_convertvector((ivec)(load_bytes(at) ^ 128) - 128, vec); }

#ifndef load_halves /* values of 16 bits in words, and the lower halves of words */
static inline uvec load_halves(const uint16_t *at) {
    hvec narrow;
    memcpy(&narrow, at, sizeof narrow);
    return __builtin_convertvector(narrow, uvec);
}

static inline void store_halves(uint16_t *at, uvec words) {
    hvec narrow = __builtin_convertvector(words, hvec);
    memcpy(at, &narrow, sizeof narrow);
}
#endif

static inline vec load_bf16(const uint16_t *at) { return (vec)(load_halves(at) << 16); }

#ifndef store_bf16
static inline void store_bf16(uint16_t *at, vec v) {
    uvec bits = (uvec)v;
    uvec rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    uvec is_nan = (uvec)((bits & 0x7fffffff) > 0x7f800000);
    store_halves(at, (is_nan & (bits >> 16 | 0x40)) | (~is_nan & rounded));
}
#endif

/* Lanes of two vectors, each in parts of `width`: those with even numbers, or odd ones. */
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
#define PARTED(width) odd ? SHUFFLE(a, b, ALL_LANES(width, width)) : SHUFFLE(a, b, ALL_LANES(width, 0))

/* `width` and `odd` are constants where this is used. */
INLINE vec parted(const int width, const int odd, vec a, vec b) {
#if LANES >= 16
    if (width == 8) return PARTED(8);
#endif
#if LANES >= 8
    if (width == 4) return PARTED(4);
#endif
    return width == 2 ? PARTED(2) : PARTED(1);
}

#ifndef write_turned /* to[j][i] = given[i][j] of LANES x LANES words */
INLINE void write_turned(void *at, int64_t stride, const uvec *src) {
    vec rows[LANES], next[LANES];
    memcpy(rows, src, sizeof rows);
#pragma GCC unroll 4
    for (int width = LANES / 2; width > 0; width /= 2) {
#pragma GCC unroll 16
        for (int n = 0; n < LANES; n++) { /* groups of 2 * width rows, whose parts go to the halves of each */
            int pair = n / (2 * width) * 2 * width + n % width * 2, odd = n / width % 2;
            next[n] = parted(width, odd, rows[pair], rows[pair + 1]);
        }
        memcpy(rows, next, sizeof rows);
    }
#pragma GCC unroll 16
    for (int n = 0; n < LANES; n++) store_f32((float *)at + n * stride, rows[n]);
}
#endif

#ifndef greater_of /* these are NaN where `b` is */
INLINE vec greater_of(vec a, vec b) {
    ivec chosen = a > b;
    return (vec)((chosen & (ivec)a) | (~chosen & (ivec)b));
}

INLINE vec lesser_of(vec a, vec b) {
    ivec chosen = a < b;
    return (vec)((chosen & (ivec)a) | (~chosen & (ivec)b));
}

static inline int any_lane(ivec lanes) { /* of a comparison */
    int32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits |= lanes[lane];
    return bits != 0;
}
#endif

/* e^v to about 2 ulp: 2^n times a polynomial of the rest, |rest| <= ln(2) / 2; 0 below the smallest normal float. */
static inline vec exp_lanes(vec v) {
    ivec tiny = v < -87.0f;
    vec clamped = lesser_of(splat(88.0f), greater_of(splat(-87.0f), v));
    vec shifted = clamped * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: what is left of the fraction is rounded off */
    vec n = shifted - 12582912.0f;
    vec fraction = clamped - n * 0.693359375f;
    fraction = fraction + n * 2.12194440e-4f; /* ln(2) in two parts, the first of few bits */
    vec sum = splat(1.0f / 5040);
    sum = sum * fraction + 1.0f / 720;
    sum = sum * fraction + 1.0f / 120;
    sum = sum * fraction + 1.0f / 24;
    sum = sum * fraction + 1.0f / 6;
    sum = sum * fraction + 0.5f;
    sum = sum * fraction + 1.0f;
    sum = sum * fraction + 1.0f;
    ivec exponent = (__builtin_convertvector(n, ivec) + 127) << 23;
    vec power = sum * (vec)exponent;
    return (vec)(~tiny & (ivec)power);
}

/* tanh: 1 - 2 / (e^2x + 1), and of small x its series, for the difference would cancel. */
static inline vec tanh_lanes(vec x) {
    vec square = x * x, far = 1.0f - 2.0f / (exp_lanes(x + x) + 1.0f);
    vec near = x * (1.0f + square * (-0.33333334f + square * (0.13333334f + square * -0.053968254f)));
    ivec is_near = square < 0.04f;
    return (vec)((is_near & (ivec)near) | (~is_near & (ivec)far));
}

#ifndef float_of_f16 /* to nearest, ties to even; what is too large becomes infinite, a NaN stays one */
static inline float float_of_f16(uint16_t value) {
    _Float16 half;
    memcpy(&half, &value, sizeof half);
    return (float)half;
}

static inline uint16_t f16_of_float(float value) {
    _Float16 half = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}
#endif

#ifndef load_f16
static inline vec load_f16(const uint16_t *at) {
    vec wide;
    for (int lane = 0; lane < LANES; lane++) wide[lane] = float_of_f16(at[lane]);
    return wide;
}

static inline void store_f16(uint16_t *at, vec v) {
    for (int lane = 0; lane < LANES; lane++) at[lane] = f16_of_float(v[lane]);
}
#endif

#if defined(ELEMENT_BF16)
#define NAME(kernel) kernel##_bf16
#define element uint16_t
#define load load_bf16
#define store store_bf16
#define widen float_of_bf16
#define narrow bf16_of_float
#elif defined(ELEMENT_F16)
#define NAME(kernel) kernel##_f16
#define element uint16_t
#define load load_f16
#define store store_f16
#define widen float_of_f16
#define narrow f16_of_float
#else
#define NAME(kernel) kernel##_f32
#define element float
#define load load_f32
#define store store_f32
#define widen(value) (value)
#define narrow(value) (value)
#endif

/* Some values of a tensor of floats or elements as floats, and back: one copy of each, which compiles once. */
NOINLINE void read_floats(float *to, int64_t is_wide, const void *from, int64_t i, int64_t count) {
    const element *at = (const element *)from + i;
    int64_t done = 0;
    if (is_wide) memcpy(to, (const float *)from + i, count * sizeof *to), done = count;
    for (; done + LANES <= count; done += LANES) store_f32(to + done, load(at + done));
    for (; done < count; done++) to[done] = widen(at[done]);
}

NOINLINE void write_floats(int64_t is_wide, void *to, int64_t i, const float *from, int64_t count) {
    element *at = (element *)to + i;
    int64_t done = 0;
    if (is_wide) memcpy((float *)to + i, from, count * sizeof *from), done = count;
    for (; done + LANES <= count; done += LANES) store(at + done, load_f32(from + done));
    for (; done < count; done++) at[done] = narrow(from[done]);
}
