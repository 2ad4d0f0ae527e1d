/* Products of rows of bf16 with quantized blocks in matrix tiles, of few rows and of many. A row's sums have one order in
 * both: those of a span, scaled and added in float, then its total times the span's least values.
 */
#pragma once

#include "native_blocks.h"

#define FEW_ROWS (2 * TILE_ROWS)

/* What all panels of a product share. */
struct span_job {
    const struct block_weight *weight;
    int64_t rows, spans;
    const float *totals; /* of each row's spans, if there are minima */
};

/* The scales and minima of some spans. */
static void read_numbers(vec (*scales)[VECTORS], vec (*mins)[VECTORS], const struct block_weight *weight, int64_t panel,
                         int64_t span, int64_t count) {
    numbers_of_spans(scales, &weight->scales, panel, span, count);
    if (weight->mins.at) numbers_of_spans(mins, &weight->mins, panel, span, count);
}

/* Add some rows' scaled sums of a span, and their totals times its minima. */
INLINE void add_span(float *out, const float *products, const vec *scale, const vec *least, const struct span_job *job,
                     int64_t row, int64_t rows, int64_t span) {
    int has_mins = job->weight->mins.at != 0;
    for (int64_t r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) {
            float *at = out + r * PANEL + v * LANES;
            vec sum = load_f32(at) + scale[v] * load_f32(products + r * PANEL + v * LANES);
            store_f32(at, has_mins ? sum + least[v] * job->totals[(row + r) * job->spans + span] : sum);
        }
}

#ifdef WITH_TILES
#define RING 8        /* blocks that are unpacked and not yet multiplied, and as many that are done with */
#define UNPACKED_AHEAD 4 /* blocks between what is unpacked and what is multiplied, so that both go on side by side */
#define SPREAD 8 /* most rows that are spread, and positions of their spans */

static void unpack_ahead(uint16_t *ring, const struct block_weight *weight, int64_t block, int64_t end) {
    int64_t words = weight->bits * BLOCK_SIZE / 16;
    if (block >= end) return;
    unpack_pairs(ring + block % RING * BLOCK_SIZE, weight->panels + block * words, weight);
}

/* The rows, which are one tile's or two's, with some input features of a block. */
INLINE void tile_step(const int tiles, const uint16_t *x, int64_t stride, const uint16_t *codes) {
    _tile_loadd(6, codes, 4 * PANEL);
    _tile_loadd(7, codes + PANEL, 4 * PANEL);
    _tile_loadd(4, x, 2 * stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (tiles == 1) return;
    _tile_loadd(5, x + TILE_ROWS * stride, 2 * stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

INLINE void whole_rows_of_panel(const int tiles, float *sums, const struct span_job *job, const uint16_t *x,
                                int64_t stride, uint16_t *ring, int64_t panel, int64_t end) {
    const struct block_weight *weight = job->weight;
    _Alignas(64) float products[2][FEW_ROWS * PANEL];
    int64_t step = least_of(weight->span, QUANTIZED_BLOCK), features = weight->blocks * QUANTIZED_BLOCK, span = 0;
    memset(sums, 0, job->rows * PANEL * sizeof *sums);
    for (int64_t feature = 0, left = 0; feature < features; feature += step) {
        int64_t block = panel * weight->blocks + feature / QUANTIZED_BLOCK;
        if (feature % QUANTIZED_BLOCK == 0) unpack_ahead(ring, weight, block + UNPACKED_AHEAD, end);
        if (left == 0) {
            begin_sums(tiles);
            left = least_of(weight->span, features - feature);
        }
        tile_step(tiles, x + feature, stride, ring + block % RING * BLOCK_SIZE + feature % QUANTIZED_BLOCK * PANEL);
        left -= step;
        if (left > 0) continue;
        vec scale[1][VECTORS], least[1][VECTORS];
        read_numbers(scale, least, weight, panel, span, 1);
        end_sums(tiles, products[span % 2]);
        add_span(sums, products[span % 2], *scale, *least, job, 0, job->rows, span);
        span++;
    }
}

/* Sums leave tiles slowly. So up to SPREAD rows are multiplied with several spans before these do: a tile of rows has
 * rows for each place of a span, which are zeros but in its own place, and each span's sums stand in rows of their own.
 * A block of two spans has two rows for each, with half of the features in each. */
struct spread {
    int64_t parts, of_block, slots, tile_rows; /* spans of a block, its rows, blocks' places, and rows of a tile */
};

static struct spread spread_of(const struct span_job *job) {
    int64_t parts = job->weight->span < QUANTIZED_BLOCK ? QUANTIZED_BLOCK / job->weight->span : 1;
    int64_t of_block = parts * job->rows, slots = least_of(SPREAD, TILE_ROWS / of_block);
    return (struct spread){parts, of_block, slots, slots * of_block};
}

/* Return up to FEW_ROWS rows as they are multiplied: where they are, or in `out` up to SPREAD, [blocks][tile_rows]
 * [QUANTIZED_BLOCK], with zeros behind each block's own. */
static const uint16_t *few_rows(uint16_t *out, const uint16_t *x, int64_t stride, const struct span_job *job) {
    if (job->rows > SPREAD) return x;
    struct spread as = spread_of(job);
    int64_t part = QUANTIZED_BLOCK / as.parts;
    memset(out, 0, job->weight->blocks * as.tile_rows * QUANTIZED_BLOCK * sizeof *out);
    for (int64_t block = 0; block < job->weight->blocks; block++)
        for (int64_t row = 0; row < as.of_block; row++) {
            int64_t at = row / job->rows * part;
            memcpy(out + (block * as.tile_rows + row) * QUANTIZED_BLOCK + at,
                   x + row % job->rows * stride + block * QUANTIZED_BLOCK + at, part * sizeof *out);
        }
    return out;
}

/* Add what was found for some spans, [spans][rows][PANEL]; `has_mins` is a constant where this is used. */
INLINE void add_spans(const int has_mins, float *sums, const float *products, const struct span_job *job, int64_t panel,
                      int64_t span, int64_t count) {
    vec scales[TILE_ROWS][VECTORS], mins[TILE_ROWS][VECTORS];
    int64_t rows = job->rows;
    read_numbers(scales, mins, job->weight, panel, span, count);
    for (int64_t row = 0; row < rows; row++) {
        const float *totals = job->totals + row * job->spans + span;
        vec sum[VECTORS];
        for (int v = 0; v < VECTORS; v++) sum[v] = load_f32(sums + row * PANEL + v * LANES);
        for (int64_t i = 0; i < count; i++)
            for (int v = 0; v < VECTORS; v++) {
                sum[v] += scales[i][v] * load_f32(products + (i * rows + row) * PANEL + v * LANES);
                if (has_mins) sum[v] += mins[i][v] * totals[i];
            }
        for (int v = 0; v < VECTORS; v++) store_f32(sums + row * PANEL + v * LANES, sum[v]);
    }
}

/* sums[row][column] of rows that are spread with one panel. */
static void spread_rows_of_panel(float *sums, const struct span_job *job, const uint16_t *x, uint16_t *ring,
                                 int64_t panel, int64_t end) {
    const struct block_weight *weight = job->weight;
    struct spread as = spread_of(job);
    int64_t of_span = items_of(weight->span - 1, QUANTIZED_BLOCK), first = panel * weight->blocks;
    _Alignas(64) float products[TILE_ROWS * PANEL];
    memset(sums, 0, job->rows * PANEL * sizeof *sums);
    for (int64_t block = 0, span = 0; block < weight->blocks;) {
        int64_t slot = 0;
        begin_sums(1);
        for (; slot < as.slots && block < weight->blocks; slot++)
            for (int64_t last = least_of(block + of_span, weight->blocks); block < last; block++) {
                unpack_ahead(ring, weight, first + block + UNPACKED_AHEAD, end);
                tile_step(1, x + (block * as.tile_rows - slot * as.of_block) * QUANTIZED_BLOCK, QUANTIZED_BLOCK,
                          ring + (first + block) % RING * BLOCK_SIZE);
            }
        end_sums(1, products);
        if (weight->mins.at) add_spans(1, sums, products, job, panel, span, slot * as.parts);
        else add_spans(0, sums, products, job, panel, span, slot * as.parts);
        span += slot * as.parts;
    }
}

/* Set the tiles for a product of few rows, and unpack the first of some blocks. */
static void begin_few_rows(const struct span_job *job, uint16_t *ring, int64_t first, int64_t end) {
    if (job->rows <= SPREAD) set_tile_shapes(spread_of(job).tile_rows, 0, TILE_IN);
    else set_tile_shapes(least_of(job->rows, TILE_ROWS), job->rows - TILE_ROWS, least_of(job->weight->span, TILE_IN));
    for (int64_t block = first; block < first + UNPACKED_AHEAD; block++) unpack_ahead(ring, job->weight, block, end);
}

/* sums[row][column] of `few_rows` with one panel; the ring has its first blocks, and at the end those of the panel
 * behind it. */
static void few_rows_of_panel(float *sums, const struct span_job *job, const uint16_t *x, int64_t stride, uint16_t *ring,
                              int64_t panel, int64_t end) {
    if (job->rows <= SPREAD) spread_rows_of_panel(sums, job, x, ring, panel, end);
    else if (job->rows > TILE_ROWS) whole_rows_of_panel(2, sums, job, x, stride, ring, panel, end);
    else whole_rows_of_panel(1, sums, job, x, stride, ring, panel, end);
}

/* Some blocks of a panel, unpacked for many rows. */
struct tile_chunk {
    _Alignas(64) uint16_t codes[CHUNK * PANEL];
    vec scales[MOST_GROUPS][VECTORS], mins[MOST_GROUPS][VECTORS]; /* of its spans */
    int64_t first, count, spans;                                  /* input features */
    const float *totals;                                          /* of all rows, from its first span on */
};

static void unpack_tile_chunk(struct tile_chunk *chunk, const struct span_job *job, int64_t panel, int64_t first) {
    const struct block_weight *weight = job->weight;
    int64_t features = weight->blocks * QUANTIZED_BLOCK, words = weight->bits * BLOCK_SIZE / 16;
    int64_t span = first / weight->span;
    chunk->first = first, chunk->count = least_of(CHUNK, features - first), chunk->totals = job->totals + span;
    chunk->spans = (chunk->count + weight->span - 1) / weight->span;
    for (int64_t block = 0; block < chunk->count / QUANTIZED_BLOCK; block++)
        unpack_pairs(chunk->codes + block * BLOCK_SIZE,
                     weight->panels + (panel * weight->blocks + first / QUANTIZED_BLOCK + block) * words, weight);
    read_numbers(chunk->scales, chunk->mins, weight, panel, span, chunk->spans);
}

/* One span's sums of a tile of rows, packed, with half of a panel; `tile` is a constant where this is used. */
INLINE void span_of_tile(const int tile, float *sums, const uint16_t *x, const uint16_t *codes, int64_t at,
                         int64_t span) {
    if (tile == 0) _tile_zero(0);
    else _tile_zero(1);
    for (int64_t end = at + span; at < end; at += TILE_IN) {
        _tile_loadd(6, codes + at * PANEL, 4 * PANEL);
        _tile_loadd(4, x + at / QUANTIZED_BLOCK * QUANTIZED_BLOCK * TILE_ROWS + at % QUANTIZED_BLOCK, 2 * QUANTIZED_BLOCK);
        if (tile == 0) _tile_dpbf16ps(0, 4, 6);
        else _tile_dpbf16ps(1, 4, 6);
    }
    if (tile == 0) _tile_stored(0, sums, 4 * HALF_PANEL);
    else _tile_stored(1, sums, 4 * HALF_PANEL);
}

INLINE void add_to_tile(vec *sums, const float *products, vec scale, vec least, const float *totals, int64_t spans) {
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++) {
        sums[r] += scale * load_f32(products + r * HALF_PANEL);
        if (totals) sums[r] += least * totals[r * spans];
    }
}

/* A tile of rows, whose sums stay in registers, with half of a chunk. */
INLINE void tile_of_rows(const int has_mins, float *out, const uint16_t *x, const struct tile_chunk *chunk,
                         const struct span_job *job, const int half, const float *totals) {
    _Alignas(64) float products[2][TILE_ROWS * HALF_PANEL];
    vec sums[TILE_ROWS];
    const uint16_t *codes = chunk->codes + half * PANEL;
    int64_t span = job->weight->span, index = 0;
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++) sums[r] = load_f32(out + r * PANEL + half * HALF_PANEL);
    for (; index + 2 <= chunk->spans; index += 2) { /* the next is multiplied while one is scaled */
        int64_t at = index * span, next = at + span;
        span_of_tile(0, products[0], x, codes, at, span);
        span_of_tile(1, products[1], x, codes, next, least_of(span, chunk->count - next));
        for (int part = 0; part < 2; part++)
            add_to_tile(sums, products[part], chunk->scales[index + part][half], chunk->mins[index + part][half],
                        has_mins ? totals + index + part : 0, job->spans);
    }
    if (index < chunk->spans) {
        span_of_tile(0, products[0], x, codes, index * span, chunk->count - index * span);
        add_to_tile(sums, products[0], chunk->scales[index][half], chunk->mins[index][half],
                    has_mins ? totals + index : 0, job->spans);
    }
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++) store_f32(out + r * PANEL + half * HALF_PANEL, sums[r]);
}

/* sums[row][column] of tiles of rows, packed one behind another, with one panel. */
static void many_rows_of_panel(float *sums, const struct span_job *job, const uint16_t *x, int64_t tile, int64_t tiles,
                               int64_t panel) {
    struct tile_chunk chunk;
    int64_t features = job->weight->blocks * QUANTIZED_BLOCK;
    memset(sums, 0, tiles * TILE_ROWS * PANEL * sizeof *sums);
    for (int64_t first = 0; first < features; first += CHUNK) {
        unpack_tile_chunk(&chunk, job, panel, first);
        for (int64_t each = 0; each < tiles; each++) {
            const uint16_t *at = x + ((tile + each) * features + first) * TILE_ROWS;
            const float *totals = chunk.totals + (tile + each) * TILE_ROWS * job->spans;
            float *out = sums + each * TILE_ROWS * PANEL;
            for (int half = 0; half < VECTORS; half++)
                if (job->weight->mins.at) tile_of_rows(1, out, at, &chunk, job, half, totals);
                else tile_of_rows(0, out, at, &chunk, job, half, totals);
        }
    }
}

/* Rows as `many_rows_of_panel` takes them: [tiles][blocks][TILE_ROWS][QUANTIZED_BLOCK], missing rows being zeros. */
static void pack_tiles(uint16_t *out, const uint16_t *x, int64_t stride, int64_t rows, int64_t blocks, int64_t begin,
                       int64_t end) {
    for (int64_t tile = begin; tile < end; tile++)
        for (int64_t row = tile * TILE_ROWS; row < (tile + 1) * TILE_ROWS; row++)
            for (int64_t block = 0; block < blocks; block++) {
                uint16_t *to = out + ((tile * blocks + block) * TILE_ROWS + row % TILE_ROWS) * QUANTIZED_BLOCK;
                if (row < rows) memcpy(to, x + row * stride + block * QUANTIZED_BLOCK, QUANTIZED_BLOCK * sizeof *to);
                else memset(to, 0, QUANTIZED_BLOCK * sizeof *to);
            }
}
#endif
