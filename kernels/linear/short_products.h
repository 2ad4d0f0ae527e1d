/* Products of rows of 16 bits with quantized blocks as integers of 16 bits.
 *
 * A multiple has 15 bits and a sign: a value that is at least 2^-5 (fp16) or 2^-8 (bf16) of the span's largest is exact,
 * and none is off by more than 2^-15 of that, which fp16 has rounded by 2^-12 and bf16 by 2^-9. Codes are unpacked to
 * pairs of 16 bits, which stay in the L1 cache while rows are read. One instruction adds two products of 16 bits, for two or
 * four times as many at a time as floats. One or two rows have two digits, 23 bits and a sign, which are multiplied with
 * codes as these come from memory; beside linear codes of 4 bits three digits of a byte, of which one instruction
 * multiplies twice as many.
 */
#pragma once

#include "linear/integer_products.h"

#define TOGETHER (LANES == 16 ? 8 : 6) /* rows whose sums, with SHORT_VECTORS each, stay in registers */
#define SHORT_VECTORS 2
#define PART 16 /* adjacent input features: half of a block, and the smallest span */
#define IN_BYTES 2 /* `is_checked` of one or two rows in bytes; in shorts it is 1 */
#define BYTES 3    /* digits of their multiples */

typedef int16_t shorts __attribute__((vector_size(4 * LANES)));

/* Whether one or two rows are multiplied in bytes. */
static inline int is_in_bytes(const struct block_weight *weight) {
    return weight->bits == 4 && weight->is_linear && weight->span >= QUANTIZED_BLOCK;
}

/* A row's values are [in], of one or two rows [in / LANES][digits][LANES], or in bytes [in / 4][BYTES + 1][4], of each 4
 * features the second and the third in turned order. */
INLINE int digits_of_multiple(const int is_checked) { return is_checked ? 2 : 1; }

INLINE int bytes_of_multiple(const int is_checked) { return 2 * digits_of_multiple(is_checked); }

INLINE int bits_of_multiple(const int is_checked) { return is_checked ? 23 : 15; }

/* The bytes of words, of each 4 words the first ones first; see above. */
INLINE ivec turned_bytes(ivec words) {
    const __m128i turned = _mm_setr_epi8(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15);
#if LANES == 16
    return (ivec)_mm512_shuffle_epi8((__m512i)words, _mm512_broadcast_i32x4(turned));
#else
    return (ivec)_mm256_shuffle_epi8((__m256i)words, _mm256_broadcastsi128_si256(turned));
#endif
}

/* Write some multiples of a span, whose values begin at `at`; return what their last digits count. */
INLINE ivec write_multiples(const int is_checked, char *at, int64_t i, ivec multiples) {
    if (is_checked == IN_BYTES) {
        ivec bytes = turned_bytes((multiples + 0x808080) ^ 0x808080); /* which have a sign each */
        memcpy(at + i * bytes_of_multiple(is_checked), &bytes, sizeof bytes);
        return (multiples + 0x8080) >> 16;
    }
    typedef int16_t narrow_shorts __attribute__((vector_size(2 * LANES)));
    ivec uppers = (multiples + 32768) >> 16; /* without the digit below, which has a sign */
    narrow_shorts digits[] = {__builtin_convertvector(multiples, narrow_shorts),
                              __builtin_convertvector(uppers, narrow_shorts)};
    memcpy(at + i * bytes_of_multiple(is_checked), digits, 2 * LANES * digits_of_multiple(is_checked));
    return is_checked ? uppers : (ivec){0};
}

/* What is taken off codes: as they are unpacked, or off the sums of one or two rows. */
static inline int zero_of_codes(const struct block_weight *weight) { return weight->is_linear ? weight->zero : 0; }

/* Values of codes that are looked up. */
static void write_table(int8_t *table, const struct block_weight *weight) {
    for (int code = 0; code < 16; code++) table[code] = (int8_t)weight->floats[code];
}

INLINE ivec add_pairs(ivec sums, shorts codes, shorts pair) {
#if LANES == 16
    sums += (ivec)_mm512_madd_epi16((__m512i)codes, (__m512i)pair);
#else
    sums += (ivec)_mm256_madd_epi16((__m256i)codes, (__m256i)pair);
#endif
    __asm__("" : "+v"(sums)); /* or GCC 12 adds the products of many steps first, which it holds on the stack */
    return sums;
}

INLINE shorts pair_of(const char *values) {
    int32_t two;
    memcpy(&two, values, sizeof two);
    return (shorts)((ivec){0} + two);
}

/* Values of 4-bit codes in the low halves of shorts, by a table of 16 bytes. */
static inline shorts shorts_looked_up(shorts codes, const int8_t *table) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)table);
#if LANES == 16
    shorts values = (shorts)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), (__m512i)codes);
#else
    shorts values = (shorts)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), (__m256i)codes);
#endif
    return (values << 8) >> 8;
}

/* The codes of a pair of input features and half of the panel, in place `k` of a part, from `lane` on. All but the addresses
 * are constants where this is used. */
INLINE shorts short_codes(const int bits, const int is_linear, const uint16_t *at, const uint16_t *above, const int k,
                          const int lane, const int8_t *table) {
    const int low = low_bits(bits), high = bits - low, bit = k * low % 16;
    uvec words = load_words(at + k * low / 16 * ROW_WORDS + 2 * lane);
    if (bits == 8) return (bit == 0 ? (shorts)words << 8 : (shorts)words) >> 8;
    shorts codes = (shorts)(words >> bit) & (int16_t)((1 << low) - 1);
    if (high > 0) {
        words = load_words(above + k * high / 16 * ROW_WORDS + 2 * lane) >> k * high % 16;
        codes |= ((shorts)words & (int16_t)((1 << high) - 1)) << low;
    }
    return is_linear ? codes : shorts_looked_up(codes, table);
}

/* The codes of a block as what they mean; `bits` and `is_linear` are constants where this is used. */
INLINE void unpack_codes(const int bits, const int is_linear, int8_t *out, const uint16_t *at,
                       const struct block_weight *weight, const int8_t *table) {
    const int low = low_bits(bits), high = bits - low;
    const shorts zero = (shorts){0} + (int16_t)zero_of_codes(weight);
    for (int part = 0; part < QUANTIZED_BLOCK / PART; part++) {
        const uint16_t *of_part = at + part * low * ROW_WORDS, *above = at + (2 * low + part * high) * ROW_WORDS;
        ask_for_part(bits, of_part, above);
#pragma GCC unroll 16
        for (int k = 0; k < PART; k++)
#pragma GCC unroll 2
            for (int lane = 0; lane < HALF_PANEL; lane += LANES, out += 2 * LANES * CODE_BYTES) {
                shorts codes = short_codes(bits, is_linear, of_part, above, k, lane, table);
                if (bits < 8 && is_linear) codes -= zero;
                memcpy(out, &codes, sizeof codes);
            }
    }
}

/* Half of a block: add its codes times one or two rows' values; all but the addresses are constants where this is used. */
INLINE void multiply_part(const int bits, const int is_linear, const int rows, ivec (*sums)[2][VECTORS],
                          const uint16_t *at, const uint16_t *above, const char *values, int64_t stride,
                          const int8_t *table) {
    ask_for_part(bits, at, above);
#pragma GCC unroll 16
    for (int k = 0; k < PART; k++)
#pragma GCC unroll 2
        for (int lane = 0; lane < HALF_PANEL; lane += LANES) {
            shorts codes = short_codes(bits, is_linear, at, above, k, lane, table);
            const char *of_pair = values + k / 2 * 2 / LANES * 4 * LANES + k / 2 * 2 % LANES * 2;
#pragma GCC unroll 2
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                for (int digit = 0; digit < 2; digit++) {
                    ivec *sum = sums[r][digit] + (k % 2 * HALF_PANEL + lane) / LANES;
                    *sum = add_pairs(*sum, codes, pair_of(of_pair + r * stride + digit * 2 * LANES));
                }
        }
}

INLINE void rows_in_shorts(const int bits, const int is_linear, const int rows, float *out, const struct span_job *job,
                           const struct integer_rows *x, const int8_t *table, int64_t panel) {
    const struct block_weight *weight = job->weight;
    const int low = low_bits(bits), high = bits - low, has_mins = weight->mins.at != 0;
    const int64_t words = bits * BLOCK_SIZE / 16, of_chunk = CHUNK / weight->span;
    vec scales[MOST_GROUPS][VECTORS], mins[MOST_GROUPS][VECTORS], totals[CHECKED_ROWS][VECTORS] = {0};
    for (int64_t span = 0; span < x->spans; span++) {
        int64_t index = span % of_chunk, first = span * weight->span, last = least_of(first + weight->span, x->in);
        if (index == 0) read_numbers(scales, mins, weight, panel, span, least_of(of_chunk, x->spans - span));
        ivec sums[CHECKED_ROWS][2][VECTORS];
#pragma GCC unroll 4
        for (int i = 0; i < 2 * rows; i++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                sums[i / 2][i % 2][v] = (ivec){0} + x->zeros[2 * (i / 2 * x->spans + span) + i % 2];
        for (int64_t i = first; i < last; i += PART) {
            const uint16_t *block = weight->panels + (panel * weight->blocks + i / QUANTIZED_BLOCK) * words;
            int64_t part = i % QUANTIZED_BLOCK / PART;
            multiply_part(bits, is_linear, rows, sums, block + part * low * ROW_WORDS,
                          block + (2 * low + part * high) * ROW_WORDS, x->values + 4 * i, x->stride, table);
        }
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++) {
            const float unit = x->units[r * x->spans + span], total = has_mins ? x->totals[r * x->spans + span] : 0.0f;
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                vec lower = __builtin_convertvector(sums[r][0][v], vec);
                vec upper = __builtin_convertvector(sums[r][1][v], vec);
                totals[r][v] += scales[index][v] * unit * (upper * 0x1p16f + lower);
                if (has_mins) totals[r][v] += mins[index][v] * total;
            }
        }
    }
    memcpy(out, totals, rows * sizeof *totals);
}

/* The sums of pairs of 4-bit codes times digits. */
INLINE shorts byte_pairs(shorts codes, shorts bytes) {
#if LANES == 16
    return (shorts)_mm512_maddubs_epi16((__m512i)codes, (__m512i)bytes);
#else
    return (shorts)_mm256_maddubs_epi16((__m256i)codes, (__m256i)bytes);
#endif
}

/* Add a block's codes, of both halves of the panel from `lane` on, times a row's bytes to its lower and upper sums. What
 * two products and 8 steps add up to, at most 8 * 2 * 15 * 128, fits in 16 bits. */
INLINE void multiply_bytes(ivec (*sums)[2], const uint16_t *at, const char *values, const int lane) {
    shorts partial[BYTES][2];
    __asm__("" : "+r"(at), "+r"(values)); /* or GCC 12 keeps what it reads for other lanes, too, on the stack */
#pragma GCC unroll 8
    for (int step = 0; step < QUANTIZED_BLOCK / 4; step++) {
        const uint16_t *row = at + step * ROW_WORDS;
        shorts words = (shorts)load_words(row + 2 * lane);
        if (step % (HALF_PANEL / LANES) == lane / LANES) ask_ahead(row);
        __asm__("" : "+v"(words)); /* which GCC would read twice */
        shorts codes[2] = {words & 0x0f0f, words >> 4 & 0x0f0f};
#pragma GCC unroll 3
        for (int digit = 0; digit < BYTES; digit++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                shorts products = byte_pairs(codes[half], pair_of(values + 4 * ((BYTES + 1) * step + digit)));
                partial[digit][half] = step ? partial[digit][half] + products : products;
                __asm__("" : "+v"(partial[digit][half])); /* or GCC adds all products later */
            }
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        sums[0][half] = add_pairs(sums[0][half], partial[0][half], (shorts){0} + 1);
        sums[0][half] = add_pairs(sums[0][half], partial[1][half], (shorts){0} + 256);
        sums[1][half] = add_pairs(sums[1][half], partial[2][half], (shorts){0} + 1);
    }
}

/* The same as rows_in_shorts, in bytes. */
static void rows_in_bytes(float *out, const struct span_job *job, const struct integer_rows *x, int64_t panel) {
    const struct block_weight *weight = job->weight;
    const int has_mins = weight->mins.at != 0;
    const int64_t words = 4 * BLOCK_SIZE / 16, of_chunk = CHUNK / weight->span;
    vec scales[MOST_GROUPS][VECTORS], mins[MOST_GROUPS][VECTORS], totals[CHECKED_ROWS][VECTORS] = {0};
    for (int64_t span = 0; span < x->spans; span++) {
        int64_t index = span % of_chunk, first = span * weight->span;
        int64_t count = least_of(weight->span, x->in - first) / QUANTIZED_BLOCK;
        const uint16_t *block = weight->panels + (panel * weight->blocks + first / QUANTIZED_BLOCK) * words;
        if (index == 0) read_numbers(scales, mins, weight, panel, span, least_of(of_chunk, x->spans - span));
        for (int64_t row = 0; row < job->rows; row++) {
            const int64_t number = row * x->spans + span;
            const float unit = x->units[number];
            const char *values = x->values + row * x->stride + first * bytes_of_multiple(IN_BYTES);
#pragma GCC unroll 2
            for (int lane = 0; lane < HALF_PANEL; lane += LANES) {
                ivec sums[2][2];
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) sums[i / 2][i % 2] = (ivec){0} + x->zeros[2 * number + i / 2];
                for (int64_t i = 0; i < count; i++)
                    multiply_bytes(sums, block + i * words, values + i * QUANTIZED_BLOCK * 4, lane);
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    const int v = (half * HALF_PANEL + lane) / LANES;
                    vec lower = __builtin_convertvector(sums[0][half], vec);
                    vec upper = __builtin_convertvector(sums[1][half], vec);
                    vec total = totals[row][v] + scales[index][v] * unit * (upper * 0x1p16f + lower);
                    totals[row][v] = has_mins ? total + mins[index][v] * x->totals[number] : total;
                }
            }
        }
    }
    memcpy(out, totals, job->rows * sizeof *totals);
}

/* sums[row][column] of one or two rows with one panel. */
INLINE void few_integer_rows(const int bits, const int is_linear, float *out, const struct span_job *job,
                             const struct integer_rows *x, const int8_t *table, int64_t panel) {
    if (bits == 4 && is_linear && is_in_bytes(job->weight)) rows_in_bytes(out, job, x, panel);
    else if (job->rows == 1) rows_in_shorts(bits, is_linear, 1, out, job, x, table, panel);
    else rows_in_shorts(bits, is_linear, 2, out, job, x, table, panel);
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
    for (int64_t index = 0, at = 0; at < count; index++) {
        ivec sums[TOGETHER][SHORT_VECTORS] = {0};
        __asm__ volatile("" : : : "memory"); /* or GCC 12 holds the rows' sums in registers, and spills these */
        for (int64_t end = least_of(at + span, count); at < end; at += 2) {
            shorts of_codes[SHORT_VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < SHORT_VECTORS; v++) {
                memcpy(of_codes + v, codes + 2 * at * PANEL + 4 * v * LANES, sizeof *of_codes);
                __asm__("" : "+v"(of_codes[v])); /* GCC would reload it for each row */
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                shorts pair = pair_of(values + r * x->stride + 2 * at);
#pragma GCC unroll 2
                for (int v = 0; v < SHORT_VECTORS; v++) sums[r][v] = add_pairs(sums[r][v], of_codes[v], pair);
            }
        }
        vec scales[SHORT_VECTORS], mins[SHORT_VECTORS];
        memcpy(scales, chunk->scales[index] + vector, sizeof scales);
        memcpy(mins, chunk->mins[index] + vector, sizeof mins);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const float unit = units[index + r * spans], total = has_mins ? totals[index + r * spans] : 0.0f;
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
