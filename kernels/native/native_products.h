/* Products of some rows of bf16 with a panel of PANEL columns, whose values stand in pairs: [in / 2][PANEL][2].
 *
 * The processor multiplies pairs itself (AVX-512's bf16, NEON's), or whole tiles of them (AMX). Each sum has one order,
 * whatever the number of rows.
 */
#pragma once

#include "native.h"
#include "native_tiles.h"

#define PANEL 32
#define VECTORS (PANEL / LANES)
#define ROWS_OF_PANEL (LANES == 16 ? 8 : 2) /* rows whose sums all stay in registers */
#define SQUARE_ROWS 4
#if defined(WITH_SQUARES) && defined(ELEMENT_BF16)
#define ROWS SQUARE_ROWS
#elif LANES == 8 && !defined(ELEMENT_BF16) /* bf16 has two features in a step */
#define ROWS 3
#else
#define ROWS ROWS_OF_PANEL
#endif
#define MOST_ROWS 8
#define SHARED_WORK 65536 /* fewest multiplications of a chunk */
#define TILED_BYTES 1048576 /* of rows, which stay in the L2 cache while panels are read */
#define TILED_IN 256 /* input features of a panel, which stay in the L1 cache while rows are read */
#define L1_SET_STRIDE 4096 /* bytes: lines at this distance share an L1 set */

typedef vec panel_sums[VECTORS];

/* Call a function with a number of rows, MOST_ROWS at most, as a constant. */
#define FOR_COUNT(function, count, ...)          \
    switch (count) {                             \
        case 1: function(1, __VA_ARGS__); break; \
        case 2: function(2, __VA_ARGS__); break; \
        case 3: function(3, __VA_ARGS__); break; \
        case 4: function(4, __VA_ARGS__); break; \
        case 5: function(5, __VA_ARGS__); break; \
        case 6: function(6, __VA_ARGS__); break; \
        case 7: function(7, __VA_ARGS__); break; \
        default: function(MOST_ROWS, __VA_ARGS__); \
    }

#ifdef WITH_PAIRS
INLINE void bf16_step(const int count, const int vectors, panel_sums *sums, const uint16_t *x, int64_t stride,
                      const uint16_t *at) {
    uvec weights[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) weights[v] = load_words(at + 2 * v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) {
        uint32_t pair;
        memcpy(&pair, x + r * stride, sizeof pair);
        uvec pairs = (uvec){0} + pair;
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sums[r][v] = dot_pairs(sums[r][v], weights[v], pairs);
    }
}
#endif

#ifdef WITH_SQUARES
#define SQUARE_VECTORS (VECTORS / 2) /* of columns whose sums, of SQUARE_ROWS rows, stay in registers */

/* SQUARE_ROWS rows times one panel, of which a prompt's rows read half after half; `in` is even. */
INLINE void square_products(const int accumulate, panel_sums *out, const uint16_t *x, int64_t stride, const uint16_t *panel,
                            int64_t in) {
    for (int first = 0; first < VECTORS; first += SQUARE_VECTORS) {
        vec sums[SQUARE_ROWS / 2][2 * SQUARE_VECTORS] = {0};
        for (int64_t i = 0; i + 4 <= in; i += 4) {
            uvec rows[SQUARE_ROWS / 2];
#pragma GCC unroll 2
            for (int r = 0; r < SQUARE_ROWS / 2; r++) rows[r] = two_rows(x + 2 * r * stride + i, x + (2 * r + 1) * stride + i);
#pragma GCC unroll 4
            for (int v = 0; v < SQUARE_VECTORS; v++) {
                const uint16_t *at = panel + i * PANEL + (first + v) * 2 * LANES;
                uvec even = load_words(at), odd = load_words(at + 2 * PANEL);
                uvec columns[2] = {first_words(even, odd), next_words(even, odd)};
#pragma GCC unroll 2
                for (int r = 0; r < SQUARE_ROWS / 2; r++) {
                    sums[r][2 * v] = dot_squares(sums[r][2 * v], rows[r], columns[0]);
                    sums[r][2 * v + 1] = dot_squares(sums[r][2 * v + 1], rows[r], columns[1]);
                }
            }
        }
#pragma GCC unroll 2
        for (int r = 0; r < SQUARE_ROWS / 2; r++)
#pragma GCC unroll 4
            for (int v = 0; v < SQUARE_VECTORS; v++) {
                vec even = first_halves(sums[r][2 * v], sums[r][2 * v + 1]);
                vec odd = second_halves(sums[r][2 * v], sums[r][2 * v + 1]);
                out[2 * r][first + v] = accumulate ? out[2 * r][first + v] + even : even;
                out[2 * r + 1][first + v] = accumulate ? out[2 * r + 1][first + v] + odd : odd;
            }
    }
    if (in % 4) bf16_step(SQUARE_ROWS, VECTORS, out, x + in - 2, stride, panel + (in - 2) * PANEL);
}
#endif

/* Rows that share the panels read. */
static inline int64_t rows_together(int64_t in) {
    return items_of(TILED_BYTES, in * 2 * 2 * TILE_ROWS) * 2 * TILE_ROWS;
}

#ifdef WITH_TILES
/* Ask for as many bytes as a tile of a panel has, into the second cache: more lines can be on their way there than to the
 * first one, and the rows stay in that. */
INLINE void ask_for_tile(const char *at) {
    for (int64_t byte = 0; byte < TILE_IN * PANEL; byte += 64) __builtin_prefetch(at + byte, 0, 2);
}

/* Sums of one or two tiles of rows with a panel: `tiles` is a constant where these are used. */
INLINE void begin_sums(const int tiles) {
    _tile_zero(0);
    _tile_zero(1);
    if (tiles == 1) return;
    _tile_zero(2);
    _tile_zero(3);
}

INLINE void load_sums(const int tiles, const float *sums) {
    _tile_loadd(0, sums, 4 * PANEL);
    _tile_loadd(1, sums + PANEL / 2, 4 * PANEL);
    if (tiles == 1) return;
    _tile_loadd(2, sums + TILE_ROWS * PANEL, 4 * PANEL);
    _tile_loadd(3, sums + TILE_ROWS * PANEL + PANEL / 2, 4 * PANEL);
}

INLINE void end_sums(const int tiles, float *sums) {
    _tile_stored(0, sums, 4 * PANEL);
    _tile_stored(1, sums + PANEL / 2, 4 * PANEL);
    if (tiles == 1) return;
    _tile_stored(2, sums + TILE_ROWS * PANEL, 4 * PANEL);
    _tile_stored(3, sums + TILE_ROWS * PANEL + PANEL / 2, 4 * PANEL);
}

/* As many rows as two tiles hold, or one, times one panel, or some input features of both; `sums` go on where these are
 * not the first ones; `ahead` bytes of the panel are asked for before their use, if any. `tiles`, `accumulate` and `ahead`
 * are constants where this is used. */
INLINE void tile_product_of(const int tiles, const int accumulate, const int ahead, float *sums, const uint16_t *x,
                            int64_t stride, const uint16_t *panel, int64_t in) {
    if (accumulate) load_sums(tiles, sums);
    else begin_sums(tiles);
    for (int64_t i = 0; i < in; i += TILE_IN) {
        const char *later = (const char *)(panel + i * PANEL) + ahead;
        _tile_loadd(6, panel + i * PANEL, 4 * PANEL);
        _tile_loadd(7, panel + i * PANEL + PANEL, 4 * PANEL);
        _tile_loadd(4, x + i, 2 * stride);
        if (ahead) ask_for_tile(later);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (tiles == 2) _tile_loadd(5, x + TILE_ROWS * stride + i, 2 * stride);
        if (ahead) ask_for_tile(later + TILE_IN * PANEL);
        if (tiles == 2) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    end_sums(tiles, sums);
}

/* The same of a panel that is near. */
INLINE void tile_product(const int tiles, const int accumulate, float *sums, const uint16_t *x, int64_t stride,
                         const uint16_t *panel, int64_t in) {
    tile_product_of(tiles, accumulate, 0, sums, x, stride, panel, in);
}

/* Up to two tiles of rows times a panel that is near. */
INLINE void tiles_product(float *sums, const uint16_t *x, int64_t stride, const uint16_t *panel, int64_t in, int64_t rows) {
    if (rows > TILE_ROWS) tile_product(2, 0, sums, x, stride, panel, in);
    else tile_product(1, 0, sums, x, stride, panel, in);
}
#endif

#ifdef WITH_PAIRS
/* A panel's first `vectors`: like the others that say how much it is, a constant where this is used. */
INLINE void few_pair_products(const int count, const int vectors, const int accumulate, float *out, const uint16_t *x,
                              int64_t stride, const uint16_t *panel, int64_t in) {
    panel_sums sums[MOST_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < count; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sums[r][v] = accumulate ? load_f32(out + r * PANEL + v * LANES) : splat(0.0f);
#pragma GCC unroll 4
    for (int64_t i = 0; i < in; i += 2) bf16_step(count, vectors, sums, x + i, stride, panel + i * PANEL);
#pragma GCC unroll 8
    for (int r = 0; r < count; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) store_f32(out + r * PANEL + v * LANES, sums[r][v]);
}

/* sums[row][column] of up to two tiles' rows with a panel, which go on if `accumulate`, a constant where this is used; `in` is
 * a multiple of 8, with tiles of 32. Where there are tiles, their shapes are set for as many rows, or more. */
INLINE void pair_products(const int accumulate, float *sums, const uint16_t *x, int64_t stride, const uint16_t *panel,
                          int64_t in, int64_t rows) {
#ifdef WITH_TILES
    if (has_tiles) {
        if (rows > TILE_ROWS) tile_product(2, accumulate, sums, x, stride, panel, in);
        else tile_product(1, accumulate, sums, x, stride, panel, in);
        return;
    }
#endif
    int64_t row = 0;
#ifdef WITH_SQUARES
    for (; row + SQUARE_ROWS <= rows; row += SQUARE_ROWS)
        square_products(accumulate, (panel_sums *)(sums + row * PANEL), x + row * stride, stride, panel, in);
#endif
    for (; row + ROWS_OF_PANEL <= rows; row += ROWS_OF_PANEL)
        few_pair_products(ROWS_OF_PANEL, VECTORS, accumulate, sums + row * PANEL, x + row * stride, stride, panel, in);
    for (; row + ROWS_OF_PANEL / 2 <= rows; row += ROWS_OF_PANEL / 2)
        few_pair_products(ROWS_OF_PANEL / 2, VECTORS, accumulate, sums + row * PANEL, x + row * stride, stride, panel, in);
    for (; row < rows; row++)
        few_pair_products(1, VECTORS, accumulate, sums + row * PANEL, x + row * stride, stride, panel, in);
}
#endif
