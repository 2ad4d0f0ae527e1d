/* Linear layers over weights in blocks of few bits; see quantised_linear.py for the layout.
 *
 * Some blocks of a panel are undone together, into memory that stays in the first cache, and all rows are multiplied with
 * them before the next. What is undone are the integers, which bf16 holds exactly: a block's sums are then scaled in
 * float, so that no weight is rounded. Writing is that of native_linear.c, which comes before this file in the unit.
 */
#include "native.h"

#ifndef GRAPHDECODE_QUANTISED
#define GRAPHDECODE_QUANTISED
#if defined(__F16C__) || LANES == 16
#include <immintrin.h>
#endif
#define BLOCK_SIZE (QUANTISED_BLOCK * PANEL)
#define HALF_PANEL 16     /* output features whose words stand together */
#define BLOCKS_UNDONE 4   /* at a time */
#define ROWS_MULTIPLIED 32 /* at a time: those of two tiles */
#define NIBBLE_ZERO 8     /* what stands for 0 among four bits without a least value */

static inline vec load_f16(const uint16_t *at) {
#if LANES == 16
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
#elif LANES == 8 && defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#else
    _Float16 halves[LANES];
    vec wide;
    memcpy(halves, at, sizeof halves);
    for (int lane = 0; lane < LANES; lane++) wide[lane] = (float)halves[lane];
    return wide;
#endif
}

/* The integers of a block as floats, [in][PANEL]; `bits` is a constant where this is used. */
INLINE void undo_floats(const int bits, float *out, const uint16_t *at, int zero) {
    for (int k = 0; k < QUANTISED_BLOCK; k++) { /* a pair of input features, and half of the panel */
        const int place = k % (16 / bits) * bits;
        const uint16_t *words = at + k / (16 / bits) * 2 * HALF_PANEL;
        float *to = out + k / 2 * 2 * PANEL + k % 2 * HALF_PANEL;
        for (int lane = 0; lane < HALF_PANEL; lane += LANES) {
            uvec both = load_words(words + 2 * lane);
            uvec even = both << (32 - bits - place), odd = both << (16 - bits - place);
            ivec first = bits == 8 ? (ivec)even >> 24 : (ivec)(even >> (32 - bits)) - zero;
            ivec second = bits == 8 ? (ivec)odd >> 24 : (ivec)(odd >> (32 - bits)) - zero;
            store_f32(to + lane, __builtin_convertvector(first, vec));
            store_f32(to + PANEL + lane, __builtin_convertvector(second, vec));
        }
    }
}

INLINE void few_float_products(const int count, float *out, const float *x, int64_t stride, const float *block) {
    panel_sums sums[MOST_ROWS];
    for (int r = 0; r < count; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = splat(0.0f);
    for (int i = 0; i < QUANTISED_BLOCK; i++) f32_step(count, sums, x + i, stride, block + i * PANEL);
    memcpy(out, sums, count * sizeof *sums);
}

/* sums[row][column] of up to ROWS_MULTIPLIED rows with an undone block. */
static void float_products(float *sums, const float *x, int64_t stride, const float *block, int64_t rows) {
    int64_t row = 0;
    for (; row + ROWS <= rows; row += ROWS)
        few_float_products(ROWS, sums + row * PANEL, x + row * stride, stride, block);
    for (; row < rows; row++) few_float_products(1, sums + row * PANEL, x + row * stride, stride, block);
}

static void floats_undone(float *out, const uint16_t *at, int64_t words, int zero) {
    if (words == BLOCK_SIZE / 2) undo_floats(8, out, at, 0);
    else undo_floats(4, out, at, zero);
}

#ifdef WITH_PAIRS
/* The integers of a block as bf16, in pairs: [in / 2][PANEL][2]. */
static void pairs_undone(uint16_t *out, const uint16_t *at, int64_t words, int zero) {
    if (words == BLOCK_SIZE / 2) {
        for (int i = 0; i < QUANTISED_BLOCK; i += 2, at += 2 * HALF_PANEL, out += 2 * PANEL)
            for (int half = 0; half < 2; half++) {
                uvec both = load_words(at);
                vec even = __builtin_convertvector((ivec)(both << (24 - 8 * half)) >> 24, vec);
                vec odd = __builtin_convertvector((ivec)(both << (8 - 8 * half)) >> 24, vec);
                uvec pairs = (uvec)even >> 16 | (uvec)odd;
                memcpy(out + half * PANEL, &pairs, sizeof pairs);
            }
        return;
    }
    uint16_t table[PANEL]; /* twice, for the fifth bit of a place is the next integer's */
    for (int i = 0; i < PANEL; i++) table[i] = bf16_of_float((float)(i % 16 - zero));
    __m512i values = _mm512_loadu_si512(table);
    for (int i = 0; i < QUANTISED_BLOCK; i += 4, at += 2 * HALF_PANEL, out += 4 * PANEL) {
        __m512i places = _mm512_loadu_si512(at);
#pragma GCC unroll 4
        for (int nibble = 0; nibble < 4; nibble++)
            _mm512_storeu_si512(out + nibble * PANEL,
                                _mm512_permutexvar_epi16(_mm512_srli_epi16(places, 4 * nibble), values));
    }
}
#endif

/* Add a block's sums, scaled, and the rows' totals times the block's least values. */
static void add_scaled(float *out, const float *sums, const uint16_t *scales, const uint16_t *mins,
                       const float *totals, int64_t stride, int64_t rows) {
    vec scale[VECTORS], least[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        scale[v] = load_f16(scales + v * LANES);
        if (mins) least[v] = load_f16(mins + v * LANES);
    }
    for (int64_t r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) {
            float *at = out + r * PANEL + v * LANES;
            vec sum = load_f32(at) + scale[v] * load_f32(sums + r * PANEL + v * LANES);
            store_f32(at, mins ? sum + least[v] * totals[r * stride] : sum);
        }
}
#endif

#undef quantised_input
#undef UNDONE
#undef PRODUCTS
#if defined(ELEMENT_BF16) && defined(WITH_PAIRS)
#define quantised_input uint16_t
#define UNDONE pairs_undone
#define PRODUCTS(sums, x, stride, block, rows) pair_products(sums, x, stride, block, QUANTISED_BLOCK, rows)
#else
#define quantised_input float
#define UNDONE floats_undone
#define PRODUCTS float_products
#endif

/* The sum of each row's values in each block. */
static void NAME(block_totals)(float *totals, const element *x, int64_t stride, int64_t rows, int64_t blocks) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t block = 0; block < blocks; block++) {
            const element *at = x + row * stride + block * QUANTISED_BLOCK;
            vec sum = splat(0.0f);
            for (int i = 0; i < QUANTISED_BLOCK; i += LANES) sum += load(at + i);
            totals[row * blocks + block] = sum_lanes(sum);
        }
}

struct NAME(quantised_job) {
    const quantised_linear_args *a;
    const quantised_input *x;
    int64_t stride;
};

/* All rows with some blocks, which lie one behind another, of one panel. */
static void NAME(multiply_blocks)(const struct NAME(quantised_job) *job, float *out, const float *totals,
                                  int64_t panel, int64_t first, int64_t count) {
    const quantised_linear_args *a = job->a;
    int64_t rows = a->x.size[0], blocks = a->panels.size[1], words = a->panels.size[2];
    int64_t at = panel * blocks + first;
    _Alignas(64) quantised_input undone[BLOCKS_UNDONE * BLOCK_SIZE];
    _Alignas(64) float sums[ROWS_MULTIPLIED * PANEL];
    const uint16_t *mins = a->mins.data;
    for (int64_t block = 0; block < count; block++)
        UNDONE(undone + block * BLOCK_SIZE, (const uint16_t *)a->panels.data + (at + block) * words, words,
               mins ? 0 : NIBBLE_ZERO);
    for (int64_t row = 0; row < rows; row += ROWS_MULTIPLIED) {
        int64_t here = least_of(ROWS_MULTIPLIED, rows - row);
        if (rows > ROWS_MULTIPLIED) set_tile_rows(least_of(here, TILE_ROWS), here - TILE_ROWS);
        for (int64_t block = 0; block < count; block++) {
            const quantised_input *x = job->x + row * job->stride + (first + block) * QUANTISED_BLOCK;
            int64_t scaled = (at + block) * PANEL;
            PRODUCTS(sums, x, job->stride, undone + block * BLOCK_SIZE, here);
            add_scaled(out + row * PANEL, sums, (const uint16_t *)a->scales.data + scaled, mins ? mins + scaled : 0,
                       totals + row * blocks + first + block, blocks, here);
        }
    }
}

static void NAME(quantised_panels)(const void *given, int64_t begin, int64_t end) {
    const struct NAME(quantised_job) *job = given;
    const quantised_linear_args *a = job->a;
    int64_t rows = a->x.size[0], blocks = a->panels.size[1], out_features = a->out.size[1];
    float *at = lasting(rows * (PANEL + blocks) + 2 * LANES);
    float *sums = carved(&at, rows * PANEL), *totals = carved(&at, rows * blocks);
    if (a->mins.data) NAME(block_totals)(totals, a->x.data, a->x.stride[0], rows, blocks);
    struct tile_shapes before = tiles_begun();
    set_tile_rows(least_of(rows, TILE_ROWS), rows - TILE_ROWS > TILE_ROWS ? TILE_ROWS : rows - TILE_ROWS);
    for (int64_t panel = begin; panel < end; panel++) {
        memset(sums, 0, rows * PANEL * sizeof *sums);
        for (int64_t first = 0; first < blocks; first += BLOCKS_UNDONE)
            NAME(multiply_blocks)(job, sums, totals, panel, first, least_of(BLOCKS_UNDONE, blocks - first));
        NAME(write_tile)(a->out.data, (panel_sums *)sums, 0, a->bias.data, rows, panel * PANEL, out_features);
    }
    tiles_ended(before);
}

KERNEL(quantised_linear) {
    int64_t rows = a->x.size[0], in = a->x.size[1];
    struct NAME(quantised_job) job = {a, 0, a->x.stride[0]};
    if (rows < 1) return;
    job.x = sizeof(quantised_input) == sizeof(element)
                ? (const quantised_input *)a->x.data
                : (const quantised_input *)NAME(widened)(a->x.data, &job.stride, rows, in, QUANTISED_BLOCK);
    parallel(threads, NAME(quantised_panels), &job, a->panels.size[0], items_of(SHARED_WORK, rows * in * PANEL));
}
