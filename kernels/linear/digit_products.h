/* Products of rows with quantized blocks in digits of a byte, by the processor's dot products of bytes: of one or two rows
 * as fast as blocks come from memory, of more rows with codes that are unpacked to bytes once for all of them, or, for a
 * few rows, while they are multiplied.
 *
 * One or two rows have three digits, 23 bits and a sign: a value of bf16 that is at least 2^-15 of the span's largest is
 * exact, and none is off by more than 2^-23 of that. Their sums are those of quantized_tiles.h but for the last bits. More
 * rows have two digits, 15 bits and a sign: what is at least 2^-5 (fp16) or 2^-8 (bf16) of the span's largest is exact, and
 * nothing is off by more than 2^-15 of that, which fp16 has rounded by 2^-12 and bf16 by 2^-9.
 */
#pragma once

#include "linear/integer_products.h"

#define DIGITS 3      /* for one or two rows */
#define MANY_ROWS_DIGITS 2 /* for more rows */
#define PART 16       /* adjacent input features of a digit: half of a block, and the smallest span */
#define PART_STEPS 4  /* steps of 4 features, which are multiplied together */
#define STEP_CODES (4 * PANEL)
#define TOGETHER 4 /* rows whose sums stay in registers */
#define PACKED_ROWS 16 /* up to so many unpack codes of 4 bits each time: it is done beside the products */

/* A row's values are [in / PART][digits][PART], of each 4 features the second and the third in turned order. */
INLINE int bytes_of_multiple(const int is_checked) { return is_checked ? DIGITS : MANY_ROWS_DIGITS; }

INLINE int bits_of_multiple(const int is_checked) { return 8 * bytes_of_multiple(is_checked) - 1; }

/* Write PART multiples of a span, whose digits begin at `at`; return what their third digits count. */
INLINE ivec write_multiples(const int is_checked, char *at, int64_t i, ivec multiples) {
    const __m128i turned = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    at += i * bytes_of_multiple(is_checked);
#pragma GCC unroll 3
    for (int digit = 0; digit < bytes_of_multiple(is_checked); digit++) {
        if (digit > 0) multiples = (multiples + 128) >> 8; /* without the digit before, which has a sign */
        __m128i bytes = _mm512_cvtepi32_epi8((__m512i)multiples);
        _mm_storeu_si128((__m128i *)(at + digit * PART), _mm_shuffle_epi8(bytes, turned));
    }
    return is_checked ? multiples : (ivec){0};
}

/* The zero of the codes; see `code_bytes`. */
static inline int zero_of_codes(const struct block_weight *weight) { return weight->is_linear ? weight->zero : 128; }

/* Values of the codes, if they are looked up. */
static void write_table(int8_t *table, const struct block_weight *weight) {
    if (weight->is_linear || weight->bits == 8) return;
    for (int code = 0; code < TABLE; code++) table[code] = (int8_t)((int)weight->floats[code] + 128);
}

/* For each of 4 bytes of a word: from which bit on its code's bits are taken, so that they begin at bit `to` of the byte.
 * Of both features that a half-word has the second one's stand `distance` bits above `bit`. */
INLINE __m512i bits_from(const int bit, const int distance, const int to) {
    uint64_t shifts = 0;
    for (int byte = 0; byte < 8; byte++)
        shifts |= (uint64_t)((byte / 2 * 16 + bit + byte % 2 * distance - to) & 63) << 8 * byte;
    return _mm512_set1_epi64((int64_t)shifts);
}

/* The codes, as bytes, of 4 input features and half of a panel, in place `step` of a part: its low and its high bits.
 * All but the addresses are constants where this is used. */
INLINE __m512i code_bytes(const int bits, const uint16_t *at, const uint16_t *above, const int step, const int side) {
    const int low = low_bits(bits), high = bits - low, feature = 4 * step + side;
    if (bits == 8) {
        __m512i first = _mm512_loadu_si512(at + 2 * step * ROW_WORDS);
        __m512i second = _mm512_loadu_si512(at + (2 * step + 1) * ROW_WORDS);
        if (side) first = _mm512_srli_epi16(first, 8);
        else second = _mm512_slli_epi16(second, 8);
        __m512i mixed = _mm512_ternarylogic_epi32(_mm512_set1_epi16(255), first, second, 0xCA);
        return _mm512_xor_si512(mixed, _mm512_set1_epi8(-128));
    }
    __m512i words = _mm512_loadu_si512(at + feature * low / 16 * ROW_WORDS), codes;
    if (low == 4) codes = side ? _mm512_srli_epi16(words, 4) : words;
    else codes = _mm512_multishift_epi64_epi8(bits_from(feature * low % 16, 2 * low, 0), words);
    const __m512i of_low = _mm512_set1_epi8((1 << low) - 1), of_high = _mm512_set1_epi8(((1 << high) - 1) << low);
    if (high == 0) return _mm512_and_si512(codes, of_low);
    __m512i more = _mm512_loadu_si512(above + feature * high / 16 * ROW_WORDS);
    more = _mm512_multishift_epi64_epi8(bits_from(feature * high % 16, 2 * high, low), more);
    return _mm512_ternarylogic_epi32(of_low, codes, _mm512_and_si512(more, of_high), 0xCA);
}

/* The same as what they mean, of 4 input features and all of a panel. */
INLINE void unpack_bytes(const int bits, const int is_linear, __m512i *codes, const uint16_t *at, const uint16_t *above,
                         const int step, __m512i table) {
#pragma GCC unroll 2
    for (int side = 0; side < VECTORS; side++) {
        codes[side] = code_bytes(bits, at, above, step, side);
        if (!is_linear) codes[side] = _mm512_permutexvar_epi8(codes[side], table);
    }
}

INLINE __m512i splat_four(const char *digits) {
    int32_t four;
    memcpy(&four, digits, sizeof four);
    return _mm512_set1_epi32(four);
}

/* Half of a block: add its codes times one or two rows' digits; all but the addresses are constants where this is used. */
INLINE void multiply_part(const int bits, const int is_linear, const int rows, __m512i (*sums)[DIGITS][VECTORS],
                          const uint16_t *at, const uint16_t *above, const char *digits, int64_t stride, __m512i table) {
    ask_for_part(bits, at, above);
#pragma GCC unroll 4
    for (int step = 0; step < PART_STEPS; step++) {
        __m512i codes[VECTORS];
        unpack_bytes(bits, is_linear, codes, at, above, step, table);
#pragma GCC unroll 2
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 3
            for (int digit = 0; digit < DIGITS; digit++) {
                __m512i of_row = splat_four(digits + row * stride + digit * PART + 4 * step);
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

INLINE void rows_in_digits(const int bits, const int is_linear, const int rows, float *out, const struct span_job *job,
                           const struct integer_rows *x, const int8_t *means, int64_t panel) {
    const __m512i table = is_linear ? _mm512_setzero_si512() : _mm512_loadu_si512(means);
    const struct block_weight *weight = job->weight;
    const int low = low_bits(bits), high = bits - low;
    const int64_t words = bits * BLOCK_SIZE / 16;
    vec scales[MOST_GROUPS][VECTORS], mins[MOST_GROUPS][VECTORS], totals[CHECKED_ROWS][VECTORS] = {0};
    int has_mins = weight->mins.at != 0;
    int64_t of_chunk = CHUNK / weight->span;
    for (int64_t span = 0; span < x->spans; span++) {
        int64_t index = span % of_chunk, first = span * weight->span, last = least_of(first + weight->span, x->in);
        if (index == 0) read_numbers(scales, mins, weight, panel, span, least_of(of_chunk, x->spans - span));
        __m512i sums[CHECKED_ROWS][DIGITS][VECTORS];
#pragma GCC unroll 2
        for (int row = 0; row < rows; row++) {
            const int32_t *zeros = x->zeros + 2 * (row * x->spans + span);
#pragma GCC unroll 2
            for (int side = 0; side < VECTORS; side++) {
                sums[row][0][side] = _mm512_set1_epi32(zeros[0]);
                sums[row][1][side] = _mm512_setzero_si512();
                sums[row][2][side] = _mm512_set1_epi32(zeros[1]);
            }
        }
        for (int64_t i = first; i < last; i += PART) {
            const uint16_t *block = weight->panels + (panel * weight->blocks + i / QUANTIZED_BLOCK) * words;
            int64_t part = i % QUANTIZED_BLOCK / PART;
            multiply_part(bits, is_linear, rows, sums, block + part * low * ROW_WORDS,
                          block + (2 * low + part * high) * ROW_WORDS, x->values + i * DIGITS, x->stride, table);
        }
#pragma GCC unroll 2
        for (int row = 0; row < rows; row++) {
            float unit = x->units[row * x->spans + span];
#pragma GCC unroll 2
            for (int side = 0; side < VECTORS; side++) {
                totals[row][side] += scales[index][side] * unit * joined_digits(sums[row], side);
                if (has_mins) totals[row][side] += mins[index][side] * x->totals[row * x->spans + span];
            }
        }
    }
    memcpy(out, totals, rows * sizeof *totals);
}

/* sums[row][column] of one or two rows with one panel. */
INLINE void few_integer_rows(const int bits, const int is_linear, float *out, const struct span_job *job,
                             const struct integer_rows *x, const int8_t *means, int64_t panel) {
    if (job->rows == 1) rows_in_digits(bits, is_linear, 1, out, job, x, means, panel);
    else rows_in_digits(bits, is_linear, 2, out, job, x, means, panel);
}

/* A block's codes as bytes, [in / 4][PANEL][4]. */
INLINE void unpack_codes(const int bits, const int is_linear, int8_t *out, const uint16_t *at,
                       const struct block_weight *weight, const int8_t *means) {
    const int low = low_bits(bits), high = bits - low;
    const __m512i table = is_linear ? _mm512_setzero_si512() : _mm512_loadu_si512(means);
    (void)weight;
#pragma GCC unroll 2
    for (int part = 0; part < QUANTIZED_BLOCK / PART; part++) {
        const uint16_t *of_part = at + part * low * ROW_WORDS, *above = at + (2 * low + part * high) * ROW_WORDS;
#pragma GCC unroll 4
        for (int step = 0; step < PART_STEPS; step++, out += STEP_CODES) {
            __m512i codes[VECTORS];
            unpack_bytes(bits, is_linear, codes, of_part, above, step, table);
            memcpy(out, codes, sizeof codes);
        }
    }
}

/* Add to some rows' sums what a step's codes give, from those of a part, packed in 4 bits or bytes; all but addresses are
 * constants where this is used. */
INLINE void add_step(const int is_packed, const int rows, const int step, __m512i (*sums)[MANY_ROWS_DIGITS][VECTORS],
                     const int8_t *codes, const char *values, int64_t stride) {
    __m512i of_codes[VECTORS];
    if (is_packed) unpack_bytes(4, 1, of_codes, (const uint16_t *)codes, 0, step, _mm512_setzero_si512());
    else memcpy(of_codes, codes + step * STEP_CODES, sizeof of_codes);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int digit = 0; digit < MANY_ROWS_DIGITS; digit++) {
            __m512i of_row = splat_four(values + r * stride + digit * PART + 4 * step);
#pragma GCC unroll 2
            for (int side = 0; side < VECTORS; side++)
                sums[r][digit][side] = _mm512_dpbusd_epi32(sums[r][digit][side], of_codes[side], of_row);
        }
}

/* Add a chunk's part to the sums of some rows, [rows][PANEL]; `is_packed`, the parts of a span (0: of any), `has_mins` and
 * `rows` are constants. Sums stay in registers, since storing them takes longer than adding a span. */
INLINE void add_chunk(const int is_packed, const int parts, const int has_mins, const int rows, float *out,
                      const struct integer_chunk *chunk, int64_t span, const struct integer_rows *x, int64_t row) {
    const int64_t stride = x->stride, spans = x->spans, number = row * spans + chunk->span;
    const float *units = x->units + number, *totals = x->totals + number;
    const int32_t *zeros = x->zeros + 2 * number;
    const char *values = x->values + row * stride + chunk->first * MANY_ROWS_DIGITS, *ahead = chunk->ahead;
    const int8_t *codes = is_packed ? (const int8_t *)chunk->packed : chunk->codes;
    vec outputs[TOGETHER][VECTORS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int side = 0; side < VECTORS; side++) outputs[r][side] = load_f32(out + r * PANEL + side * LANES);
    for (int64_t index = 0, left = chunk->count; left > 0; index++, left -= span) {
        const int64_t count = parts ? parts : least_of(span, left) / PART;
        __m512i sums[TOGETHER][MANY_ROWS_DIGITS][VECTORS];
        __asm__ volatile("" : : : "memory"); /* or GCC 12 reads numbers early, and sums have too few registers */
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int side = 0; side < VECTORS; side++) {
                sums[r][0][side] = _mm512_set1_epi32(zeros[2 * (index + r * spans)]);
                sums[r][1][side] = _mm512_setzero_si512();
            }
#pragma GCC unroll 2
        for (int64_t part = 0; part < count; part++) {
#pragma GCC unroll 4
            for (int step = 0; step < PART_STEPS; step++) {
                __builtin_prefetch(ahead + 128 * step, 0, 3);
                __builtin_prefetch(ahead + 128 * step + 64, 0, 3);
                add_step(is_packed, rows, step, sums, codes, values, stride);
            }
            codes += PART * PANEL / (is_packed ? 2 : 1), values += MANY_ROWS_DIGITS * PART, ahead += chunk->ahead_of_part;
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const __m512 exponent = _mm512_getexp_ps(_mm512_set1_ps(units[index + r * spans]));
            const float total = totals[index + r * spans];
#pragma GCC unroll 2
            for (int side = 0; side < VECTORS; side++) { /* scalef, for a product takes the dot products' place */
                __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(sums[r][1][side], 8), sums[r][0][side]);
                outputs[r][side] += chunk->scales[index][side] * (vec)_mm512_scalef_ps(_mm512_cvtepi32_ps(sum), exponent);
                if (has_mins) outputs[r][side] += chunk->mins[index][side] * total;
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int side = 0; side < VECTORS; side++) store_f32(out + r * PANEL + side * LANES, outputs[r][side]);
}

/* The same of up to TOGETHER rows; odd ones are one more, whose sums are not used. */
INLINE void add_rows(const int has_mins, float *sums, const struct integer_chunk *chunk, int64_t span,
                     const struct integer_rows *x, int64_t row, int64_t rows) {
#define ADD_CHUNK(is_packed, parts)                                                               \
    {                                                                                             \
        if (rows > 2) add_chunk(is_packed, parts, has_mins, TOGETHER, sums, chunk, span, x, row); \
        else add_chunk(is_packed, parts, has_mins, 2, sums, chunk, span, x, row);                 \
    }
    if (chunk->packed) ADD_CHUNK(1, 2)
    else if (span == PART) ADD_CHUNK(0, 1)
    else if (span == 2 * PART) ADD_CHUNK(0, 2)
    else ADD_CHUNK(0, 0)
#undef ADD_CHUNK
}
