/* What digit_products.h does, by NEON's dot products of signed bytes: codes are unpacked to what they mean, so that no zero
 * is counted, and a vector has four columns.
 */
#pragma once

#include "linear/integer_products.h"

#define DIGITS 3      /* for one or two rows */
#define MANY_ROWS_DIGITS 2 /* for more rows */
#define PART 16       /* adjacent input features of a digit: a register, half of a block, and the smallest span */
#define PART_STEPS 4  /* steps of 4 features, which are multiplied together */
#define TOGETHER 4    /* rows whose sums, with VECTORS_OF_ROW vectors each, stay in registers */
#define VECTORS_OF_ROW 2
#define HALF_VECTORS (HALF_PANEL / LANES) /* vectors of half of a panel */

/* A row's values are [in / PART][digits][PART], of each 4 features the second and the third in turned order. */
INLINE int bytes_of_multiple(const int is_checked) { return is_checked ? DIGITS : MANY_ROWS_DIGITS; }

INLINE int bits_of_multiple(const int is_checked) { return 8 * bytes_of_multiple(is_checked) - 1; }

/* Write LANES multiples of a span, whose digits begin at `at`; return what their third digits count. */
INLINE ivec write_multiples(const int is_checked, char *at, int64_t i, ivec multiples) {
    const uint8x16_t turned = {0, 8, 4, 12};
    at += i / PART * PART * bytes_of_multiple(is_checked) + i % PART;
#pragma GCC unroll 3
    for (int digit = 0; digit < bytes_of_multiple(is_checked); digit++) {
        if (digit > 0) multiples = (multiples + 128) >> 8; /* without the digit before, which has a sign */
        uint32_t four = vgetq_lane_u32((uint32x4_t)vqtbl1q_u8((uint8x16_t)multiples, turned), 0);
        memcpy(at + digit * PART, &four, sizeof four);
    }
    return is_checked ? multiples : (ivec){0};
}

/* Codes are unpacked to their values. */
static inline int zero_of_codes(const struct block_weight *weight) { return (void)weight, 0; }

/* What codes of 4 bits mean, where they are looked up; else what zero is, over and over. */
static void write_table(int8_t *table, const struct block_weight *weight) {
    for (int code = 0; code < PART; code++)
        table[code] = (int8_t)(weight->is_linear ? weight->zero : (int)weight->floats[code]);
}

/* Two codes of `bits` bits from each half-word, as its bytes: the first from `bit` on, and the one behind the next. */
INLINE uint8x16_t two_codes(const int bits, const uint16_t *at, const int bit) {
    const uint8x16_t words = vld1q_u8((const uint8_t *)at);
    const int8_t first = (int8_t)-(bit % 8), second = (int8_t)(first - 2 * bits);
    const int8x16_t down = {first, second, first, second, first, second, first, second,
                            first, second, first, second, first, second, first, second};
    uint8x16_t same = bit < 8 ? vtrn1q_u8(words, words) : vtrn2q_u8(words, words);
    return vandq_u8(vshlq_u8(same, down), vdupq_n_u8((1 << bits) - 1));
}

/* What the codes of 4 input features and LANES columns mean, as bytes, in place `step` of a part: `at` their low and `above`
 * their high bits. All but the addresses are constants where this is used. */
INLINE int8x16_t code_bytes(const int bits, const int is_linear, const uint16_t *at, const uint16_t *above, const int step,
                            const int vector, int8x16_t table) {
    const int low = low_bits(bits), high = bits - low, side = vector / HALF_VECTORS, feature = 4 * step + side;
    const int column = vector % HALF_VECTORS * 2 * LANES;
    if (bits == 8) {
        uint8x16_t first = vld1q_u8((const uint8_t *)(at + 2 * step * ROW_WORDS + column));
        uint8x16_t second = vld1q_u8((const uint8_t *)(at + (2 * step + 1) * ROW_WORDS + column));
        return (int8x16_t)(side ? vtrn2q_u8(first, second) : vtrn1q_u8(first, second));
    }
    uint8x16_t codes;
    if (low == 4) {
        codes = vld1q_u8((const uint8_t *)(at + step * ROW_WORDS + column));
        codes = side ? codes >> 4 : codes & 15;
    } else codes = two_codes(low, at + feature * low / 16 * ROW_WORDS + column, feature * low % 16);
    if (high > 0) codes |= two_codes(high, above + feature * high / 16 * ROW_WORDS + column, feature * high % 16) << low;
    return is_linear ? (int8x16_t)codes - table : vqtbl1q_s8(table, codes);
}

/* Add to the sums of a row the products of a part's 4 features in place `step`, a constant where this is used. */
INLINE int32x4_t dot_step(int32x4_t sums, int8x16_t codes, int8x16_t digits, const int step) {
    switch (step) {
        case 0: return vdotq_laneq_s32(sums, codes, digits, 0);
        case 1: return vdotq_laneq_s32(sums, codes, digits, 1);
        case 2: return vdotq_laneq_s32(sums, codes, digits, 2);
        default: return vdotq_laneq_s32(sums, codes, digits, 3);
    }
}

/* Add to `totals` what a span gives for `count` vectors of each half of a panel, from `from` on: as many as leave the sums
 * in registers. All but the addresses and the places are constants where this is used. */
INLINE void span_in_digits(const int bits, const int is_linear, const int rows, const int count, vec (*totals)[VECTORS],
                           const struct block_weight *weight, const struct integer_rows *x, int8x16_t table, int64_t panel,
                           int64_t span, const vec *scales, const vec *mins, const int from) {
    const int low = low_bits(bits), high = bits - low;
    const int64_t words = bits * BLOCK_SIZE / 16, first = span * weight->span, last = least_of(first + weight->span, x->in);
    int32x4_t sums[CHECKED_ROWS][DIGITS][2][HALF_VECTORS] = {0};
    for (int64_t i = first; i < last; i += PART) {
        const uint16_t *block = weight->panels + (panel * weight->blocks + i / QUANTIZED_BLOCK) * words;
        int64_t part = i % QUANTIZED_BLOCK / PART;
        const uint16_t *at = block + part * low * ROW_WORDS, *above = block + (2 * low + part * high) * ROW_WORDS;
        int8x16_t digits[CHECKED_ROWS][DIGITS];
#pragma GCC unroll 2
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 3
            for (int digit = 0; digit < DIGITS; digit++)
                digits[row][digit] = vld1q_s8((const int8_t *)x->values + row * x->stride + i * DIGITS + digit * PART);
        if (from == 0) ask_for_part(bits, at, above);
#pragma GCC unroll 4
        for (int step = 0; step < PART_STEPS; step++) {
            __asm__ volatile("" : : : "memory"); /* or GCC 12 loads codes of later steps first, and holds sums on the stack */
#pragma GCC unroll 4
            for (int v = 0; v < 2 * count; v++) {
                const int vector = v % 2 * HALF_VECTORS + from + v / 2;
                int8x16_t codes = code_bytes(bits, is_linear, at, above, step, vector, table);
#pragma GCC unroll 2
                for (int row = 0; row < rows; row++)
#pragma GCC unroll 3
                    for (int digit = 0; digit < DIGITS; digit++) {
                        int32x4_t *sum = &sums[row][digit][v % 2][v / 2];
                        *sum = dot_step(*sum, codes, digits[row][digit], step);
                    }
            }
        }
    }
#pragma GCC unroll 2
    for (int row = 0; row < rows; row++) {
        const float unit = x->units[row * x->spans + span], total = x->totals[row * x->spans + span];
#pragma GCC unroll 4
        for (int v = 0; v < 2 * count; v++) {
            const int vector = v % 2 * HALF_VECTORS + from + v / 2;
            int32x4_t lower = (sums[row][1][v % 2][v / 2] << 8) + sums[row][0][v % 2][v / 2];
            vec sum = (vec)vcvtq_f32_s32(sums[row][2][v % 2][v / 2]) * 0x1p16f + (vec)vcvtq_f32_s32(lower);
            totals[row][vector] += scales[vector] * unit * sum;
            if (mins) totals[row][vector] += mins[vector] * total;
        }
    }
}

INLINE void rows_in_digits(const int bits, const int is_linear, const int rows, float *out, const struct integer_rows *x,
                           const struct block_weight *weight, const int8_t *means, int64_t panel) {
    const int count = rows == 1 ? 2 : 1;
    const int8x16_t table = vld1q_s8(means);
    const int64_t of_chunk = CHUNK / weight->span;
    vec scales[MOST_GROUPS][VECTORS], mins[MOST_GROUPS][VECTORS], totals[CHECKED_ROWS][VECTORS] = {0};
    for (int64_t span = 0; span < x->spans; span++) {
        int64_t index = span % of_chunk;
        if (index == 0) read_numbers(scales, mins, weight, panel, span, least_of(of_chunk, x->spans - span));
#pragma GCC unroll 4
        for (int from = 0; from < HALF_VECTORS; from += count)
            span_in_digits(bits, is_linear, rows, count, totals, weight, x, table, panel, span, scales[index],
                           weight->mins.at ? mins[index] : 0, from);
    }
    memcpy(out, totals, rows * sizeof *totals);
}

/* sums[row][column] of one or two rows with one panel. */
INLINE void few_integer_rows(const int bits, const int is_linear, float *out, const struct span_job *job,
                             const struct integer_rows *x, const int8_t *means, int64_t panel) {
    if (job->rows == 1) rows_in_digits(bits, is_linear, 1, out, x, job->weight, means, panel);
    else rows_in_digits(bits, is_linear, 2, out, x, job->weight, means, panel);
}

/* Values of a block's codes as bytes, [in / 4][PANEL][4]. */
INLINE void unpack_codes(const int bits, const int is_linear, int8_t *out, const uint16_t *at,
                         const struct block_weight *weight, const int8_t *means) {
    const int low = low_bits(bits), high = bits - low;
    const int8x16_t table = vld1q_s8(means);
    (void)weight;
#pragma GCC unroll 2
    for (int part = 0; part < QUANTIZED_BLOCK / PART; part++) {
        const uint16_t *of_part = at + part * low * ROW_WORDS, *above = at + (2 * low + part * high) * ROW_WORDS;
        ask_for_part(bits, of_part, above);
#pragma GCC unroll 4
        for (int step = 0; step < PART_STEPS; step++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++, out += 4 * LANES)
                vst1q_s8(out, code_bytes(bits, is_linear, of_part, above, step, v, table));
    }
}

/* Add to the sums of some rows, [rows][PANEL], what VECTORS_OF_ROW vectors from `from` on of a chunk give; `rows` and
 * `has_mins` are constants where this is used. */
INLINE void add_chunk(const int rows, const int has_mins, float *out, const struct integer_chunk *chunk, int64_t span,
                      const struct integer_rows *x, int64_t row, int64_t from) {
    const int64_t spans = x->spans, number = row * spans + chunk->span;
    const float *units = x->units + number, *totals = x->totals + number;
    const int8_t *digits = (const int8_t *)x->values + row * x->stride + chunk->first * MANY_ROWS_DIGITS;
    const int8_t *codes = chunk->codes + from * 4 * LANES;
    for (int64_t index = 0, left = chunk->count; left > 0; index++, left -= span) {
        int32x4_t sums[TOGETHER][MANY_ROWS_DIGITS][VECTORS_OF_ROW] = {0};
        for (const int8_t *end = codes + least_of(span, left) * PANEL; codes < end; digits += MANY_ROWS_DIGITS * PART) {
            int8x16_t of_rows[TOGETHER][MANY_ROWS_DIGITS];
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                for (int digit = 0; digit < MANY_ROWS_DIGITS; digit++)
                    of_rows[r][digit] = vld1q_s8(digits + r * x->stride + digit * PART);
#pragma GCC unroll 4
            for (int step = 0; step < PART_STEPS; step++, codes += 4 * PANEL)
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS_OF_ROW; v++) {
                    int8x16_t of_codes = vld1q_s8(codes + v * 4 * LANES);
#pragma GCC unroll 4
                    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                        for (int digit = 0; digit < MANY_ROWS_DIGITS; digit++)
                            sums[r][digit][v] = dot_step(sums[r][digit][v], of_codes, of_rows[r][digit], step);
                }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const float unit = units[index + r * spans], total = totals[index + r * spans];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS_OF_ROW; v++) {
                float *to = out + r * PANEL + (from + v) * LANES;
                int32x4_t joined = (sums[r][1][v] << 8) + sums[r][0][v];
                vec sum = load_f32(to) + chunk->scales[index][from + v] * unit * (vec)vcvtq_f32_s32(joined);
                if (has_mins) sum += chunk->mins[index][from + v] * total;
                store_f32(to, sum);
            }
        }
    }
}

/* The same of up to TOGETHER rows, and all columns. */
INLINE void add_rows(const int has_mins, float *sums, const struct integer_chunk *chunk, int64_t span,
                     const struct integer_rows *x, int64_t row, int64_t rows) {
    for (int64_t from = 0; from < VECTORS; from += VECTORS_OF_ROW)
        switch (rows) {
            case 1: add_chunk(1, has_mins, sums, chunk, span, x, row, from); break;
            case 2: add_chunk(2, has_mins, sums, chunk, span, x, row, from); break;
            case 3: add_chunk(3, has_mins, sums, chunk, span, x, row, from); break;
            default: add_chunk(TOGETHER, has_mins, sums, chunk, span, x, row, from);
        }
}
