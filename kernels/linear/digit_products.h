/* Products of a row or two with blocks of few bits as integers, as fast as blocks come from memory.
 *
 * A span of a row is taken as whole multiples of a power of 2, its unit, in three digits of a byte, which the processor
 * multiplies with codes, bytes too, and sums up without rounding. A multiple has 22 bits and a sign: a value of bf16 that
 * is at least 2^-14 of the span's largest is exact, and none is off by more than 2^-22 of that. Where many of a span are
 * smaller, beside an outlier, the row is not taken so. So its sums are those of quantised_tiles.h but for their last bits.
 */
#ifndef GRAPHDECODE_DIGIT_PRODUCTS_H
#define GRAPHDECODE_DIGIT_PRODUCTS_H

#include "linear/short_products.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && LANES == 16
#define WITH_DIGITS 1
#define DIGITS 3
#define MULTIPLE_BITS (8 * DIGITS - 2)
#define PART 16      /* input features whose digits stand together: half of a block, and the least span */
#define PART_STEPS 4 /* of 4 features, as many as are multiplied at a time */

/* Rows in digits, with all that belongs to a row one behind another. */
struct digit_rows {
    int8_t *digits; /* [in / PART][DIGITS][PART], of each 4 features the second and the third in turned order */
    float *units;   /* [spans] */
    int32_t *zeros; /* [spans][DIGITS]: what a span's sums begin with, for codes are multiplied, not what they mean */
    int64_t in, spans;
};

/* What a code counts as its zero; see `code_bytes`. */
static inline int zero_of_codes(const struct block_weight *weight) { return weight->is_linear ? weight->zero : 128; }

/* Lay out rows in digits; they take less than as many rows of floats, a tile more, would. */
static struct digit_rows digit_rows_at(float *at, int64_t rows, int64_t in, int64_t spans) {
    int8_t *digits = (int8_t *)carved(&at, rows * DIGITS * in / 4);
    float *units = carved(&at, rows * spans);
    return (struct digit_rows){digits, units, (int32_t *)at, in, spans};
}

/* Write a span of a row, given as floats, and return whether digits keep it well; `count` is a multiple of PART. What is
 * fewer than `well_kept` units has not all of its bits. */
INLINE int write_digits(const struct digit_rows *to, int64_t row, int64_t span, int64_t first, const float *x,
                        int64_t count, int zero, int well_kept) {
    const __m128i turned = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    __m512i largest = _mm512_setzero_si512(), sums[DIGITS] = {largest, largest, largest};
    for (int64_t i = 0; i < count; i += PART)
        largest = _mm512_max_epu32(largest, _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi32(0x7fffffff)));
    uint32_t bits = _mm512_reduce_max_epu32(largest);
    int exponent = exponent_above(bits);
    __m512 multiples_of = _mm512_set1_ps(power_of_two(MULTIPLE_BITS - exponent));
    int8_t *at = to->digits + row * DIGITS * to->in + first * DIGITS;
    int64_t poorly = 0;
    for (int64_t i = 0; i < count; i += PART, at += DIGITS * PART) {
        __m512 values = _mm512_loadu_ps(x + i);
        __m512i left = _mm512_cvtps_epi32(_mm512_mul_ps(values, multiples_of));
        __mmask16 is_small = _mm512_cmplt_epu32_mask(_mm512_abs_epi32(left), _mm512_set1_epi32(well_kept));
        poorly += __builtin_popcount(_mm512_mask_cmp_ps_mask(is_small, values, _mm512_setzero_ps(), _CMP_NEQ_UQ));
        for (int digit = 0; digit < DIGITS; digit++) {
            __m512i lowest = _mm512_srai_epi32(_mm512_slli_epi32(left, 24), 24);
            sums[digit] = _mm512_add_epi32(sums[digit], lowest);
            _mm_storeu_si128((__m128i *)(at + digit * PART), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(lowest), turned));
            left = _mm512_srai_epi32(_mm512_sub_epi32(left, lowest), 8);
        }
    }
    to->units[row * to->spans + span] = power_of_two(exponent - MULTIPLE_BITS);
    for (int digit = 0; digit < DIGITS; digit++)
        to->zeros[(row * to->spans + span) * DIGITS + digit] = -zero * _mm512_reduce_add_epi32(sums[digit]);
    return bits < 0x7f800000 && poorly * MOST_POORLY <= count;
}

/* For each of 4 bytes of a word: from which bit on its code's bits are taken, so that they begin at bit `to` of the byte.
 * Of both features that a half-word has the second one's stand `apart` bits above `place`. */
INLINE __m512i bits_from(const int place, const int apart, const int to) {
    uint64_t found = 0;
    for (int byte = 0; byte < 8; byte++)
        found |= (uint64_t)((byte / 2 * 16 + place + byte % 2 * apart - to) & 63) << 8 * byte;
    return _mm512_set1_epi64((int64_t)found);
}

/* The codes, as bytes, of 4 input features and half of a panel, in place `step` of a part: its low and its high bits.
 * All but the addresses are constants where this is used. */
INLINE __m512i code_bytes(const int bits, const uint16_t *at, const uint16_t *above, const int step, const int side) {
    const int low = low_bits(bits), high = bits - low, place = 4 * step + side;
    if (bits == 8) {
        __m512i first = _mm512_loadu_si512(at + 2 * step * ROW_WORDS);
        __m512i second = _mm512_loadu_si512(at + (2 * step + 1) * ROW_WORDS);
        if (side) first = _mm512_srli_epi16(first, 8);
        else second = _mm512_slli_epi16(second, 8);
        __m512i both = _mm512_ternarylogic_epi32(_mm512_set1_epi16(255), first, second, 0xCA);
        return _mm512_xor_si512(both, _mm512_set1_epi8(-128));
    }
    __m512i words = _mm512_loadu_si512(at + place * low / 16 * ROW_WORDS), codes;
    if (low == 4) codes = side ? _mm512_srli_epi16(words, 4) : words;
    else codes = _mm512_multishift_epi64_epi8(bits_from(place * low % 16, 2 * low, 0), words);
    const __m512i of_low = _mm512_set1_epi8((1 << low) - 1), of_high = _mm512_set1_epi8(((1 << high) - 1) << low);
    if (high == 0) return _mm512_and_si512(codes, of_low);
    __m512i more = _mm512_loadu_si512(above + place * high / 16 * ROW_WORDS);
    more = _mm512_multishift_epi64_epi8(bits_from(place * high % 16, 2 * high, low), more);
    return _mm512_ternarylogic_epi32(of_low, codes, _mm512_and_si512(more, of_high), 0xCA);
}

/* Half of a block: add its codes times some rows' digits; all but the addresses are constants where this is used. */
INLINE void multiply_part(const int bits, const int is_linear, const int rows, __m512i (*sums)[DIGITS][VECTORS],
                          const uint16_t *at, const uint16_t *above, const int8_t *digits, int64_t row_digits,
                          __m512i table) {
    const int low = low_bits(bits), high = bits - low;
#pragma GCC unroll 8
    for (int line = 0; line < low; line++) ask_ahead(at + line * ROW_WORDS);
#pragma GCC unroll 2
    for (int line = 0; line < high; line++) ask_ahead(above + line * ROW_WORDS);
#pragma GCC unroll 4
    for (int step = 0; step < PART_STEPS; step++) {
        __m512i codes[VECTORS];
#pragma GCC unroll 2
        for (int side = 0; side < VECTORS; side++) {
            codes[side] = code_bytes(bits, at, above, step, side);
            if (!is_linear) codes[side] = _mm512_permutexvar_epi8(codes[side], table);
        }
#pragma GCC unroll 2
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 3
            for (int digit = 0; digit < DIGITS; digit++) {
                int32_t four;
                memcpy(&four, digits + row * row_digits + digit * PART + 4 * step, sizeof four);
                __m512i of_row = _mm512_set1_epi32(four);
#pragma GCC unroll 2
                for (int side = 0; side < VECTORS; side++)
                    sums[row][digit][side] = _mm512_dpbusd_epi32(sums[row][digit][side], codes[side], of_row);
            }
    }
}

/* A span's sums as floats. */
INLINE vec joined_digits(const __m512i (*sums)[VECTORS], const int side) {
    __m512i lower = _mm512_add_epi32(_mm512_slli_epi32(sums[1][side], 8), sums[0][side]);
    return (vec)_mm512_cvtepi32_ps(sums[2][side]) * 0x1p16f + (vec)_mm512_cvtepi32_ps(lower);
}

INLINE void digits_of_panel(const int bits, const int is_linear, const int rows, float *out, const struct span_job *job,
                            const struct digit_rows *x, __m512i table, int64_t panel) {
    const struct block_weight *weight = job->weight;
    const int low = low_bits(bits), high = bits - low;
    const int64_t words = bits * BLOCK_SIZE / 16, row_digits = DIGITS * x->in;
    vec scales[MOST_GROUPS][VECTORS], mins[MOST_GROUPS][VECTORS], totals[CHECKED_ROWS][VECTORS] = {0};
    int has_mins = weight->mins.at != 0;
    int64_t of_chunk = CHUNK / weight->span;
    for (int64_t span = 0; span < x->spans; span++) {
        int64_t place = span % of_chunk, first = span * weight->span, last = least_of(first + weight->span, x->in);
        if (place == 0) read_numbers(scales, mins, weight, panel, span, least_of(of_chunk, x->spans - span));
        __m512i sums[CHECKED_ROWS][DIGITS][VECTORS];
#pragma GCC unroll 2
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 3
            for (int digit = 0; digit < DIGITS; digit++)
#pragma GCC unroll 2
                for (int side = 0; side < VECTORS; side++)
                    sums[row][digit][side] = _mm512_set1_epi32(x->zeros[(row * x->spans + span) * DIGITS + digit]);
        for (int64_t i = first; i < last; i += PART) {
            const uint16_t *block = weight->panels + (panel * weight->blocks + i / QUANTISED_BLOCK) * words;
            int64_t part = i % QUANTISED_BLOCK / PART;
            multiply_part(bits, is_linear, rows, sums, block + part * low * ROW_WORDS,
                          block + (2 * low + part * high) * ROW_WORDS, x->digits + i * DIGITS, row_digits, table);
        }
#pragma GCC unroll 2
        for (int row = 0; row < rows; row++) {
            float unit = x->units[row * x->spans + span];
#pragma GCC unroll 2
            for (int side = 0; side < VECTORS; side++) {
                totals[row][side] += scales[place][side] * unit * joined_digits(sums[row], side);
                if (has_mins) totals[row][side] += mins[place][side] * job->totals[row * x->spans + span];
            }
        }
    }
    memcpy(out, totals, rows * sizeof *totals);
}

/* What codes mean, as bytes, where they are looked up. */
static __m512i table_of(const struct block_weight *weight) {
    uint8_t means[TABLE] = {0};
    if (!weight->is_linear && weight->bits < 8)
        for (int code = 0; code < TABLE; code++) means[code] = (uint8_t)(weight->floats[code] + 128);
    return _mm512_loadu_si512(means);
}

/* sums[row][column] of rows in digits with one panel. */
static void digit_rows_of_panel(float *out, const struct span_job *job, const struct digit_rows *x, int64_t panel) {
    const struct block_weight *weight = job->weight;
    __m512i table = table_of(weight);
#define OF_ROWS(bits, is_linear)                                                        \
    if (job->rows == 1) digits_of_panel(bits, is_linear, 1, out, job, x, table, panel); \
    else digits_of_panel(bits, is_linear, 2, out, job, x, table, panel);                \
    return;
    switch (weight->bits) {
        case 2: OF_ROWS(2, 1)
        case 3: OF_ROWS(3, 1)
        case 5: OF_ROWS(5, 1)
        case 6: OF_ROWS(6, 1)
        case 8: OF_ROWS(8, 1)
    }
    if (weight->is_linear) { OF_ROWS(4, 1) }
    OF_ROWS(4, 0)
}
#else
#define WITH_DIGITS 0
#endif
#endif
