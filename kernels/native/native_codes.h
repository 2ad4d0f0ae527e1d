/* Cached keys and values of 8 bits: how a head's values become codes, and codes values again.
 *
 * CODE_FLOAT8_E4M3FN has 4 bits of exponent and 3 of fraction, and 0x7f is no number; what is stored was divided by a
 * number that is the same for a whole layer. CODE_INT8 are integers of at most MOST_INT8 in size, and each head of each
 * token has a scale of its own, in bf16, beside the page. Both are exact in bf16: a scale is multiplied
 * with what codes come to, logits or weights, and not with each code.
 */
#pragma once

#include "native.h"

#define MOST_INT8 127
#define MOST_E4M3 448.0f
#define MOST_F16 65504.0f

INLINE vec load_e4m3(const uint8_t *at) {
    uvec wide = load_bytes(at), size = wide & 0x7f;
    uvec normal = (size << 20) + (120u << 23);                       /* a bias of 127 in place of 7 */
    uvec small = (uvec)(__builtin_convertvector((ivec)size, vec) * 0x1p-9f); /* below 2^-6, steps are of 2^-9 */
    uvec is_small = (uvec)(size < 8), is_nan = (uvec)(size == 0x7f);
    uvec bits = (is_small & small) | (~is_small & normal) | (is_nan & 0x7fc00000u);
    return (vec)(bits | (wide & 0x80) << 24);
}

INLINE vec load_codes(int64_t code, const uint8_t *at) {
    return code == CODE_INT8 ? load_i8(at) : load_e4m3(at);
}

#if LANES == 16 || defined(WITH_PAIRS)
#ifdef __AVX512VBMI__
/* The upper and lower bytes in bf16 of the sizes that 7 bits name. */
static uint8_t int8_upper[128], int8_lower[128], e4m3_upper[128], e4m3_lower[128];

__attribute__((constructor)) static void write_tables(void) {
    float wide[LANES];
    for (int first = 0; first < 128; first += LANES) {
        uint8_t codes[LANES];
        for (int i = 0; i < LANES; i++) codes[i] = (uint8_t)(first + i);
        store_f32(wide, load_e4m3(codes));
        for (int i = 0; i < LANES; i++) {
            uint16_t of_int8 = bf16_of_float((float)(first + i)), of_e4m3 = bf16_of_float(wide[i]);
            int8_upper[first + i] = (uint8_t)(of_int8 >> 8), int8_lower[first + i] = (uint8_t)of_int8;
            e4m3_upper[first + i] = (uint8_t)(of_e4m3 >> 8), e4m3_lower[first + i] = (uint8_t)of_e4m3;
        }
    }
}

INLINE __m512i looked_up(const uint8_t *table, __m512i sizes) {
    return _mm512_permutex2var_epi8(_mm512_loadu_si512(table), sizes, _mm512_loadu_si512(table + 64));
}
#endif

/* 2 * LANES codes in bf16; `code` is a constant where this is used. */
INLINE uvec bf16_of_codes(const int64_t code, const uint8_t *at) {
#ifdef __AVX512VBMI__
    const __m512i halves = _mm512_setr_epi64(0, 0, 1, 0, 2, 0, 3, 0); /* for each lane to have eight */
    __m512i codes = _mm512_permutexvar_epi64(halves, _mm512_castsi256_si512(_mm256_loadu_si256((const void *)at)));
    __m512i sizes = code == CODE_INT8 ? _mm512_abs_epi8(codes) : codes; /* the top bit is not looked at */
    __m512i upper = looked_up(code == CODE_INT8 ? int8_upper : e4m3_upper, sizes);
    __m512i lower = looked_up(code == CODE_INT8 ? int8_lower : e4m3_lower, sizes);
    upper = _mm512_ternarylogic_epi32(upper, codes, _mm512_set1_epi8((char)0x80), 0xf8); /* upper | (codes & sign) */
    return (uvec)_mm512_unpacklo_epi8(lower, upper);
#else
    uvec words;
    store_bf16((uint16_t *)&words, load_codes(code, at));
    store_bf16((uint16_t *)&words + LANES, load_codes(code, at + LANES));
    return words;
#endif
}
#endif

/* To nearest, ties to even; what is too large becomes the largest value, a NaN stays one. */
static inline uint8_t e4m3_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t size = bits & 0x7fffffff, sign = bits >> 24 & 0x80;
    if (size > 0x7f800000) return (uint8_t)(sign | 0x7f);
    float wide = fabsf(value) < MOST_E4M3 ? fabsf(value) : MOST_E4M3;
    memcpy(&bits, &wide, sizeof bits);
    if (wide < 0x1p-6f) return (uint8_t)(sign | (uint32_t)rintf(wide * 0x1p9f));
    return (uint8_t)(sign | (((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3)));
}

static inline void store_e4m3(uint8_t *to, const float *values, float unit, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = e4m3_of_float(values[i] / unit);
}

/* Sums and differences of channels that are `distance`. */
INLINE void butterflies(float *x, const int64_t distance, int64_t dim) {
    for (int64_t at = 0; at < dim; at += 2 * distance)
        for (int64_t i = at; i < at + distance; i++) {
            float first = x[i], second = x[i + distance];
            x[i] = first + second, x[i + distance] = first - second;
        }
}

/* A head times an orthonormal Hadamard matrix over its neighbouring channels, of which none is larger than `most` then; see
 * kv_format.py. */
static inline void mix_head(float *x, int64_t dim, float most) {
    const int64_t count = dim & -dim;
    if (count > 1) butterflies(x, 1, dim);
    if (count > 2) butterflies(x, 2, dim);
    if (count > 4) butterflies(x, 4, dim);
    if (count > 8) butterflies(x, 8, dim);
    for (int64_t distance = 16; distance < count; distance *= 2) butterflies(x, distance, dim);
    const float scale = 1.0f / sqrtf((float)count);
    for (int64_t i = 0; i < dim; i++) {
        float mixed = x[i] * scale;
        x[i] = mixed > most ? most : mixed < -most ? -most : mixed;
    }
}

/* Store a head, and return its scale in bf16; where something is not finite that is NaN. */
static inline uint16_t store_int8(uint8_t *to, const float *values, int64_t count) {
    float most = 0.0f;
    int is_finite = 1;
    for (int64_t i = 0; i < count; i++) {
        float size = fabsf(values[i]);
        is_finite &= size < INFINITY;
        most = size > most ? size : most;
    }
    uint16_t scale = is_finite ? bf16_of_float(most / MOST_INT8) : bf16_of_float(NAN);
    float unit = float_of_bf16(scale);
    for (int64_t i = 0; i < count; i++) {
        float steps = is_finite && unit > 0.0f ? rintf(values[i] / unit) : 0.0f;
        to[i] = (uint8_t)(int8_t)(steps > MOST_INT8 ? MOST_INT8 : steps < -MOST_INT8 ? -MOST_INT8 : steps);
    }
    return scale;
}
