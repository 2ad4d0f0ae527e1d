/* Linear layers over quantized weights in blocks; see quantized_linear.py for the layouts.
 *
 * Some blocks of a panel are unpacked together, into memory that stays in the first cache, and multiplied with all rows
 * before the next. Rows of 16 bits are multiplied as integers where bits may depend on the number of rows
 * (integer_products.h). Else, and for tiles, codes for bf16 are unpacked to integers, which it holds exactly, and a span's
 * sums are scaled in float; for floats they are dequantized. Writing is that of linear.c, which comes before this file in
 * the unit.
 */
#include "linear/integer_products.h"
#include "linear/quantized_tiles.h"
#include "native_blocks.h"

#define ROWS_MULTIPLIED 32 /* at a time */
#define FEW_ROWS_OF_BYTES 16 /* which are faster as floats than as shorts */

/* What has all bits of an element: a multiple of a span's unit from so many on. */
#ifdef ELEMENT_F16
#define ACCURATE_MULTIPLE (1 << 10)
#else
#define ACCURATE_MULTIPLE (1 << 7)
#endif

struct quantized_job {
    struct span_job of;
    const quantized_linear_args *a;
    const input *x; /* in tiles where there are many rows */
    int64_t stride;
    void *prepared; /* written by threads before the product: totals, or rows in tiles */
#if WITH_INTEGERS
    struct integer_rows integers;
#endif
};

/* The sum of a row's values in each span; the last span may be shorter. */
static void row_totals(float *totals, const element *row, int64_t span, int64_t in) {
    for (int64_t first = 0; first < in; first += span) {
        vec sum = splat(0.0f);
        for (int64_t i = first; i < least_of(first + span, in); i += LANES) sum += load(row + i);
        *totals++ = sum_lanes(sum);
    }
}

static void span_totals(const void *arg, int64_t begin, int64_t end) {
    const struct quantized_job *job = arg;
    for (int64_t row = begin; row < end; row++)
        row_totals((float *)job->prepared + row * job->of.spans,
                         (const element *)job->a->x.data + row * job->a->x.stride[0], job->of.weight->span,
                         job->a->x.size[1]);
}

static void write_panel(const quantized_linear_args *a, const float *sums, int64_t row, int64_t rows,
                              int64_t panel) {
    const struct results to = {a->out.data, a->out.stride[0], a->out.size[1], IS_WIDE(a->out), a->bias.data};
    write_sums(&to, sums, row, rows, panel);
}

#if defined(ELEMENT_BF16) && defined(WITH_TILES)
static void few_rows_of_panels(const void *arg, int64_t begin, int64_t end) {
    const struct quantized_job *job = arg;
    const struct block_weight *weight = job->of.weight;
    _Alignas(64) uint16_t ring[RING * BLOCK_SIZE];
    _Alignas(64) float sums[FEW_ROWS * PANEL];
    int64_t last = end * weight->blocks;
    struct tile_shapes before = tiles_begun();
    begin_few_rows(&job->of, ring, begin * weight->blocks, last);
    for (int64_t panel = begin; panel < end; panel++) {
        few_rows_of_panel(sums, &job->of, job->x, job->stride, ring, panel, last);
        write_panel(job->a, sums, 0, job->of.rows, panel);
    }
    tiles_ended(before);
}

static void many_rows_of_panels(const void *arg, int64_t begin, int64_t end) {
    const struct quantized_job *job = arg;
    int64_t tiles = (job->of.rows + TILE_ROWS - 1) / TILE_ROWS, features = job->of.weight->blocks * QUANTIZED_BLOCK;
    int64_t together = least_of(tiles, items_of(TILED_BYTES, features * 2 * TILE_ROWS));
    float *sums = lasting(together * TILE_ROWS * PANEL);
    struct tile_shapes before = tiles_begun();
    set_tile_shapes(TILE_ROWS, TILE_ROWS, least_of(job->of.weight->span, TILE_IN));
    for (int64_t tile = 0; tile < tiles; tile += together)
        for (int64_t panel = begin; panel < end; panel++) {
            int64_t row = tile * TILE_ROWS, chunk_rows = least_of(together, tiles - tile);
            many_rows_of_panel(sums, &job->of, job->x, tile, chunk_rows, panel);
            write_panel(job->a, sums, row, least_of(chunk_rows * TILE_ROWS, job->of.rows - row), panel);
        }
    tiles_ended(before);
}

static void rows_in_tiles(const void *arg, int64_t begin, int64_t end) {
    const struct quantized_job *job = arg;
    pack_tiles(job->prepared, job->a->x.data, job->stride, job->of.rows, job->of.weight->blocks, begin, end);
}
#endif

/* Whether codes are signed bytes with one scale for each output feature: then sums are scaled once. */
static inline int has_row_scaled_bytes(const struct block_weight *weight) {
    return weight->bits == 8 && !weight->is_e4m3 && weight->scales.groups == 1 && !weight->scales.factors &&
           !weight->mins.at;
}

#if !(defined(ELEMENT_BF16) && defined(WITH_PAIRS))
/* A signed byte of each word; `byte` and `rows` are constants where this is used. */
INLINE vec float_of_byte(uvec words, const int byte, const int rows) {
    if (LANES == 8 && byte < 2 && rows == 1) return signed_byte(words, byte); /* by fewer shifts, and more registers */
    return __builtin_convertvector((ivec)(words << (24 - 8 * byte)) >> 24, vec);
}

/* The products of `count` rows with `panels` panels of signed bytes, which stand one behind another: constants where this
 * is used. A row of words has two input features, each in its bytes' place of both halves of the panel. One row takes two
 * panels, for sums that wait for each other are slower than memory. */
INLINE void rows_of_bytes(const int count, const int panels, float *out, const float *x, int64_t stride, const uint16_t *at,
                          int64_t in, struct ahead ahead) {
    panel_sums sums[MOST_ROWS];
    const int64_t words = in / 2 * ROW_WORDS;
    for (int i = 0; i < count * panels; i++)
        for (int v = 0; v < VECTORS; v++) sums[i][v] = splat(0.0f);
    for (int64_t i = 0; i < in; i += 4, at += 2 * ROW_WORDS, ahead.at += ahead.pace) {
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++) {
            const char *line = ahead.at + p * words * sizeof *at;
            __builtin_prefetch(line, 0, 2); /* into L2: the L1 cache keeps the rows */
            __builtin_prefetch(line + 64, 0, 2);
        }
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++)
#pragma GCC unroll 2
            for (int p = 0; p < panels; p++) {
                vec weights[VECTORS];
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) {
                    const int lane = v * LANES % HALF_PANEL, byte = k % 2 * 2 + v * LANES / HALF_PANEL;
                    const uint16_t *row = at + p * words + k / 2 * ROW_WORDS;
                    weights[v] = float_of_byte(load_words(row + 2 * lane), byte, count);
                }
#pragma GCC unroll 8
                for (int r = 0; r < count; r++)
#pragma GCC unroll 8
                    for (int v = 0; v < VECTORS; v++) sums[r * panels + p][v] += weights[v] * x[r * stride + i + k];
            }
    }
    memcpy(out, sums, count * panels * sizeof *sums);
}

static void byte_products(float *sums, const float *x, int64_t stride, const uint16_t *panel, int64_t in, int64_t rows) {
    const int64_t step_bytes = 2 * ROW_WORDS * sizeof *panel; /* of four input features */
    for (int64_t row = 0, count; row < rows; row += count) {
        count = part_of(rows - row, ROWS_OF_PANEL);
        FOR_COUNT(rows_of_bytes, count, 1, sums + row * PANEL, x + row * stride, stride, panel, in,
                  lines_ahead((const char *)panel, in / 4 * step_bytes, step_bytes, row, rows, count, ROWS_OF_PANEL))
    }
}

static void scale_rows(float *sums, const vec *scales, int64_t rows) {
    for (int64_t row = 0; row < rows; row++, sums += PANEL)
        for (int v = 0; v < VECTORS; v++) store_f32(sums + v * LANES, load_f32(sums + v * LANES) * scales[v]);
}

/* sums[panel][column] of one row with two panels of signed bytes. */
static void row_of_panel_pair(float *sums, const struct span_job *of, const float *x, int64_t panel) {
    const struct block_weight *weight = of->weight;
    const int64_t features = weight->blocks * QUANTIZED_BLOCK;
    const uint16_t *at = weight->panels + panel * features / 2 * ROW_WORDS;
    const struct ahead ahead = {(const char *)at + AHEAD(1), 2 * ROW_WORDS * sizeof *at};
    rows_of_bytes(1, 2, sums, x, 0, at, features, ahead);
    for (int p = 0; p < 2; p++) {
        vec scales[1][VECTORS];
        numbers_of_spans(scales, &weight->scales, panel + p, 0, 1);
        scale_rows(sums + p * PANEL, *scales, 1);
    }
}
#endif

/* sums[row][column] of all rows with one panel, without tiles. */
static void quantized_panel(float *sums, const struct span_job *of, const input *x, int64_t stride,
                                int64_t panel) {
    const struct block_weight *weight = of->weight;
    int64_t features = weight->blocks * QUANTIZED_BLOCK, words = weight->bits * BLOCK_SIZE / 16;
    _Alignas(64) input unpacked[CHUNK * PANEL];
    vec scales[MOST_GROUPS][VECTORS], mins[MOST_GROUPS][VECTORS] = {0};
    memset(sums, 0, of->rows * PANEL * sizeof *sums);
#if !(defined(ELEMENT_BF16) && defined(WITH_PAIRS))
    vec last_scales[1][VECTORS];
    const int is_scaled_last = has_row_scaled_bytes(weight);
    if (is_scaled_last) read_numbers(last_scales, mins, weight, panel, 0, 1);
    if (is_scaled_last && of->rows < BLOCKS_FROM) {
        byte_products(sums, x, stride, weight->panels + panel * weight->blocks * words, features, of->rows);
        scale_rows(sums, *last_scales, of->rows);
        return;
    }
#endif
    for (int64_t first = 0; first < features; first += CHUNK) {
        int64_t count = least_of(CHUNK, features - first), span = first / weight->span;
        int64_t spans = (count + weight->span - 1) / weight->span;
        const uint16_t *block = weight->panels + (panel * weight->blocks + first / QUANTIZED_BLOCK) * words;
        read_numbers(scales, mins, weight, panel, span, spans);
#if defined(ELEMENT_BF16) && defined(WITH_PAIRS) /* integers, which bf16 holds: a span's sums are scaled */
        _Alignas(64) float products[ROWS_MULTIPLIED * PANEL];
        for (int64_t i = 0; i < count; i += QUANTIZED_BLOCK, block += words)
            unpack_pairs(unpacked + i * PANEL, block, weight);
        for (int64_t at = 0; at < count; at += weight->span, span++)
            for (int64_t row = 0; row < of->rows; row += ROWS_MULTIPLIED) {
                int64_t chunk_rows = least_of(ROWS_MULTIPLIED, of->rows - row), index = at / weight->span;
                pair_products(0, products, x + row * stride + first + at, stride, unpacked + at * PANEL,
                              least_of(weight->span, count - at), chunk_rows);
                add_span(sums + row * PANEL, products, scales[index], mins[index], of, row, chunk_rows, span);
            }
#else
        for (int64_t i = 0; is_scaled_last && i < spans; i++)
            for (int v = 0; v < VECTORS; v++) scales[i][v] = splat(1.0f);
        for (int64_t i = 0; i < count; i += QUANTIZED_BLOCK, block += words) {
            const vec (*scale)[VECTORS] = scales + i / weight->span, (*least)[VECTORS] = mins + i / weight->span;
            if (of->rows == 1) add_block(sums, x + first + i, block, weight, scale, least);
            else dequantize_block(unpacked + i * PANEL, block, weight, scale, least);
        }
        if (of->rows > 1) float_products(sums, x + first, stride, unpacked, count, of->rows);
#endif
    }
#if !(defined(ELEMENT_BF16) && defined(WITH_PAIRS))
    if (is_scaled_last) scale_rows(sums, *last_scales, of->rows);
#endif
}

static void quantized_rows(const void *arg, int64_t begin, int64_t end) {
    const struct quantized_job *job = arg;
    float *sums = lasting((job->of.rows + 1) * PANEL);
#if !(defined(ELEMENT_BF16) && defined(WITH_PAIRS))
    if (LANES == 16 && job->of.rows == 1 && has_row_scaled_bytes(job->of.weight))
        for (; begin + 2 <= end; begin += 2) {
            row_of_panel_pair(sums, &job->of, (const float *)job->x, begin);
            for (int p = 0; p < 2; p++) write_panel(job->a, sums + p * PANEL, 0, 1, begin + p);
        }
#endif
    for (int64_t panel = begin; panel < end; panel++) {
        quantized_panel(sums, &job->of, job->x, job->stride, panel);
        write_panel(job->a, sums, 0, job->of.rows, panel);
    }
}

static inline int takes_integers(const struct block_weight *weight, int64_t rows, int64_t batch_invariant) {
    int is_slower = 0;
#if defined(ELEMENT_BF16) && defined(WITH_TILES) /* which multiply many rows faster */
    is_slower = has_tiles && rows > CHECKED_ROWS;
#endif
#if LANES == 16 && !WITH_DIGITS && !(defined(ELEMENT_BF16) && defined(WITH_PAIRS)) /* some rows are faster as floats */
    is_slower |= rows > CHECKED_ROWS && rows <= FEW_ROWS_OF_BYTES && has_row_scaled_bytes(weight);
#endif
    return WITH_INTEGERS && !is_slower && !batch_invariant && has_byte_codes(weight);
}

#if WITH_INTEGERS
/* Write a row in multiples, and return whether they keep it well; `is_checked` is a constant where this is used. */
INLINE int write_row(const int is_checked, const struct integer_rows *to, int64_t row, const element *x,
                           const struct block_weight *weight) {
    const int zero = zero_of_codes(weight);
    float wide[CHUNK];
    int is_accurate = 1;
    for (int64_t span = 0, first = 0; span < to->spans; span++, first += weight->span) {
        int64_t count = least_of(weight->span, to->in - first);
        for (int64_t i = 0; i < count; i += LANES) store_f32(wide + i, load(x + first + i));
        is_accurate &= write_span(is_checked, to, row, span, first, wide, count, zero, ACCURATE_MULTIPLE);
    }
    return is_accurate;
}

/* The same of one of `rows` rows. */
static int row_in_integers(const struct integer_rows *to, int64_t row, const element *x,
                                 const struct block_weight *weight, int64_t rows) {
    if (rows > CHECKED_ROWS) return write_row(0, to, row, x, weight);
#ifdef IN_BYTES
    if (is_in_bytes(weight)) return write_row(IN_BYTES, to, row, x, weight);
#endif
    return write_row(1, to, row, x, weight);
}

static void rows_in_integers(const void *arg, int64_t begin, int64_t end) {
    const struct quantized_job *job = arg;
    const element *x = job->a->x.data;
    for (int64_t row = begin; row < end; row++)
        row_in_integers(&job->integers, row, x + row * job->a->x.stride[0], job->of.weight, job->of.rows);
}

static void integer_panels(const void *arg, int64_t begin, int64_t end) {
    const struct quantized_job *job = arg;
    int64_t together = items_of(INTEGER_BYTES, least_of(job->integers.stride, LONG_ROW));
    float *sums = lasting((least_of(together, job->of.rows) + 1) * PANEL); /* odd rows are one more */
    for (int64_t row = 0; row < job->of.rows; row += together)
        for (int64_t panel = begin; panel < end; panel++) {
            int64_t chunk_rows = least_of(together, job->of.rows - row);
            integers_of_panel(sums, &job->of, &job->integers, row, chunk_rows, panel);
            write_panel(job->a, sums, row, chunk_rows, panel);
        }
}

static void NAME(quantized_linear_of)(const quantized_linear_args *a, int64_t threads);

/* Multiply rows as integers, if precision suffices. If it suffices for one of a few rows and not for another, each is
 * multiplied separately, so that no row affects another. */
static int multiplied_as_integers(struct quantized_job *job, float *at, int64_t threads, int64_t least) {
    int64_t rows = job->of.rows, in = job->a->x.size[1], accurate_rows = rows;
    job->integers = integer_rows_at(at, rows, in, job->of.spans);
    if (rows > CHECKED_ROWS) parallel(threads, rows_in_integers, job, rows, items_of(SHARED_WORK, in));
    for (int64_t row = 0; row < rows && rows <= CHECKED_ROWS; row++) {
        const element *x = (const element *)job->a->x.data + row * job->a->x.stride[0];
        accurate_rows -= !row_in_integers(&job->integers, row, x, job->of.weight, rows);
    }
    if (accurate_rows == rows) parallel(threads, integer_panels, job, job->a->panels.size[0], least);
    for (int64_t row = 0; row < rows && accurate_rows < rows && rows > 1; row++) {
        quantized_linear_args one = *job->a;
        one.x.data = (void *)((element *)job->a->x.data + row * one.x.stride[0]), one.x.size[0] = 1;
        one.out.data = (char *)job->a->out.data + row * one.out.stride[0] * width_of(IS_WIDE(one.out)), one.out.size[0] = 1;
        NAME(quantized_linear_of)(&one, threads);
    }
    return accurate_rows == rows || rows > 1;
}
#endif

KERNEL(quantized_linear) {
    int64_t rows = a->x.size[0], in = a->x.size[1], panels = a->panels.size[0];
    int64_t least = items_of(SHARED_WORK, rows * in * PANEL);
    struct block_weight weight = BLOCK_WEIGHT(a);
    if (rows < 1) return;
    read_weight(&weight, a->table.data);
    struct quantized_job job = {{&weight, rows, (in + weight.span - 1) / weight.span}, a,
                                      (const input *)a->x.data, a->x.stride[0]};
    int64_t whole = rows + TILE_ROWS; /* rounded up: whole tiles read totals and rows */
    float *at = scratch(whole * (job.of.spans + in + LANES) + 2 * LANES);
#if WITH_INTEGERS
    if (takes_integers(&weight, rows, a->batch_invariant) && multiplied_as_integers(&job, at, threads, least))
        return;
#endif
    job.prepared = carved(&at, whole * job.of.spans), job.of.totals = job.prepared;
    if (weight.mins.at && sizeof(input) == 2)
        parallel(threads, span_totals, &job, rows, items_of(SHARED_WORK, in));
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
    if (has_tiles && rows > FEW_ROWS) {
        job.prepared = at, job.x = job.prepared;
        parallel(threads, rows_in_tiles, &job, (rows + TILE_ROWS - 1) / TILE_ROWS, items_of(SHARED_WORK, in * TILE_ROWS));
    }
    if (has_tiles && rows <= FEW_ROWS) job.x = few_rows((uint16_t *)at, job.x, job.stride, &job.of);
    if (has_tiles) {
        parallel(threads, rows > FEW_ROWS ? many_rows_of_panels : few_rows_of_panels, &job, panels, least);
        return;
    }
#endif
    if (sizeof(input) != sizeof(element)) {
        for (int64_t row = 0; row < rows; row++)
            widen_row(at + row * in, (const element *)a->x.data + row * a->x.stride[0], in, in);
        job.x = (const input *)at, job.stride = in;
    }
    parallel(threads, quantized_rows, &job, panels, least);
}
