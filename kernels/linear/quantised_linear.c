/* Linear layers over weights in blocks of few bits; see quantised_linear.py for the layouts.
 *
 * Some blocks of a panel are undone together, into memory that stays in the first cache, and all rows are multiplied with
 * them before the next. What is undone are integers, which bf16 holds exactly: a group's sums are then scaled in float,
 * so that no weight is rounded. Each row's sums have one order, whatever the number of rows.
 */
#include "native_blocks.h"

#ifndef GRAPHDECODE_QUANTISED
#define GRAPHDECODE_QUANTISED
#define ROWS_MULTIPLIED 32 /* at a time: those of two tiles */

/* Some blocks of a panel, undone. */
struct chunk {
    int64_t first, count; /* input features */
    int64_t span, spans;  /* that are summed up before they are scaled, and how often */
    float scales[MOST_GROUPS * PANEL], mins[MOST_GROUPS * PANEL]; /* of each span */
    int has_mins;
};

/* One span's sums, scaled, and its rows' totals times its least values. */
static void add_scaled(float *out, const float *sums, const struct chunk *chunk, int64_t span, const float *totals,
                       int64_t stride, int64_t rows) {
    vec scale[VECTORS], least[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        scale[v] = load_f32(chunk->scales + span * PANEL + v * LANES);
        if (chunk->has_mins) least[v] = load_f32(chunk->mins + span * PANEL + v * LANES);
    }
    for (int64_t r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) {
            float *at = out + r * PANEL + v * LANES;
            vec sum = load_f32(at) + scale[v] * load_f32(sums + r * PANEL + v * LANES);
            store_f32(at, chunk->has_mins ? sum + least[v] * totals[r * stride] : sum);
        }
}

INLINE void few_float_products(const int count, float *out, const float *x, int64_t stride, const float *codes,
                               int64_t span) {
    panel_sums sums[MOST_ROWS];
    for (int r = 0; r < count; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = splat(0.0f);
    for (int64_t i = 0; i < span; i++) f32_step(count, sums, x + i, stride, codes + i * PANEL);
    memcpy(out, sums, count * sizeof *sums);
}

/* sums[row][column] of up to ROWS_MULTIPLIED rows with undone codes. */
static void float_products(float *sums, const float *x, int64_t stride, const float *codes, int64_t span, int64_t rows) {
    int64_t row = 0;
    for (; row + ROWS <= rows; row += ROWS)
        few_float_products(ROWS, sums + row * PANEL, x + row * stride, stride, codes, span);
    for (; row < rows; row++) few_float_products(1, sums + row * PANEL, x + row * stride, stride, codes, span);
}

#ifdef WITH_TILES
/* One span's sums of a tile of rows with half of a panel. */
INLINE void span_products(const int tile, float *sums, const uint16_t *x, int64_t stride, const uint16_t *codes,
                          int64_t span) {
    if (tile == 0) _tile_zero(0);
    else _tile_zero(1);
    for (int64_t i = 0; i < span; i += TILE_IN) {
        _tile_loadd(6, codes + i * PANEL, 4 * PANEL);
        _tile_loadd(4, x + i, 2 * stride);
        if (tile == 0) _tile_dpbf16ps(0, 4, 6);
        else _tile_dpbf16ps(1, 4, 6);
    }
    if (tile == 0) _tile_stored(0, sums, 4 * HALF_PANEL);
    else _tile_stored(1, sums, 4 * HALF_PANEL);
}

INLINE void add_span(vec *sums, const float *found, const struct chunk *chunk, int64_t span, int64_t half,
                     const float *totals, int64_t stride) {
    vec scale = load_f32(chunk->scales + span * PANEL + half * HALF_PANEL);
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++) sums[r] += scale * load_f32(found + r * HALF_PANEL);
    if (!chunk->has_mins) return;
    vec least = load_f32(chunk->mins + span * PANEL + half * HALF_PANEL);
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++) sums[r] += least * totals[r * stride + span];
}

/* A tile of rows, whose sums stay in registers, with half of a chunk. */
static void tile_of_rows(float *out, const uint16_t *x, int64_t stride, const uint16_t *codes, const struct chunk *chunk,
                         int64_t half, const float *totals, int64_t totals_stride) {
    _Alignas(64) float found[2][TILE_ROWS * HALF_PANEL];
    vec sums[TILE_ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++) sums[r] = load_f32(out + r * PANEL + half * HALF_PANEL);
    int64_t span = 0;
    codes += half * PANEL;
    for (; span + 2 <= chunk->spans; span += 2) { /* the next is multiplied while one is scaled */
        int64_t at = span * chunk->span, next = at + chunk->span;
        span_products(0, found[0], x + at, stride, codes + at * PANEL, chunk->span);
        span_products(1, found[1], x + next, stride, codes + next * PANEL, least_of(chunk->span, chunk->count - next));
        add_span(sums, found[0], chunk, span, half, totals, totals_stride);
        add_span(sums, found[1], chunk, span + 1, half, totals, totals_stride);
    }
    if (span < chunk->spans) {
        int64_t at = span * chunk->span;
        span_products(0, found[0], x + at, stride, codes + at * PANEL, least_of(chunk->span, chunk->count - at));
        add_span(sums, found[0], chunk, span, half, totals, totals_stride);
    }
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++) store_f32(out + r * PANEL + half * HALF_PANEL, sums[r]);
}
#endif
#endif

#undef quantised_input
#undef UNDONE
#undef PRODUCTS
#if defined(ELEMENT_BF16) && defined(WITH_PAIRS)
#define quantised_input uint16_t
#define UNDONE pairs_undone
#define PRODUCTS(sums, x, stride, codes, span, rows) pair_products(sums, x, stride, codes, span, rows)
#else
#define quantised_input float
#define UNDONE floats_undone
#define PRODUCTS float_products
#endif

struct NAME(quantised_job) {
    const quantised_linear_args *a;
    const struct block_weight *weight;
    const quantised_input *x;
    int64_t stride, spans; /* of all input features */
    float *totals;         /* of each row's spans, if there are least values */
};

/* The sum of each row's values in each span; those of the last may be fewer. */
static void NAME(span_totals)(const void *given, int64_t begin, int64_t end) {
    const struct NAME(quantised_job) *job = given;
    int64_t span = job->weight->span, in = job->a->x.size[1];
    for (int64_t row = begin; row < end; row++)
        for (int64_t place = 0; place < job->spans; place++) {
            const element *at = (const element *)job->a->x.data + row * job->a->x.stride[0];
            vec sum = splat(0.0f);
            for (int64_t i = place * span; i < least_of((place + 1) * span, in); i += LANES) sum += load(at + i);
            job->totals[row * job->spans + place] = sum_lanes(sum);
        }
}

static void NAME(undo_chunk)(quantised_input *codes, struct chunk *chunk, const struct block_weight *weight,
                             int64_t panel, int64_t first) {
    int64_t features = weight->blocks * BLOCK, words = weight->bits * BLOCK_SIZE / 16;
    const uint16_t *at = weight->panels + (panel * weight->blocks + first / BLOCK) * words;
    chunk->first = first, chunk->count = least_of(CHUNK, features - first);
    chunk->span = weight->span, chunk->spans = (chunk->count + weight->span - 1) / weight->span;
    chunk->has_mins = weight->mins.at != 0;
    for (int64_t block = 0; block < chunk->count / BLOCK; block++)
        UNDONE(codes + block * BLOCK_SIZE, at + block * words, weight);
    undo_spans(chunk->scales, &weight->scales, panel, first, weight, chunk->spans);
    if (chunk->has_mins) undo_spans(chunk->mins, &weight->mins, panel, first, weight, chunk->spans);
}

/* Add the products of some rows, from `row` on, with an undone chunk to `out`. */
static void NAME(multiply_chunk)(const struct NAME(quantised_job) *job, float *out, const quantised_input *codes,
                                 const struct chunk *chunk, int64_t row, int64_t rows) {
    _Alignas(64) float sums[ROWS_MULTIPLIED * PANEL];
    const quantised_input *x = job->x + row * job->stride + chunk->first;
    const float *totals = job->totals + row * job->spans + chunk->first / chunk->span;
    int64_t begin = 0;
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
    for (; has_tiles && rows > ROWS_MULTIPLIED && begin < rows; begin += TILE_ROWS) {
        if (rows - begin < TILE_ROWS) set_tile_shapes(rows - begin, 0, least_of(chunk->span, TILE_IN));
        for (int64_t half = 0; half < 2; half++)
            tile_of_rows(out + begin * PANEL, x + begin * job->stride, job->stride, codes, chunk, half,
                         totals + begin * job->spans, job->spans);
        if (rows - begin < TILE_ROWS) set_tile_shapes(TILE_ROWS, 0, least_of(chunk->span, TILE_IN));
    }
#endif
    for (; begin < rows; begin += ROWS_MULTIPLIED) {
        int64_t here = least_of(ROWS_MULTIPLIED, rows - begin);
        for (int64_t span = 0; span < chunk->spans; span++) {
            int64_t at = span * chunk->span, count = least_of(chunk->span, chunk->count - at);
            PRODUCTS(sums, x + begin * job->stride + at, job->stride, codes + at * PANEL, count, here);
            add_scaled(out + begin * PANEL, sums, chunk, span, totals + begin * job->spans + span, job->spans, here);
        }
    }
}

/* Write some rows' sums with a panel, biased, where they belong; the last panel may be narrower. */
static void NAME(write_rows)(const quantised_linear_args *a, const float *sums, int64_t panel, int64_t row, int64_t rows) {
    int64_t first = panel * PANEL, width = least_of(PANEL, a->out.size[1] - first);
    _Alignas(64) float biases[PANEL] = {0};
    for (int64_t j = 0; a->bias.data && j < width; j++) biases[j] = widen(((const element *)a->bias.data)[first + j]);
    for (int64_t r = 0; r < rows; r++) {
        element *at = (element *)a->out.data + (row + r) * a->out.stride[0] + first, few[PANEL];
        element *to = width == PANEL ? at : few;
        for (int64_t j = 0; j < PANEL; j += LANES)
            store(to + j, load_f32(sums + r * PANEL + j) + load_f32(biases + j));
        if (to != at) memcpy(at, few, width * sizeof *at);
    }
}

static void NAME(quantised_panels)(const void *given, int64_t begin, int64_t end) {
    const struct NAME(quantised_job) *job = given;
    const struct block_weight *weight = job->weight;
    int64_t rows = job->a->x.size[0], features = weight->blocks * BLOCK;
    int64_t together = items_of(TILED_BYTES, features * 2 * ROWS_MULTIPLIED) * ROWS_MULTIPLIED;
    int64_t held = (least_of(together, rows) + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    float *sums = lasting(held * PANEL);
    _Alignas(64) quantised_input codes[CHUNK * PANEL];
    struct chunk chunk;
    struct tile_shapes before = tiles_begun();
    for (int64_t row = 0; row < rows; row += together) {
        int64_t here = least_of(together, rows - row);
        set_tile_shapes(least_of(here, TILE_ROWS), least_of(here - TILE_ROWS, TILE_ROWS), least_of(weight->span, TILE_IN));
        for (int64_t panel = begin; panel < end; panel++) {
            memset(sums, 0, held * PANEL * sizeof *sums);
            for (int64_t first = 0; first < features; first += CHUNK) {
                NAME(undo_chunk)(codes, &chunk, weight, panel, first);
                NAME(multiply_chunk)(job, sums, codes, &chunk, row, here);
            }
            NAME(write_rows)(job->a, sums, panel, row, here);
        }
    }
    tiles_ended(before);
}

KERNEL(quantised_linear) {
    int64_t rows = a->x.size[0], in = a->x.size[1];
    struct block_weight weight = BLOCK_WEIGHT(a);
    struct NAME(quantised_job) job = {a, &weight, (const quantised_input *)a->x.data, a->x.stride[0]};
    if (rows < 1) return;
    read_table(&weight, a->table.data);
    job.spans = (in + weight.span - 1) / weight.span;
    int is_widened = sizeof(quantised_input) != sizeof(element);
    float *at = scratch((rows + TILE_ROWS) * job.spans + is_widened * rows * in + 2 * LANES);
    job.totals = carved(&at, (rows + TILE_ROWS) * job.spans); /* as many rows as whole tiles read */
    if (weight.mins.at) parallel(threads, NAME(span_totals), &job, rows, items_of(SHARED_WORK, in));
    if (is_widened) {
        float *wide = carved(&at, rows * in);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < in; i += LANES)
                store_f32(wide + row * in + i, load((const element *)a->x.data + row * a->x.stride[0] + i));
        job.x = (const quantised_input *)wide, job.stride = in;
    }
    parallel(threads, NAME(quantised_panels), &job, a->panels.size[0], items_of(SHARED_WORK, rows * in * PANEL));
}
