/* Products of rows of fp16 with blocks of few bits as integers of 16 bits, exact until a span is scaled.
 *
 * A span of a row is taken as whole multiples of a power of 2, its unit, in 15 bits and a sign: a value that is at least
 * 2^-5 of the span's largest is exact, and none is off by more than 2^-16 of that; fp16 has rounded it by 2^-12. Codes are
 * undone to 16 bits, in pairs, in memory that stays in the first cache while rows go by. Two products of 16 bits are added
 * up by one instruction, two or four times as many at once as floats.
 */
#ifndef GRAPHDECODE_SHORT_PRODUCTS_H
#define GRAPHDECODE_SHORT_PRODUCTS_H

#include "linear/quantised_tiles.h"

#define LEAST_EXPONENT 27 /* of a span's largest, as floats have it: what is below 2^-100 counts as nothing beside it */

#define CHECKED_ROWS 2  /* so few are multiplied as integers only if these keep them well */
#define MOST_POORLY 8   /* of a span at most one in so many values may have fewer bits than it came with */

/* Whether its codes, or what they mean, are bytes that can be undone so. */
static inline int has_byte_codes(const struct block_weight *weight) {
    return weight->bits == 8 ? !weight->is_e4m3 : weight->is_linear || weight->bits == 4;
}

static inline float power_of_two(int exponent) {
    uint32_t bits = (uint32_t)(127 + exponent) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* 2^exponent is above all values of a span, of which the largest has these bits. */
static inline int exponent_above(uint32_t bits) {
    uint32_t least = (uint32_t)LEAST_EXPONENT << 23;
    return (int)((bits > least ? bits : least) >> 23) - 126;
}

#if LANES == 16 && defined(__AVX512BW__) || LANES == 8 && defined(__AVX2__)
#define WITH_SHORTS 1
#define SHORT_ROWS (LANES == 16 ? 8 : 4) /* whose sums, with SHORT_VECTORS each, stay in registers */
#define SHORT_VECTORS 2
#define SHORT_BITS 15
#define LEAST_KEPT (1 << 10) /* units, from which on all bits of fp16 are kept */

typedef int16_t shorts __attribute__((vector_size(4 * LANES)));

/* Rows in shorts. */
struct short_rows {
    int16_t *values; /* [rows][in] */
    float *units;    /* [rows][spans] */
    int64_t in, spans;
};

/* Some spans of a panel that are undone. */
struct short_chunk {
    _Alignas(64) int16_t codes[CHUNK * PANEL]; /* [in / 2][PANEL][2] */
    vec scales[MOST_GROUPS][VECTORS], mins[MOST_GROUPS][VECTORS];
    int64_t first, count, span; /* input features, and the first of its spans */
};

static struct short_rows short_rows_at(float *at, int64_t rows, int64_t in, int64_t spans) {
    return (struct short_rows){(int16_t *)carved(&at, rows * in / 2), at, in, spans};
}

#if LANES == 16 && defined(__AVX512VNNI__)
static int adds_in_one; /* whether one instruction multiplies pairs and adds them as fast as two: AMD's takes twice as long */

__attribute__((constructor)) static void ask_for_maker(void) {
    __builtin_cpu_init();
    adds_in_one = !__builtin_cpu_is("amd");
}
#else
#define adds_in_one 0
#endif

INLINE ivec add_pairs(const int in_one, ivec sums, shorts codes, shorts pair) {
#if LANES == 16 && defined(__AVX512VNNI__)
    if (in_one) return (ivec)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)codes, (__m512i)pair);
#endif
#if LANES == 16
    return sums + (ivec)_mm512_madd_epi16((__m512i)codes, (__m512i)pair);
#else
    return sums + (ivec)_mm256_madd_epi16((__m256i)codes, (__m256i)pair);
#endif
}

/* What codes of 4 bits in the lower halves of shorts mean, by a table of 16 bytes. */
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
INLINE void undo_shorts(const int bits, const int is_linear, int16_t *out, const uint16_t *at,
                        const struct block_weight *weight, const int8_t *table) {
    const int low = low_bits(bits), high = bits - low;
    const shorts zero = (shorts){0} + (int16_t)weight->zero;
#pragma GCC unroll 32
    for (int k = 0; k < QUANTISED_BLOCK; k++) { /* a pair of input features, and half of the panel */
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
            memcpy(out + k * PANEL + 2 * lane, &codes, sizeof codes);
        }
    }
}

static void shorts_undone(int16_t *out, const uint16_t *at, const struct block_weight *weight) {
    int8_t table[16];
    for (int code = 0; code < 16; code++) table[code] = (int8_t)weight->floats[code];
    switch (weight->bits) {
        case 2: undo_shorts(2, 1, out, at, weight, table); break;
        case 3: undo_shorts(3, 1, out, at, weight, table); break;
        case 5: undo_shorts(5, 1, out, at, weight, table); break;
        case 6: undo_shorts(6, 1, out, at, weight, table); break;
        case 8: undo_shorts(8, 1, out, at, weight, table); break;
        default:
            if (weight->is_linear) undo_shorts(4, 1, out, at, weight, table);
            else undo_shorts(4, 0, out, at, weight, table);
    }
}

/* Write a span of a row, given as `count` floats, and return whether shorts keep it well; what is not finite makes all of
 * the row no number. */
static int write_shorts(const struct short_rows *to, int64_t row, int64_t span, int64_t first, const float *x,
                        int64_t count) {
    typedef int16_t narrow_shorts __attribute__((vector_size(2 * LANES)));
    uvec most = {0};
    ivec poorly = {0};
    uint32_t bits = 0;
    int64_t few = 0;
    for (int64_t i = 0; i < count; i += LANES) {
        uvec each = (uvec)load_f32(x + i) & 0x7fffffff, is_more = (uvec)(each > most);
        most = (is_more & each) | (~is_more & most);
    }
    for (int lane = 0; lane < LANES; lane++) bits = most[lane] > bits ? most[lane] : bits;
    int exponent = exponent_above(bits);
    to->units[row * to->spans + span] = bits < 0x7f800000 ? power_of_two(exponent - SHORT_BITS) : NAN;
    for (int64_t i = 0; i < count; i += LANES) {
        vec value = load_f32(x + i), shifted = value * power_of_two(SHORT_BITS - exponent) + 12582912.0f; /* 1.5 * 2^23 */
        ivec units = (ivec)shifted - 0x4b400000;
        narrow_shorts written = __builtin_convertvector(units, narrow_shorts);
        memcpy(to->values + row * to->in + first + i, &written, sizeof written);
        poorly -= (units < LEAST_KEPT) & (units > -LEAST_KEPT) & (value != 0.0f);
    }
    for (int lane = 0; lane < LANES; lane++) few += poorly[lane];
    return bits < 0x7f800000 && few * MOST_POORLY <= count;
}

/* Add to the sums of some rows, [rows][PANEL], what SHORT_VECTORS from `vector` on of a chunk give; `in_one`, `rows` and
 * `has_mins` are constants where this is used. */
INLINE void add_chunk(const int in_one, const int rows, const int has_mins, float *sums_of_rows,
                      const struct short_chunk *chunk, const struct span_job *job, const struct short_rows *x, int64_t row,
                      int64_t vector) {
    const int16_t *codes = chunk->codes + 2 * vector * LANES, *values = x->values + row * x->in + chunk->first;
    const int64_t spans = x->spans, number = row * spans + chunk->span, span = job->weight->span, count = chunk->count;
    const float *units = x->units + number, *totals = job->totals + number;
    float *out = sums_of_rows + row * PANEL + vector * LANES;
    for (int64_t place = 0, at = 0; at < count; place++) {
        ivec sums[SHORT_ROWS][SHORT_VECTORS] = {0};
        for (int64_t end = least_of(at + span, count); at < end; at += 2) {
            shorts of_codes[SHORT_VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < SHORT_VECTORS; v++) memcpy(of_codes + v, codes + at * PANEL + 2 * v * LANES, sizeof *of_codes);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                int32_t two;
                memcpy(&two, values + r * x->in + at, sizeof two);
                shorts pair = (shorts)((ivec){0} + two);
#pragma GCC unroll 2
                for (int v = 0; v < SHORT_VECTORS; v++) sums[r][v] = add_pairs(in_one, sums[r][v], of_codes[v], pair);
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

INLINE void add_rows(const int in_one, const int has_mins, float *sums, const struct short_chunk *chunk,
                     const struct span_job *job, const struct short_rows *x) {
    for (int64_t vector = 0; vector < VECTORS; vector += SHORT_VECTORS) {
        int64_t row = 0;
        for (; row + SHORT_ROWS <= job->rows; row += SHORT_ROWS)
            add_chunk(in_one, SHORT_ROWS, has_mins, sums, chunk, job, x, row, vector);
        for (; row + 2 <= job->rows; row += 2) add_chunk(in_one, 2, has_mins, sums, chunk, job, x, row, vector);
        if (row < job->rows) add_chunk(in_one, 1, has_mins, sums, chunk, job, x, row, vector);
    }
}

/* sums[row][column] of rows in shorts with one panel. */
static void shorts_of_panel(float *sums, const struct span_job *job, const struct short_rows *x, int64_t panel) {
    const struct block_weight *weight = job->weight;
    const int64_t words = weight->bits * BLOCK_SIZE / 16;
    struct short_chunk chunk;
    memset(sums, 0, job->rows * PANEL * sizeof *sums);
    for (int64_t first = 0; first < x->in; first += CHUNK) {
        chunk.first = first, chunk.count = least_of(CHUNK, x->in - first), chunk.span = first / weight->span;
        const uint16_t *block = weight->panels + (panel * weight->blocks + first / QUANTISED_BLOCK) * words;
        for (int64_t i = 0; i < chunk.count; i += QUANTISED_BLOCK, block += words)
            shorts_undone(chunk.codes + i * PANEL, block, weight);
        read_numbers(chunk.scales, chunk.mins, weight, panel, chunk.span, (chunk.count + weight->span - 1) / weight->span);
        if (adds_in_one && weight->mins.at) add_rows(1, 1, sums, &chunk, job, x);
        else if (adds_in_one) add_rows(1, 0, sums, &chunk, job, x);
        else if (weight->mins.at) add_rows(0, 1, sums, &chunk, job, x);
        else add_rows(0, 0, sums, &chunk, job, x);
    }
}
#else
#define WITH_SHORTS 0
#endif
#endif
