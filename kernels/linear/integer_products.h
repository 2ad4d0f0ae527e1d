/* Products of rows of 16 bits with quantized blocks as integers, exact until a span is scaled.
 *
 * A span of a row is taken as whole multiples of a power of 2, its unit. One or two rows are checked: if many values of a
 * span are small beside an outlier, and would lose bits, the rows are multiplied as floats. A value that is not finite
 * makes its whole row NaN. The processor decides how multiples are kept and multiplied: as digits of a byte
 * (digit_products.h, digit_products_arm.h), or of 16 bits (short_products.h).
 */
#pragma once

#include "linear/quantized_tiles.h"

#ifdef ELEMENT_F32 /* has more bits than multiples */
#undef WITH_INTEGERS
#undef WITH_DIGITS
#endif
#ifndef WITH_INTEGERS
#define WITH_INTEGERS 0
#endif
#ifndef WITH_DIGITS
#define WITH_DIGITS 0
#endif

#define CHECKED_ROWS 2 /* up to so many are multiplied as integers only if precision suffices */

/* Whether its codes, or their values, are bytes that can be unpacked so. */
static inline int has_byte_codes(const struct block_weight *weight) {
    return weight->bits == 8 ? !weight->is_e4m3 : weight->is_linear || weight->bits == 4;
}

#if WITH_INTEGERS
#define LEAST_EXPONENT 27 /* biased exponent of a span's largest: values below 2^-100 become 0 beside it */
#define MOST_POORLY 8     /* at most one in so many values of a span may lose bits */
#define INTEGER_BYTES 524288 /* of rows, which stay in the L2 cache while panels are read */
#define LONG_ROW 4096     /* bytes: longer rows count as these, so that enough rows share an unpacked chunk */
#define SOME_ROWS 16      /* up to so many have the values for a chunk in the L1 cache */
#define ROW_PADDING 64    /* bytes between rows, against L1 conflicts */

/* Rows in multiples, with the numbers of their spans. */
struct integer_rows {
    char *values;          /* [rows][stride] */
    float *units, *totals; /* [rows][spans]: the unit, and the sum of a span's values */
    int32_t *zeros;        /* [rows][spans][2]: of digits, what a span's sums begin with */
    int64_t in, spans, stride; /* bytes of a row */
};

/* Call a function with a weight's bits and whether its codes are linear as constants. */
#define FOR_CODES(weight, function, ...)                                \
    switch ((weight)->bits) {                                           \
        case 2: function(2, 1, __VA_ARGS__); break;                     \
        case 3: function(3, 1, __VA_ARGS__); break;                     \
        case 5: function(5, 1, __VA_ARGS__); break;                     \
        case 6: function(6, 1, __VA_ARGS__); break;                     \
        case 8: function(8, 1, __VA_ARGS__); break;                     \
        default:                                                        \
            if ((weight)->is_linear) function(4, 1, __VA_ARGS__);       \
            else function(4, 0, __VA_ARGS__);                           \
    }

#if WITH_DIGITS
#define CODE_BYTES 1 /* of a code that is unpacked */
#else
#define CODE_BYTES 2
#endif

/* Some spans of a panel, with codes that are unpacked to stay in the L1 cache while rows are read. */
struct integer_chunk {
    _Alignas(64) int8_t codes[CODE_BYTES * CHUNK * PANEL];
    vec scales[MOST_GROUPS][VECTORS], mins[MOST_GROUPS][VECTORS];
    int64_t first, count, span; /* input features, and the first of its spans */
    const uint16_t *packed;     /* its codes where they are, if they are not unpacked */
    const char *ahead;          /* prefetched: packed codes, by many rows' first ones, then the values of next rows */
    int64_t ahead_of_part;      /* what lies between those of two parts */
};

INLINE void ask_for_part(const int bits, const uint16_t *at, const uint16_t *above) {
    const int low = low_bits(bits), high = bits - low;
#pragma GCC unroll 8
    for (int line = 0; line < low; line++) ask_ahead(at + line * ROW_WORDS);
#pragma GCC unroll 2
    for (int line = 0; line < high; line++) ask_ahead(above + line * ROW_WORDS);
}

#if WITH_DIGITS && LANES == 4
#include "linear/digit_products_arm.h"
#elif WITH_DIGITS
#include "linear/digit_products.h"
#else
#include "linear/short_products.h"
#endif

/* Lay out rows in multiples; they take less than as many rows of floats, and a tile and ROW_PADDING more, would. */
static struct integer_rows integer_rows_at(float *at, int64_t rows, int64_t in, int64_t spans) {
    int64_t stride = in * bytes_of_multiple(rows <= CHECKED_ROWS) + ROW_PADDING;
    char *values = (char *)carved(&at, rows * stride / 4);
    float *units = carved(&at, rows * spans), *totals = carved(&at, rows * spans);
    return (struct integer_rows){values, units, totals, (int32_t *)at, in, spans, stride};
}

static inline float power_of_two(int exponent) {
    uint32_t bits = (uint32_t)(127 + exponent) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* 2^exponent is above all values of a span, of which the largest has these bits, and by 1 / 256 of itself: so far up go
 * digits with a sign each. */
static inline int exponent_above(uint32_t bits) {
    uint32_t least = (uint32_t)LEAST_EXPONENT << 23;
    return (int)(((bits > least ? bits : least) + (1 << 16)) >> 23) - 126;
}

/* Write a span of a row, given as `count` floats, and return whether multiples keep it well: what is fewer than
 * `accurate_multiple` of them has not all bits of an element. `is_checked` is a constant where this is used. */
INLINE int write_span(const int is_checked, const struct integer_rows *to, int64_t row, int64_t span, int64_t first,
                      const float *x, int64_t count, int zero, int accurate_multiple) {
    uvec most = {0};
    ivec poorly = {0}, sums = {0}, uppers = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        uvec each = (uvec)load_f32(x + i) & 0x7fffffff;
        uvec is_more = (uvec)(each > most);
        most = (is_more & each) | (~is_more & most);
    }
    uint32_t bits = largest_of(most);
    const int exponent = exponent_above(bits), of_multiple = bits_of_multiple(is_checked);
    const float unit = bits < 0x7f800000 ? power_of_two(exponent - of_multiple) : NAN;
    char *at = to->values + row * to->stride + first * bytes_of_multiple(is_checked);
    for (int64_t i = 0; i < count; i += LANES) {
        vec value = load_f32(x + i);
        ivec multiples = rounded(value * power_of_two(of_multiple - exponent));
        sums += multiples;
        uppers += write_multiples(is_checked, at, i, multiples);
        if (is_checked) poorly -= (multiples < accurate_multiple) & (multiples > -accurate_multiple) & (value != 0.0f);
    }
    int64_t index = row * to->spans + span;
    int32_t upper = sum_of(uppers), lower = (int32_t)((uint32_t)sum_of(sums) - ((uint32_t)upper << 16));
    to->units[index] = unit;
    to->totals[index] = ((float)upper * 0x1p16f + (float)lower) * unit;
    to->zeros[2 * index] = (int32_t)(-(uint32_t)zero * (uint32_t)lower); /* arbitrary if not finite */
    to->zeros[2 * index + 1] = (int32_t)(-(uint32_t)zero * (uint32_t)upper);
    return bits < 0x7f800000 && (!is_checked || sum_of(poorly) * MOST_POORLY <= count);
}

#ifndef PACKED_ROWS
#define PACKED_ROWS 0
#endif

/* A chunk of a panel, unpacked, if so many rows need that. */
static void unpack_chunk(struct integer_chunk *chunk, const struct block_weight *weight, const int8_t *table, int64_t panel,
                         int64_t first, int64_t rows) {
    const int is_packed = rows <= PACKED_ROWS && weight->bits == 4 && weight->is_linear && weight->span == QUANTIZED_BLOCK;
    const int64_t words = weight->bits * BLOCK_SIZE / 16;
    const uint16_t *at = weight->panels + (panel * weight->blocks + first / QUANTIZED_BLOCK) * words;
    chunk->first = first, chunk->count = least_of(CHUNK, weight->blocks * QUANTIZED_BLOCK - first);
    chunk->span = first / weight->span;
    read_numbers(chunk->scales, chunk->mins, weight, panel, chunk->span,
                 (chunk->count + weight->span - 1) / weight->span);
    chunk->packed = is_packed ? at : 0;
    chunk->ahead = (const char *)(at + CHUNK_BLOCKS * words);
    chunk->ahead_of_part = words;
    for (int64_t i = 0; i < chunk->count && !is_packed; i += QUANTIZED_BLOCK, at += words)
        FOR_CODES(weight, unpack_codes, chunk->codes + i * PANEL * CODE_BYTES, at, weight, table)
}

/* Add to sums[row][column] of `rows` rows from `first` on what a chunk gives; `has_mins` is a constant. All of some rows ask
 * for a part of the next codes, where products do (digit_products.h), so that memory is never idle; the first of many ask
 * for all. */
INLINE void add_to_rows(const int has_mins, float *sums, struct integer_chunk *chunk, const struct span_job *job,
                        const struct integer_rows *x, int64_t first, int64_t rows) {
    const int64_t askers = rows <= SOME_ROWS ? (rows + TOGETHER - 1) / TOGETHER : 1;
    chunk->ahead_of_part /= askers;
    for (int64_t row = 0, next; row < rows; row = next) {
        next = row + TOGETHER;
        add_rows(has_mins, sums + row * PANEL, chunk, job->weight->span, x, first + row, least_of(TOGETHER, rows - row));
        chunk->ahead += chunk->count / PART * chunk->ahead_of_part;
        if (askers > 1) continue;
        chunk->ahead = x->values + (first + next) * x->stride + chunk->first * bytes_of_multiple(0);
        chunk->ahead_of_part = next + TOGETHER < rows ? x->stride : 0;
    }
}

/* sums[row][column] of `rows` rows from `first` on with one panel; there is room for one row more. */
static void integers_of_panel(float *sums, const struct span_job *job, const struct integer_rows *x, int64_t first,
                              int64_t rows, int64_t panel) {
    const struct block_weight *weight = job->weight;
    struct integer_chunk chunk;
    int8_t table[TABLE];
    write_table(table, weight);
    if (job->rows <= CHECKED_ROWS) {
        FOR_CODES(weight, few_integer_rows, sums, job, x, table, panel)
        return;
    }
    memset(sums, 0, rows * PANEL * sizeof *sums);
    for (int64_t feature = 0; feature < x->in; feature += CHUNK) {
        unpack_chunk(&chunk, weight, table, panel, feature, job->rows);
        if (weight->mins.at) add_to_rows(1, sums, &chunk, job, x, first, rows);
        else add_to_rows(0, sums, &chunk, job, x, first, rows);
    }
}
#endif
