/* Linear layers over weights in blocks of few bits; see quantised_linear.py for the layouts.
 *
 * Some blocks of a panel are undone together, into memory that stays in the first cache, and all rows are multiplied with
 * them before the next. What is undone are integers, which bf16 holds exactly: a span's sums are then scaled in float,
 * so that no weight is rounded. Each row's sums have one order, whatever the number of rows; a row or two of 16 bits are
 * multiplied as integers where their bits may differ (digit_products.h). Writing is that of
 * native_linear.c, which comes before this file in the unit.
 */
#include "linear/digit_products.h"
#include "linear/quantised_tiles.h"
#include "native_blocks.h"

#ifndef GRAPHDECODE_QUANTISED
#define GRAPHDECODE_QUANTISED
#define ROWS_MULTIPLIED 32 /* at a time */

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
#endif

#undef WELL_KEPT /* what has all bits of an element: a multiple of a span's unit from so many on */
#ifdef ELEMENT_BF16
#define WELL_KEPT (1 << 7)
#else
#define WELL_KEPT (1 << 10)
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
    struct span_job of;
    const quantised_linear_args *a;
    const quantised_input *x; /* in tiles where there are many rows */
    int64_t stride;
    void *made; /* what threads write before the product: totals, or rows in tiles */
#ifdef WITH_DIGITS
    struct digit_rows digits;
#endif
};

/* The sum of a row's values in each span; those of the last may be fewer. */
static void NAME(row_totals)(float *totals, const element *row, int64_t span, int64_t in) {
    for (int64_t first = 0; first < in; first += span) {
        vec sum = splat(0.0f);
        for (int64_t i = first; i < least_of(first + span, in); i += LANES) sum += load(row + i);
        *totals++ = sum_lanes(sum);
    }
}

static void NAME(span_totals)(const void *given, int64_t begin, int64_t end) {
    const struct NAME(quantised_job) *job = given;
    for (int64_t row = begin; row < end; row++)
        NAME(row_totals)((float *)job->made + row * job->of.spans,
                         (const element *)job->a->x.data + row * job->a->x.stride[0], job->of.weight->span,
                         job->a->x.size[1]);
}

static void NAME(write_panel)(const quantised_linear_args *a, const float *sums, int64_t row, int64_t rows,
                              int64_t panel) {
    NAME(write_sums)((element *)a->out.data + row * a->out.stride[0], a->out.stride[0], sums, a->bias.data, rows,
                     panel * PANEL, a->out.size[1]);
}

#if defined(ELEMENT_BF16) && defined(WITH_TILES)
static void few_rows_of_panels(const void *given, int64_t begin, int64_t end) {
    const struct quantised_job_bf16 *job = given;
    const struct block_weight *weight = job->of.weight;
    _Alignas(64) uint16_t ring[RING * BLOCK_SIZE];
    _Alignas(64) float sums[FEW_ROWS * PANEL];
    int64_t last = end * weight->blocks;
    struct tile_shapes before = tiles_begun();
    begin_few_rows(&job->of, ring, begin * weight->blocks, last);
    for (int64_t panel = begin; panel < end; panel++) {
        few_rows_of_panel(sums, &job->of, job->x, job->stride, ring, panel, last);
        write_panel_bf16(job->a, sums, 0, job->of.rows, panel);
    }
    tiles_ended(before);
}

static void many_rows_of_panels(const void *given, int64_t begin, int64_t end) {
    const struct quantised_job_bf16 *job = given;
    int64_t tiles = (job->of.rows + TILE_ROWS - 1) / TILE_ROWS, features = job->of.weight->blocks * QUANTISED_BLOCK;
    int64_t together = least_of(tiles, items_of(TILED_BYTES, features * 2 * TILE_ROWS));
    float *sums = lasting(together * TILE_ROWS * PANEL);
    struct tile_shapes before = tiles_begun();
    set_tile_shapes(TILE_ROWS, TILE_ROWS, least_of(job->of.weight->span, TILE_IN));
    for (int64_t tile = 0; tile < tiles; tile += together)
        for (int64_t panel = begin; panel < end; panel++) {
            int64_t row = tile * TILE_ROWS, here = least_of(together, tiles - tile);
            many_rows_of_panel(sums, &job->of, job->x, tile, here, panel);
            write_panel_bf16(job->a, sums, row, least_of(here * TILE_ROWS, job->of.rows - row), panel);
        }
    tiles_ended(before);
}

static void rows_in_tiles(const void *given, int64_t begin, int64_t end) {
    const struct quantised_job_bf16 *job = given;
    pack_tiles(job->made, job->a->x.data, job->stride, job->of.rows, job->of.weight->blocks, begin, end);
}
#endif

/* sums[row][column] of all rows with one panel; where there are no tiles. */
static void NAME(rows_of_panel)(float *sums, const struct span_job *of, const quantised_input *x, int64_t stride,
                                int64_t panel) {
    const struct block_weight *weight = of->weight;
    int64_t features = weight->blocks * QUANTISED_BLOCK, words = weight->bits * BLOCK_SIZE / 16;
    _Alignas(64) quantised_input codes[CHUNK * PANEL];
    _Alignas(64) float found[ROWS_MULTIPLIED * PANEL];
    vec scales[MOST_GROUPS][VECTORS], mins[MOST_GROUPS][VECTORS];
    memset(sums, 0, of->rows * PANEL * sizeof *sums);
    for (int64_t first = 0; first < features; first += CHUNK) {
        int64_t count = least_of(CHUNK, features - first), block = panel * weight->blocks + first / QUANTISED_BLOCK;
        for (int64_t each = 0; each < count / QUANTISED_BLOCK; each++)
            UNDONE(codes + each * BLOCK_SIZE, weight->panels + (block + each) * words, weight);
        int64_t span = first / weight->span, spans = (count + weight->span - 1) / weight->span;
        read_numbers(scales, mins, weight, panel, span, spans);
        for (int64_t place = 0; place < spans; place++) {
            int64_t at = place * weight->span;
            for (int64_t row = 0; row < of->rows; row += ROWS_MULTIPLIED) {
                int64_t here = least_of(ROWS_MULTIPLIED, of->rows - row);
                PRODUCTS(found, x + row * stride + first + at, stride, codes + at * PANEL,
                         least_of(weight->span, count - at), here);
                add_span(sums + row * PANEL, found, scales[place], mins[place], of, row, here, span + place);
            }
        }
    }
}

static void NAME(rows_of_panels)(const void *given, int64_t begin, int64_t end) {
    const struct NAME(quantised_job) *job = given;
    float *sums = lasting(job->of.rows * PANEL);
    for (int64_t panel = begin; panel < end; panel++) {
        NAME(rows_of_panel)(sums, &job->of, job->x, job->stride, panel);
        NAME(write_panel)(job->a, sums, 0, job->of.rows, panel);
    }
}

#ifdef WITH_DIGITS
/* Whether rows are multiplied in digits: a float has more of them. */
static inline int NAME(has_digits)(const struct block_weight *weight, int64_t rows, int64_t batch_invariant) {
    return sizeof(element) == 2 && !batch_invariant && rows <= DIGIT_ROWS && has_digits(weight);
}

/* Write a row in digits, and return whether they keep it well. */
static int NAME(row_in_digits)(const struct digit_rows *to, int64_t row, const element *x,
                               const struct block_weight *weight) {
    float wide[CHUNK];
    int is_kept = 1;
    for (int64_t span = 0, first = 0; span < to->spans; span++, first += weight->span) {
        int64_t count = least_of(weight->span, to->in - first);
        for (int64_t i = 0; i < count; i += LANES) store_f32(wide + i, load(x + first + i));
        is_kept &= write_digits(to, row, span, first, wide, count, zero_of_codes(weight), WELL_KEPT);
    }
    return is_kept;
}

static void NAME(digit_panels)(const void *given, int64_t begin, int64_t end) {
    const struct NAME(quantised_job) *job = given;
    float sums[DIGIT_ROWS * PANEL];
    for (int64_t panel = begin; panel < end; panel++) {
        digit_rows_of_panel(sums, &job->of, &job->digits, panel);
        NAME(write_panel)(job->a, sums, 0, job->of.rows, panel);
    }
}
#endif

KERNEL(quantised_linear) {
    int64_t rows = a->x.size[0], in = a->x.size[1], panels = a->panels.size[0];
    int64_t least = items_of(SHARED_WORK, rows * in * PANEL);
    struct block_weight weight = BLOCK_WEIGHT(a);
    if (rows < 1) return;
    read_weight(&weight, a->table.data);
    struct NAME(quantised_job) job = {{&weight, rows, (in + weight.span - 1) / weight.span}, a,
                                      (const quantised_input *)a->x.data, a->x.stride[0]};
    int64_t whole = rows + TILE_ROWS; /* whole tiles read as many rows' totals, and hold as many rows */
    float *at = scratch(whole * (job.of.spans + in) + 2 * LANES);
    job.made = carved(&at, whole * job.of.spans), job.of.totals = job.made;
    if (weight.mins.at) parallel(threads, NAME(span_totals), &job, rows, items_of(SHARED_WORK, in));
#ifdef WITH_DIGITS
    if (NAME(has_digits)(&weight, rows, a->batch_invariant)) {
        int is_kept = 1;
        job.digits = digit_rows_at(at, rows, in, job.of.spans);
        for (int64_t row = 0; row < rows; row++)
            is_kept &= NAME(row_in_digits)(&job.digits, row, (const element *)a->x.data + row * a->x.stride[0], &weight);
        if (is_kept) {
            parallel(threads, NAME(digit_panels), &job, panels, least);
            return;
        }
    }
#endif
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
    if (has_tiles && rows > FEW_ROWS) {
        job.made = at, job.x = job.made;
        parallel(threads, rows_in_tiles, &job, (rows + TILE_ROWS - 1) / TILE_ROWS, items_of(SHARED_WORK, in * TILE_ROWS));
    }
    if (has_tiles && rows <= FEW_ROWS) job.x = few_rows((uint16_t *)at, job.x, job.stride, &job.of);
    if (has_tiles) {
        parallel(threads, rows > FEW_ROWS ? many_rows_of_panels : few_rows_of_panels, &job, panels, least);
        return;
    }
#endif
    if (sizeof(quantised_input) != sizeof(element)) {
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < in; i += LANES)
                store_f32(at + row * in + i, load((const element *)a->x.data + row * a->x.stride[0] + i));
        job.x = (const quantised_input *)at, job.stride = in;
    }
    parallel(threads, NAME(rows_of_panels), &job, panels, least);
}
