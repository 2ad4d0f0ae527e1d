/* Products of rows of fp16 in matrix tiles of bf16: each value is the sum of two of these, exactly.
 *
 * fp16 has 11 significant bits: bf16 holds the upper 8 of them, and what is left has 3. Both are normal numbers of bf16,
 * for the last bit of fp16 is worth 2^-24. So four products of parts, which floats hold exactly, are the product, and
 * sums are rounded as those of bf16 are. A row's sums have one order, whatever the number of rows.
 */
#pragma once

#include "native_products.h"

#ifdef WITH_TILES
#define SPLIT_PART (TILE_IN * PANEL) /* of a block of weights: upper or lower parts in pairs, [TILE_IN / 2][PANEL][2] */
#define SPLIT_BLOCK (2 * SPLIT_PART)
#define SPLIT_AHEAD 1024 /* weights of prefetch distance */
#define SPLIT_BYTES 1048576 /* of split rows, which stay in the L2 cache while panels are read */

/* The upper part of each value, in the upper half of its lane; the rest is also bf16. */
INLINE uvec upper_part(vec v) { return (uvec)v & 0xffff0000; }

INLINE uvec lower_part(vec v) { return (uvec)(v - (vec)upper_part(v)); }

/* A row, padded with zeros: its upper parts, and `padded` values behind them its lower ones. */
static void split_row(uint16_t *to, const uint16_t *x, int64_t in, int64_t padded) {
    uint16_t tail[LANES] = {0};
    for (int64_t i = 0; i < padded; i += LANES) {
        const uint16_t *at = i + LANES <= in ? x + i : tail;
        if (i < in && i + LANES > in) memcpy(tail, x + i, (in - i) * sizeof *x);
        vec v = load_f16(at);
        hvec upper = __builtin_convertvector(upper_part(v) >> 16, hvec);
        hvec lower = __builtin_convertvector(lower_part(v) >> 16, hvec);
        memcpy(to + i, &upper, sizeof upper);
        memcpy(to + padded + i, &lower, sizeof lower);
        if (i + LANES > in) memset(tail, 0, sizeof tail);
    }
}

/* Some pairs of input features of a block of weights [TILE_IN][PANEL], of which `count` are there. */
INLINE void split_weights(uint16_t *to, const uint16_t *from, const int begin, const int end, int64_t count) {
#pragma GCC unroll 16
    for (int i = begin; i < end; i += 2) {
        __builtin_prefetch(from + i * PANEL + SPLIT_AHEAD);
        __builtin_prefetch(from + (i + 1) * PANEL + SPLIT_AHEAD);
#pragma GCC unroll 2
        for (int half = 0; half < PANEL; half += LANES) {
            vec even = i < count ? load_f16(from + i * PANEL + half) : splat(0.0f);
            vec odd = i + 1 < count ? load_f16(from + (i + 1) * PANEL + half) : splat(0.0f);
            uvec upper = upper_part(even) >> 16 | upper_part(odd), lower = lower_part(even) >> 16 | lower_part(odd);
            memcpy(to + i * PANEL + 2 * half, &upper, sizeof upper);
            memcpy(to + SPLIT_PART + i * PANEL + 2 * half, &lower, sizeof lower);
        }
    }
}

static void split_block(uint16_t *to, const uint16_t *from, int64_t count) {
    if (count >= TILE_IN) split_weights(to, from, 0, TILE_IN, TILE_IN);
    else split_weights(to, from, 0, TILE_IN, count);
}

/* For few rows, tiles 2, 3, 6 and 7 are weights. */
static void set_split_rows(int64_t rows) {
    struct tile_shapes shapes = {.palette = 1};
    if (!has_tiles) return;
    for (int tile = 0; tile < 8; tile++) {
        shapes.rows[tile] = tile % 4 < 2 ? (uint8_t)rows : TILE_ROWS;
        shapes.row_bytes[tile] = 64;
    }
    load_shapes(&shapes);
}

/* The products of up to TILE_ROWS rows with a panel. A block is split while the one before it is multiplied; the first one
 * has been, and behind the last one that of the next panel is. */
static void few_split_products(float *sums, const uint16_t *x, uint16_t *ring, int64_t *slot, const uint16_t *panel,
                               int64_t in, int is_last) {
    int64_t padded = (in + TILE_IN - 1) / TILE_IN * TILE_IN;
    begin_sums(1);
    for (int64_t i = 0; i < padded; i += TILE_IN) {
        const uint16_t *block = ring + *slot * SPLIT_BLOCK, *from = panel + least_of(i + TILE_IN, in) * PANEL;
        int64_t count = i + TILE_IN < in ? in - i - TILE_IN : is_last ? 0 : in;
        uint16_t *next = ring + (*slot ^= 1) * SPLIT_BLOCK;
        _tile_loadd(4, x + i, 4 * padded);
        _tile_loadd(5, x + padded + i, 4 * padded);
        _tile_loadd(2, block, 4 * PANEL);
        _tile_loadd(3, block + PANEL, 4 * PANEL);
        _tile_loadd(6, block + SPLIT_PART, 4 * PANEL);
        _tile_loadd(7, block + SPLIT_PART + PANEL, 4 * PANEL);
        int is_whole = count >= TILE_IN;
        _tile_dpbf16ps(0, 4, 2);
        _tile_dpbf16ps(1, 4, 3);
        if (is_whole) split_weights(next, from, 0, 8, TILE_IN);
        _tile_dpbf16ps(0, 5, 2);
        _tile_dpbf16ps(1, 5, 3);
        if (is_whole) split_weights(next, from, 8, 16, TILE_IN);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (is_whole) split_weights(next, from, 16, 24, TILE_IN);
        _tile_dpbf16ps(0, 5, 6);
        _tile_dpbf16ps(1, 5, 7);
        if (is_whole) split_weights(next, from, 24, 32, TILE_IN);
        else if (count > 0) split_block(next, from, count);
    }
    end_sums(1, sums);
}

static void split_panel(uint16_t *to, const uint16_t *panel, int64_t in) {
    for (int64_t i = 0; i < in; i += TILE_IN, to += SPLIT_BLOCK) split_block(to, panel + i * PANEL, in - i);
}

/* The products of up to two tiles of rows with a panel that is split; `tiles` is a constant where this is used. */
INLINE void split_tile_products(const int tiles, float *sums, const uint16_t *x, const uint16_t *panel, int64_t padded) {
    const uint16_t *second = x + 2 * padded * TILE_ROWS;
    begin_sums(tiles);
    for (int64_t i = 0; i < padded; i += TILE_IN) {
        const uint16_t *block = panel + i / TILE_IN * SPLIT_BLOCK;
        for (int part = 0; part < 2; part++) {
            _tile_loadd(6, block + part * SPLIT_PART, 4 * PANEL);
            _tile_loadd(7, block + part * SPLIT_PART + PANEL, 4 * PANEL);
            for (int of_x = 0; of_x < 2; of_x++) {
                _tile_loadd(4, x + i + of_x * padded, 4 * padded);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                if (tiles == 1) continue;
                _tile_loadd(5, second + i + of_x * padded, 4 * padded);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
    }
    end_sums(tiles, sums);
}
#endif
