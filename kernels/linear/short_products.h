/* Products of rows of 16 bits with quantized blocks as integers of 16 bits.
 *
 * A multiple has 15 bits and a sign: a value that is at least 2^-5 (fp16) or 2^-8 (bf16) of the span's largest is exact,
 * and none is off by more than 2^-15 of that, which fp16 has rounded by 2^-12 and bf16 by 2^-9. Codes are unpacked to
 * pairs of 16 bits, which stay in the L1 cache while rows are read. One instruction adds two products of 16 bits, for two or
 * four times as many at a time as floats.
 */
#pragma once

#include "linear/integer_products.h"

#define TOGETHER (LANES == 16 ? 8 : 4) /* rows whose sums, with SHORT_VECTORS each, stay in registers */
#define SHORT_VECTORS 2

typedef int16_t shorts __attribute__((vector_size(4 * LANES)));

/* A row's values are [in]. */
INLINE int bytes_of_multiple(const int is_checked) { return (void)is_checked, 2; }

INLINE int bits_of_multiple(const int is_checked) { return (void)is_checked, 15; }

/* Write some multiples of a span, whose values begin at `at`. */
INLINE ivec write_multiples(const int is_checked, char *at, int64_t i, ivec multiples) {
    typedef int16_t narrow_shorts __attribute__((vector_size(2 * LANES)));
    narrow_shorts written = __builtin_convertvector(multiples, narrow_shorts);
    memcpy(at + 2 * i, &written, sizeof written);
    return (void)is_checked, (ivec){0};
}

/* Codes are unpacked to their values. */
static inline int zero_of_codes(const struct block_weight *weight) { return (void)weight, 0; }

/* Values of codes that are looked up. */
static void write_table(int8_t *table, const struct block_weight *weight) {
    for (int code = 0; code < 16; code++) table[code] = (int8_t)weight->floats[code];
}

INLINE ivec add_pairs(ivec sums, shorts codes, shorts pair) {
#if LANES == 16
    return sums + (ivec)_mm512_madd_epi16((__m512i)codes, (__m512i)pair);
#else
    return sums + (ivec)_mm256_madd_epi16((__m256i)codes, (__m256i)pair);
#endif
}

/* Values of 4-bit codes in the low halves of shorts, by a table of 16 bytes. */
static inline shorts shorts_looked_up(shorts codes, const int8_t *table) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)table);
#if LANES == 16
    shorts found = (shorts)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), (__m512i)codes);
#else
    shorts found = (shorts)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), (__m256i)codes);
#endif
    return (found << 8) >> 8;
}

/* The codes of a block as what they mean; `bits` and `is_linear` are constants where this is used. */
INLINE void unpack_codes(const int bits, const int is_linear, int8_t *out, const uint16_t *at,
                       const struct block_weight *weight, const int8_t *table) {
    const int low = low_bits(bits), high = bits - low;
    const shorts zero = (shorts){0} + (int16_t)weight->zero;
#pragma GCC unroll 32
    for (int k = 0; k < QUANTIZED_BLOCK; k++) { /* a pair of input features, and half of the panel */
        const int place = k * low % 16, above = k * high % 16;
        const uint16_t *row = at + k * low / 16 * ROW_WORDS, *behind = at + (2 * low + k * high / 16) * ROW_WORDS;
        if (place == 0) ask_ahead(row);
#pragma GCC unroll 4
        for (int lane = 0; lane < HALF_PANEL; lane += LANES) {
            shorts codes;
            if (bits == 8) {
                codes = (shorts)load_words(row + 2 * lane);
                codes = (place == 0 ? codes << 8 : codes) >> 8;
            } else {
                codes = (shorts)(load_words(row + 2 * lane) >> place) & (int16_t)((1 << low) - 1);
                if (high > 0)
                    codes |= ((shorts)(load_words(behind + 2 * lane) >> above) & (int16_t)((1 << high) - 1)) << low;
                codes = is_linear ? codes - zero : shorts_looked_up(codes, table);
            }
            memcpy(out + (k * PANEL + 2 * lane) * CODE_BYTES, &codes, sizeof codes);
        }
    }
}

/* Add to the sums of some rows, [rows][PANEL], what SHORT_VECTORS from `vector` on of a chunk give; `rows` and `has_mins`
 * are constants where this is used. */
INLINE void add_chunk(const int rows, const int has_mins, float *sums_of_rows, const struct integer_chunk *chunk,
                      int64_t span, const struct integer_rows *x, int64_t row, int64_t vector) {
    const int8_t *codes = chunk->codes + 4 * vector * LANES;
    const char *values = x->values + row * x->stride + 2 * chunk->first;
    const int64_t spans = x->spans, number = row * spans + chunk->span, count = chunk->count;
    const float *units = x->units + number, *totals = x->totals + number;
    float *out = sums_of_rows + vector * LANES;
    for (int64_t place = 0, at = 0; at < count; place++) {
        ivec sums[TOGETHER][SHORT_VECTORS] = {0};
        for (int64_t end = least_of(at + span, count); at < end; at += 2) {
            shorts of_codes[SHORT_VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < SHORT_VECTORS; v++)
                memcpy(of_codes + v, codes + 2 * at * PANEL + 4 * v * LANES, sizeof *of_codes);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                int32_t two;
                memcpy(&two, values + r * x->stride + 2 * at, sizeof two);
                shorts pair = (shorts)((ivec){0} + two);
#pragma GCC unroll 2
                for (int v = 0; v < SHORT_VECTORS; v++) sums[r][v] = add_pairs(sums[r][v], of_codes[v], pair);
            }
        }
        vec scales[SHORT_VECTORS], mins[SHORT_VECTORS];
        memcpy(scales, chunk->scales[place] + vector, sizeof scales);
        memcpy(mins, chunk->mins[place] + vector, sizeof mins);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const float unit = units[place + r * spans], total = has_mins ? totals[place + r * spans] : 0.0f;
#pragma GCC unroll 2
            for (int v = 0; v < SHORT_VECTORS; v++) {
                float *to = out + r * PANEL + v * LANES;
                vec sum = load_f32(to) + scales[v] * unit * __builtin_convertvector(sums[r][v], vec);
                if (has_mins) sum += mins[v] * total;
                store_f32(to, sum);
            }
        }
    }
}

/* The same of up to TOGETHER rows, and all columns. */
INLINE void add_rows(const int has_mins, float *sums, const struct integer_chunk *chunk, int64_t span,
                     const struct integer_rows *x, int64_t first, int64_t rows) {
    for (int64_t vector = 0; vector < VECTORS; vector += SHORT_VECTORS) {
        int64_t row = 0;
        if (rows == TOGETHER) {
            add_chunk(TOGETHER, has_mins, sums, chunk, span, x, first, vector);
            continue;
        }
        for (; row + 2 <= rows; row += 2) add_chunk(2, has_mins, sums + row * PANEL, chunk, span, x, first + row, vector);
        if (row < rows) add_chunk(1, has_mins, sums + row * PANEL, chunk, span, x, first + row, vector);
    }
}
