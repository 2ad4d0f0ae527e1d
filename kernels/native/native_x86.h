/* What AVX2 and AVX-512 do in fewer instructions than vectors of the compiler's: native.h includes this. */
#pragma once

#include <immintrin.h>

#define load_bytes load_bytes /* GCC 12 takes these one by one, or in halves, where it is not told how */
#define load_halves load_halves
#define float_of_f16 float_of_f16 /* which Clang before 15 knows without knowing _Float16 */
#define load_f16 load_f16
#define greater_of greater_of
#define WITH_INTEGERS 1 /* integer_products.h: products of 16 bits, or of bytes */

static inline float float_of_f16(uint16_t value) { return _cvtsh_ss(value); }

static inline uint16_t f16_of_float(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

#if LANES == 16
static inline uvec load_bytes(const void *at) { return (uvec)_mm512_cvtepu8_epi32(_mm_loadu_si128(at)); }

static inline uvec load_halves(const uint16_t *at) {
    return (uvec)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at));
}

static inline void store_halves(uint16_t *at, uvec words) {
    _mm256_storeu_si256((__m256i *)at, _mm512_cvtepi32_epi16((__m512i)words));
}

static inline vec load_f16(const uint16_t *at) { return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }

static inline void store_f16(uint16_t *at, vec v) {
    _mm256_storeu_si256((__m256i *)at, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* To nearest, ties to even. */
static inline ivec rounded(vec values) { return (ivec)_mm512_cvtps_epi32((__m512)values); }

static inline int32_t sum_of(ivec values) { return _mm512_reduce_add_epi32((__m512i)values); }

static inline uint32_t largest_of(uvec values) { return _mm512_reduce_max_epu32((__m512i)values); }

INLINE vec greater_of(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }

INLINE vec lesser_of(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }

static inline int any_lane(ivec lanes) { return _mm512_movepi32_mask((__m512i)lanes) != 0; }

#define write_turned write_turned
/* to[j][i] = given[i][j] of LANES x LANES words. */
INLINE void write_turned(void *at, int64_t stride, const uvec *src) {
    uint32_t *to = at;
    __m512i t[16], r[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32((__m512i)src[i], (__m512i)src[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32((__m512i)src[i], (__m512i)src[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) { /* each holds a quarter of four columns */
        __m512i low_even = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), low_odd = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
        __m512i even = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88), odd = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
        _mm512_storeu_si512(to + c * stride, _mm512_shuffle_i32x4(low_even, even, 0x88));
        _mm512_storeu_si512(to + (4 + c) * stride, _mm512_shuffle_i32x4(low_odd, odd, 0x88));
        _mm512_storeu_si512(to + (8 + c) * stride, _mm512_shuffle_i32x4(low_even, even, 0xdd));
        _mm512_storeu_si512(to + (12 + c) * stride, _mm512_shuffle_i32x4(low_odd, odd, 0xdd));
    }
}

/* 2^v to about 1 ulp, or where weights become bf16 to 2.4e-4 of it; 1 of 0, 0 of -inf, NaN of NaN. Powers of the sixteenths
 * come from a table, in the second case their slopes, too: products wait for each multiplication here. */
static inline vec exp2_lanes(vec v) {
    const __m512 powers = _mm512_setr_ps(1.0f, 1.04427373f, 1.09050775f, 1.13878858f, 1.18920708f, 1.24185777f, 1.29683959f,
                                         1.35425556f, 1.41421354f, 1.47682619f, 1.54221082f, 1.61049032f, 1.68179286f,
                                         1.75625217f, 1.83400810f, 1.91520655f);
    vec shifted = v + 786432.0f, sixteenths = shifted - 786432.0f, fraction = v - sixteenths; /* 1.5 * 2^23 / 16 */
    vec power = (vec)_mm512_permutexvar_ps((__m512i)shifted, powers);
#if defined(__AVX512BF16__) && defined(ELEMENT_BF16)
    const __m512 slopes = _mm512_setr_ps(0.6931472f, 0.7238354f, 0.7558824f, 0.7893481f, 0.8242956f, 0.8607902f, 0.8989007f,
                                         0.9386984f, 0.9802581f, 1.0236579f, 1.0689791f, 1.1163068f, 1.1657300f, 1.2173412f,
                                         1.2712375f, 1.3275200f);
    power += (vec)_mm512_permutexvar_ps((__m512i)shifted, slopes) * fraction;
#else
    power += power * fraction * ((fraction * 0.05550411f + 0.24022651f) * fraction + 0.69314718f);
#endif
    return (vec)_mm512_scalef_ps((__m512)power, (__m512)sixteenths); /* times 2 to the greatest integer below */
}
#else
static inline uvec load_bytes(const void *at) { return (uvec)_mm256_cvtepu8_epi32(_mm_loadl_epi64(at)); }

static inline uvec load_halves(const uint16_t *at) {
    return (uvec)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at));
}

static inline void store_halves(uint16_t *at, uvec words) { /* each is below 2^16 */
    __m128i low = _mm256_castsi256_si128((__m256i)words), high = _mm256_extracti128_si256((__m256i)words, 1);
    _mm_storeu_si128((__m128i *)at, _mm_packus_epi32(low, high));
}

static inline vec load_f16(const uint16_t *at) { return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)); }

static inline void store_f16(uint16_t *at, vec v) {
    _mm_storeu_si128((__m128i *)at, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline ivec rounded(vec values) { return (ivec)_mm256_cvtps_epi32((__m256)values); }

static inline int32_t sum_of(ivec values) {
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += values[lane];
    return sum;
}

static inline uint32_t largest_of(uvec values) {
    uint32_t largest = 0;
    for (int lane = 0; lane < LANES; lane++) largest = values[lane] > largest ? values[lane] : largest;
    return largest;
}

INLINE vec greater_of(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }

INLINE vec lesser_of(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }

static inline int any_lane(ivec lanes) { return _mm256_movemask_ps((__m256)lanes) != 0; }
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#define WITH_DIGITS 1 /* products of bytes: digit_products.h */
#endif

#ifdef __AVX512BF16__
#define WITH_PAIRS /* products of bf16 in pairs */
#define store_bf16 store_bf16 /* in one instruction; what is below the smallest normal float becomes 0 */

static inline void store_bf16(uint16_t *at, vec v) {
    __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
    memcpy(at, &rounded, sizeof rounded);
}

/* Add to each lane the two products of its pairs. */
INLINE vec dot_pairs(vec sums, uvec a, uvec b) { return (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b); }

/* Pairs of what stands in two rows of 16 bits: of the first columns, and of the next. Of 32 columns the first are those in
 * the lower halves of 8 neighbours. */
INLINE uvec first_pairs(uvec even, uvec odd) { return (uvec)_mm512_unpacklo_epi16((__m512i)even, (__m512i)odd); }

INLINE uvec next_pairs(uvec even, uvec odd) { return (uvec)_mm512_unpackhi_epi16((__m512i)even, (__m512i)odd); }

/* Put 32 columns' floats in order. */
static inline void in_order(float *sums) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    __m512 low = _mm512_loadu_ps(sums), high = _mm512_loadu_ps(sums + LANES);
    _mm512_storeu_ps(sums, _mm512_permutex2var_ps(low, first, high));
    _mm512_storeu_ps(sums + LANES, _mm512_permutex2var_ps(low, second, high));
}
#endif
