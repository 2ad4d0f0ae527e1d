/* Linear layers over weights in panels; see linear.py for the layouts.
 *
 * A panel is PANEL output features: for each step of input features their weights stand side by side, so that a product
 * reads one stream from its beginning to its end. Up to ROWS rows share what was read, or many rows what was written of it
 * as floats. Each sum runs over the input features in order, in one accumulator, whatever the number of rows and threads.
 */
#include "model/activations.h"
#include "native.h"
#include "native_products.h"

#define LARGE_RESULT 1048576 /* bytes: about half of an L2 cache */
#define AHEAD(rows) ((rows) < 2 ? 4096 : 6144) /* bytes of prefetch distance; more delay the lines that are due */
#define TILES_AHEAD 3072 /* the same for tiles: multiples of a tile's bytes are slower */
#define BLOCK_IN 256 /* input features of a panel, which as floats stay in the L1 cache while rows are read */
#define BLOCKS_FROM (LANES == 16 ? 192 : 64) /* rows from which writing floats costs less than it saves */
#define FLOAT_ROWS (LANES == 16 ? 8 : 6) /* rows whose sums, with FLOAT_VECTORS each, stay in registers */
#define FLOAT_VECTORS 2
#include "linear/split_tiles.h"

struct product {
    const native_linear_args *a;
    const void *x; /* the rows in the kernel's layout */
    int64_t stride; /* of these; of rows that are split in two parts, [rows][2][stride], that of a part */
    int64_t activation; /* of a gated product */
    int64_t together; /* rows that share what was read of a panel */
};

/* The output of a product: rows of floats or elements. */
struct results {
    void *out;
    int64_t stride, width;
    int is_wide;
    const void *bias; /* per output feature, elements; or null */
};

#if defined(ELEMENT_BF16)
#define STEP 2 /* [panel][in / 2][PANEL][2] */
#else
#define STEP 1 /* [panel][in][PANEL] */
#endif
#if defined(ELEMENT_F16) || (defined(ELEMENT_BF16) && !defined(WITH_PAIRS))
#define WITH_BLOCKS /* weights that are no floats, and are multiplied as such */
#endif

/* A vector of the weights of STEP input features each. */
INLINE void vector_of_weights(vec *weights, const element *at) {
#if defined(ELEMENT_BF16)
    uvec words = load_words(at);
    weights[0] = (vec)(words << 16);
    weights[1] = (vec)(words & 0xffff0000);
#else
    weights[0] = load(at);
#endif
}

#if defined(ELEMENT_BF16) && defined(WITH_PAIRS)
typedef uint16_t input; /* a row's values, for products */
#define panel_step(count, ...) bf16_step(count, VECTORS, __VA_ARGS__)
#else
typedef float input;

/* sums += the products of `count` rows' values with the weights of STEP input features; `count` is a constant. */
INLINE void panel_step(const int count, panel_sums *sums, const float *x, int64_t stride, const element *at) {
#if LANES == 8 /* a vector of weights at a time, so that registers hold the sums and the rows' values */
    vec values[STEP][MOST_ROWS], weights[STEP];
#pragma GCC unroll 8
    for (int r = 0; r < count; r++)
#pragma GCC unroll 2
        for (int i = 0; i < STEP; i++) values[i][r] = splat(x[r * stride + i]);
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
        vector_of_weights(weights, at + STEP * v * LANES);
#pragma GCC unroll 2
        for (int i = 0; i < STEP; i++) {
            if (STEP * count > 2) __asm__("" : "+x"(weights[i])); /* GCC would reload it for each row */
#pragma GCC unroll 8
            for (int r = 0; r < count; r++) sums[r][v] += weights[i] * values[i][r];
        }
    }
#else
    vec weights[VECTORS][STEP];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) vector_of_weights(weights[v], at + STEP * v * LANES);
#pragma GCC unroll 2
    for (int i = 0; i < STEP; i++)
#pragma GCC unroll 8
        for (int r = 0; r < count; r++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) sums[r][v] += weights[v][i] * x[r * stride + i];
#endif
}
#endif

/* Write a row as floats, padded with zeros. */
static void widen_row(float *to, const element *from, int64_t count, int64_t padded) {
    read_floats(to, 0, from, 0, count);
    for (int64_t i = count; i < padded; i++) to[i] = 0.0f;
}

/* Return the rows in the type that products take, each padded with zeros to a multiple of `multiple` features: in the
 * caller's scratch, which all threads of the product read, or where they are. */
static const float *widened(const element *x, int64_t *stride, int64_t rows, int64_t in, int64_t multiple) {
    int64_t padded = (in + multiple - 1) / multiple * multiple;
    if (sizeof(element) == sizeof(float) && padded == in) return (const float *)x;
    float *wide = scratch(rows * padded);
    for (int64_t row = 0; row < rows; row++) widen_row(wide + row * padded, x + row * *stride, in, padded);
    *stride = padded;
    return wide;
}

static const input *prepared(const element *x, int64_t *stride, int64_t rows, int64_t in) {
    if (sizeof(input) == sizeof(float)) return (const input *)widened(x, stride, rows, in, STEP);
    if (in % STEP == 0) return (const input *)x;
    input *copy = (input *)scratch(rows * (in + 1));
    for (int64_t row = 0; row < rows; row++) {
        memcpy(copy + row * (in + 1), x + row * *stride, in * sizeof(input));
        copy[row * (in + 1) + in] = 0;
    }
    *stride = in + 1;
    return copy;
}

/* Biases of a panel's `width` output features. */
INLINE void values_of_panel(vec *values, const element *src, int64_t width) {
    element tail[PANEL] = {0};
    if (width < PANEL) src = memcpy(tail, src, width * sizeof *src);
    for (int64_t v = 0; v < VECTORS; v++) values[v] = load(src + v * LANES);
}

INLINE void write_rows(const int is_wide, const struct results *to, const float *sums, int64_t row, int64_t rows,
                       int64_t first) {
    int64_t width = least_of(PANEL, to->width - first);
    vec biases[VECTORS];
    if (to->bias) values_of_panel(biases, (const element *)to->bias + first, width);
    char *at = (char *)to->out + (row * to->stride + first) * width_of(is_wide);
    for (int64_t r = 0; r < rows; r++, at += to->stride * width_of(is_wide)) {
        float tail[PANEL];
        char *dst = width == PANEL ? at : (char *)tail;
        for (int64_t v = 0; v < VECTORS; v++) {
            vec sum = load_f32(sums + r * PANEL + v * LANES);
            if (to->bias) sum += biases[v];
            store_at(is_wide, dst, v * LANES, sum);
        }
        if (dst != at) memcpy(at, dst, width * width_of(is_wide));
    }
}

/* Write some rows' sums with a panel, [rows][PANEL], scaled and biased, where they belong; the last panel may be narrower
 * than PANEL. */
static void write_sums(const struct results *to, const float *sums, int64_t row, int64_t rows, int64_t panel) {
    BY_WIDTH(to->is_wide, write_rows, to, sums, row, rows, panel * PANEL);
}

/* What is prefetched with each step of a panel: a line or two, which then advance by `pace` bytes. */
struct ahead {
    const char *at;
    int64_t pace;
};

/* How many of the next `rows` rows are multiplied together, `most` at most: parts are of about one size, for a single row
 * takes nearly as long as several; NEON's squares are of `most` rows. */
static inline int64_t part_of(int64_t rows, int64_t most) {
    int64_t parts = (rows + most - 1) / most;
    return LANES == 4 ? least_of(rows, most) : (rows + parts - 1) / parts;
}

/* The first of some rows that share a panel of `bytes` bring what comes next of it; the others, the next panel. The `count`
 * rows from `row` on are multiplied together. */
static inline struct ahead lines_ahead(const char *panel, int64_t bytes, int64_t step_bytes, int64_t row, int64_t rows,
                                       int64_t count, int64_t most) {
    if (row == 0) return (struct ahead){panel + AHEAD(rows), step_bytes};
    int64_t first = part_of(rows, most), steps = bytes / step_bytes;
    return (struct ahead){panel + bytes + (row - first) * steps / (rows - first) * step_bytes,
                          step_bytes * count / (rows - first)};
}

/* `count` rows times one panel; `count` is a constant where this is used. */
INLINE void one_panel(const int count, panel_sums *out, const input *x, int64_t stride, const element *panel, int64_t in,
                      struct ahead ahead) {
    panel_sums sums[MOST_ROWS];
#if defined(ELEMENT_BF16) && defined(WITH_SQUARES)
    if (count == SQUARE_ROWS) {
        square_products(0, out, x, stride, panel, (in + STEP - 1) / STEP * STEP);
        return;
    }
#endif
    for (int r = 0; r < count; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = splat(0.0f);
    for (int64_t i = 0; i < in; i += STEP, ahead.at += ahead.pace) {
        __builtin_prefetch(ahead.at, 0, 2); /* into L2: the L1 cache keeps the rows */
        if (STEP * sizeof(element) > 2) __builtin_prefetch(ahead.at + 64, 0, 2); /* two lines or more a step */
        panel_step(count, sums, x + i, stride, panel + i * PANEL);
    }
    memcpy(out, sums, count * sizeof *sums);
}

#define RESULTS(a) {(a)->out.data, (a)->out.size[1], (a)->out.size[1], IS_WIDE((a)->out), (a)->bias.data}

/* Replace the sums of a gate's panel by `activation(gate) * up`, both with their biases, if any. */
static void gate_rows(const struct product *job, panel_sums *gates, const panel_sums *ups, int64_t rows, int64_t panel) {
    const element *bias = job->a->bias.data;
    vec biases[2][VECTORS] = {0};
    for (int half = 0; bias && half < 2; half++)
        values_of_panel(biases[half], bias + half * job->a->out.size[1] + panel * PANEL, PANEL);
    for (int64_t r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++)
            gates[r][v] = activate(gates[r][v] + biases[0][v], job->activation) * (ups[r][v] + biases[1][v]);
}

/* `halves` is 2 if half of the panels are those of a gate; a constant where this is used. */
INLINE void rows_of_panels(const int halves, const struct product *job, int64_t begin, int64_t end) {
    const native_linear_args *a = job->a;
    struct results to = RESULTS(a);
    int64_t rows = a->x.size[0], in = a->x.size[1], values = (in + STEP - 1) / STEP * STEP * PANEL;
    const int64_t step_bytes = STEP * PANEL * sizeof(element), bytes = values * sizeof(element);
    if (halves == 2) to.bias = 0;
    for (int64_t panel = begin; panel < end; panel++)
        for (int64_t row = 0, count; row < rows; row += count) {
            panel_sums sums[2][MOST_ROWS];
            count = part_of(rows - row, ROWS);
            const input *x = (const input *)job->x + row * job->stride;
            for (int half = 0; half < halves; half++) {
                const element *at = (const element *)a->panels.data + (half * a->panels.size[0] / 2 + panel) * values;
                FOR_COUNT(one_panel, count, sums[half], x, job->stride, at, in,
                          lines_ahead((const char *)at, bytes, step_bytes, row, rows, count, ROWS))
            }
            if (halves == 2) gate_rows(job, sums[0], sums[1], count, panel);
            write_sums(&to, (const float *)sums, row, count, panel);
        }
}

static void linear_panels(const void *job, int64_t begin, int64_t end) { rows_of_panels(1, job, begin, end); }

static void gated_panels(const void *job, int64_t begin, int64_t end) { rows_of_panels(2, job, begin, end); }

/* Add the products of some features to sums[row][column]; `rows` is a constant at each use. */
INLINE void float_rows(const int rows, float *sums, const float *x, int64_t stride, const float *weights,
                       int64_t features) {
    const int vectors = rows <= (LANES == 8 ? 2 : 1) ? VECTORS : FLOAT_VECTORS;
    for (int v = 0; v < PANEL; v += vectors * LANES)
        add_lanes(rows, vectors, AS_THEY_ARE, sums + v, 0, x, stride, 1, weights + v, features, PANEL);
}

static void float_products(float *sums, const float *x, int64_t stride, const float *weights, int64_t features,
                           int64_t rows) {
    for (int64_t chunk_rows; rows > 0; rows -= chunk_rows, sums += chunk_rows * PANEL, x += chunk_rows * stride) {
        chunk_rows = part_of(rows, FLOAT_ROWS);
        FOR_COUNT(float_rows, chunk_rows, sums, x, stride, weights, features)
    }
}

#ifdef WITH_BLOCKS
/* Write the weights of some input features as floats: [feature][PANEL]. */
static void widen_block(float *to, const element *from, int64_t features) {
    for (int64_t i = 0; i < features; i += STEP)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++, from += STEP * LANES) {
            vec weights[STEP];
            vector_of_weights(weights, from);
            for (int n = 0; n < STEP; n++) store_f32(to + (i + n) * PANEL + v * LANES, weights[n]);
        }
}

/* Items are parts of the rows, each with all panels, or with the pairs of a gate's. A block of a panel is written as floats
 * and multiplied with all rows of the part before the next. */
INLINE void blocks_of_panels(const int halves, const struct product *job, int64_t begin, int64_t end) {
    const native_linear_args *a = job->a;
    struct results to = RESULTS(a);
    int64_t rows = a->x.size[0], in = (a->x.size[1] + STEP - 1) / STEP * STEP, panels = a->panels.size[0] / halves;
    int64_t sums_of_half = job->together * PANEL;
    float *sums = lasting(halves * sums_of_half + BLOCK_IN * PANEL), *block = sums + halves * sums_of_half;
    if (halves == 2) to.bias = 0;
    for (int64_t item = begin; item < end; item++) {
        int64_t first = item / panels * job->together, panel = item % panels;
        int64_t chunk_rows = least_of(job->together, rows - first);
        memset(sums, 0, halves * sums_of_half * sizeof *sums);
        for (int half = 0; half < halves; half++)
            for (int64_t i = 0; i < in; i += BLOCK_IN) {
                const element *at = (const element *)a->panels.data + ((half * panels + panel) * in + i) * PANEL;
                int64_t features = least_of(BLOCK_IN, in - i);
                widen_block(block, at, features);
                const float *x = (const float *)job->x + first * job->stride + i;
                float_products(sums + half * sums_of_half, x, job->stride, block, features, chunk_rows);
            }
        if (halves == 2) gate_rows(job, (panel_sums *)sums, (const panel_sums *)(sums + sums_of_half), chunk_rows, panel);
        write_sums(&to, sums, first, chunk_rows, panel);
    }
}

static void linear_blocks(const void *job, int64_t begin, int64_t end) { blocks_of_panels(1, job, begin, end); }

static void gated_blocks(const void *job, int64_t begin, int64_t end) { blocks_of_panels(2, job, begin, end); }

static void widen_rows(const void *arg, int64_t begin, int64_t end) {
    const struct product *job = arg;
    const native_linear_args *a = job->a;
    for (int64_t row = begin; row < end; row++)
        widen_row((float *)job->x + row * job->stride, (const element *)a->x.data + row * a->x.stride[0], a->x.size[1],
                  job->stride);
}

/* Whether rows are multiplied in blocks: enough of them share a block, though they stay in the L2 cache meanwhile. */
static inline int use_blocks(int64_t rows, int64_t in) {
    return rows >= BLOCKS_FROM && in * BLOCKS_FROM / 2 * (int64_t)sizeof(float) <= TILED_BYTES;
}

/* Multiply rows as floats with panels in blocks. */
static void by_blocks(body run, struct product *job, int64_t panels, int64_t threads) {
    int64_t rows = job->a->x.size[0], in = job->a->x.size[1];
    job->stride = (in + LANES - 1) / LANES * LANES + LANES; /* so that rows share no places in the L1 cache */
    job->x = scratch(rows * job->stride);
    int64_t parts = items_of(rows * in * sizeof(float), TILED_BYTES);
    job->together = ((rows + parts - 1) / parts + FLOAT_ROWS - 1) / FLOAT_ROWS * FLOAT_ROWS;
    parts = (rows + job->together - 1) / job->together;
    parallel(threads, widen_rows, job, rows, items_of(PARALLEL_WORK, in));
    parallel(threads, run, job, parts * panels, items_of(SHARED_WORK, least_of(rows, job->together) * in * PANEL));
}
#endif

#if defined(ELEMENT_BF16) && defined(WITH_TILES)
/* Write some rows' sums with a whole panel, a line at a time. A large result bypasses the caches: it is evicted before it is
 * read, and loading each line first takes longer than its products. */
INLINE void write_lines(const int is_wide, const struct results *to, const float *sums, int64_t row, int64_t rows,
                        int64_t first, int is_large) {
    const uint16_t *bias = to->bias;
    char *at = (char *)to->out + (row * to->stride + first) * width_of(is_wide);
    vec biases[2] = {splat(0.0f), splat(0.0f)};
    if (bias) biases[0] = load_bf16(bias + first), biases[1] = load_bf16(bias + first + LANES);
    for (int64_t r = 0; r < rows; r++, at += to->stride * width_of(is_wide)) {
        vec low = load_f32(sums + r * PANEL) + biases[0], high = load_f32(sums + r * PANEL + LANES) + biases[1];
        __m512i lines[2] = {(__m512i)low, (__m512i)high};
        if (!is_wide) lines[0] = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
        for (int line = 0; line < (is_wide ? 2 : 1); line++)
            if (is_large) _mm512_stream_si512((__m512i *)at + line, lines[line]);
            else _mm512_storeu_si512((__m512i *)at + line, lines[line]);
    }
}

/* Rows of at most two tiles times one panel, which is read once. */
static void two_tiles_of_rows(float *sums, const uint16_t *x, int64_t stride, const uint16_t *panel, int64_t in,
                              int64_t rows) {
    if (rows > TILE_ROWS) tile_product_of(2, 0, TILES_AHEAD, sums, x, stride, panel, in);
    else tile_product_of(1, 0, TILES_AHEAD, sums, x, stride, panel, in);
}

/* Some rows, a multiple of two tiles', times one panel. If adjacent rows do not conflict in the L1 cache, a part of the
 * panel stays there for all rows, and the next part is prefetched into L2. */
static void rows_of_panel(float *sums, const uint16_t *x, int64_t stride, const uint16_t *panel, int64_t in, int64_t rows) {
    int64_t part = 2 * stride % L1_SET_STRIDE ? TILED_IN : in, lines = part < in ? part * PANEL * sizeof *panel / 64 : 0;
    for (int64_t begin = 0; begin < in; begin += part)
        for (int64_t row = 0; row < rows; row += 2 * TILE_ROWS) {
            const uint16_t *at = x + row * stride + begin, *of_panel = panel + begin * PANEL;
            int64_t features = least_of(part, in - begin);
            for (int64_t i = row * lines / rows; i < (row + 2 * TILE_ROWS) * lines / rows; i++)
                __builtin_prefetch((const char *)(of_panel + part * PANEL) + i * 64, 0, 2);
            if (begin) tile_product(2, 1, sums + row * PANEL, at, stride, of_panel, features);
            else tile_product(2, 0, sums + row * PANEL, at, stride, of_panel, features);
        }
}

/* Items are parts of the rows, each with all panels: a thread's adjacent ones are panels for the same rows. */
static void tiled_panels(const void *arg, int64_t begin, int64_t end) {
    const struct product *job = arg;
    const native_linear_args *a = job->a;
    const struct results to = RESULTS(a);
    const uint16_t *x = job->x, *weight = a->panels.data;
    int64_t rows = a->x.size[0], in = a->x.size[1], stride = job->stride;
    struct tile_shapes before = tiles_begun();
    int64_t whole = rows / (2 * TILE_ROWS) * (2 * TILE_ROWS), together = rows_together(in), panels = a->panels.size[0];
    int is_even = to.width % PANEL == 0, is_large = is_even && (uintptr_t)to.out % 64 == 0;
    is_large &= whole * to.width * (int64_t)width_of(to.is_wide) >= LARGE_RESULT;
    float *sums = lasting(least_of(together, whole + 2 * TILE_ROWS) * PANEL);
    int64_t shaped = 0; /* rows of the configured tile shapes */
    for (int64_t item = begin; item < end; item++) {
        int64_t first = item / panels * together, at = item % panels * PANEL, last = least_of(first + together, rows);
        const uint16_t *of_panel = weight + at * in;
        for (int64_t chunk_rows; first < last; first += chunk_rows) { /* whole pairs of tiles, then the rest */
            chunk_rows = first < whole ? least_of(last, whole) - first : last - first;
            int64_t shape = least_of(chunk_rows, 2 * TILE_ROWS);
            if (shape != shaped) set_tile_rows(least_of(shape, TILE_ROWS), shape - TILE_ROWS);
            shaped = shape;
            if (chunk_rows > 2 * TILE_ROWS) rows_of_panel(sums, x + first * stride, stride, of_panel, in, chunk_rows);
            else two_tiles_of_rows(sums, x + first * stride, stride, of_panel, in, chunk_rows);
            if (is_even) BY_WIDTH(to.is_wide, write_lines, &to, sums, first, chunk_rows, at, is_large && first < whole);
            else write_sums(&to, sums, first, chunk_rows, at / PANEL);
        }
    }
    if (is_large) _mm_sfence();
    tiles_ended(before);
}
#endif

#if defined(ELEMENT_F16) && defined(WITH_TILES)
static void split_rows(const void *arg, int64_t begin, int64_t end) {
    const struct product *job = arg;
    for (int64_t row = begin; row < end; row++)
        split_row((uint16_t *)job->x + row * 2 * job->stride, (const uint16_t *)job->a->x.data + row * job->a->x.stride[0],
                  job->a->x.size[1], job->stride);
}

static void split_few_rows(const void *arg, int64_t begin, int64_t end) {
    const struct product *job = arg;
    const native_linear_args *a = job->a;
    const struct results to = RESULTS(a);
    int64_t rows = a->x.size[0], in = a->x.size[1], slot = 0;
    const uint16_t *panels = a->panels.data;
    _Alignas(64) uint16_t ring[2 * SPLIT_BLOCK];
    _Alignas(64) float sums[TILE_ROWS * PANEL];
    struct tile_shapes before = tiles_begun();
    set_split_rows(rows);
    split_block(ring, panels + begin * in * PANEL, in);
    for (int64_t panel = begin; panel < end; panel++) {
        few_split_products(sums, job->x, ring, &slot, panels + panel * in * PANEL, in, panel + 1 == end);
        write_sums(&to, sums, 0, rows, panel);
    }
    tiles_ended(before);
}

static void split_many_rows(const void *arg, int64_t begin, int64_t end) {
    const struct product *job = arg;
    const native_linear_args *a = job->a;
    const struct results to = RESULTS(a);
    int64_t rows = a->x.size[0], in = a->x.size[1];
    _Alignas(64) float sums[2 * TILE_ROWS * PANEL];
    uint16_t *whole = (uint16_t *)lasting(job->stride * PANEL);
    int64_t together = items_of(SPLIT_BYTES, job->stride * 8 * TILE_ROWS) * 2 * TILE_ROWS;
    struct tile_shapes before = tiles_begun();
    for (int64_t first = 0; first < rows; first += together)
        for (int64_t panel = begin; panel < end; panel++) {
            split_panel(whole, (const uint16_t *)a->panels.data + panel * in * PANEL, in);
            for (int64_t row = first; row < least_of(first + together, rows); row += 2 * TILE_ROWS) {
                int64_t chunk_rows = least_of(2 * TILE_ROWS, rows - row);
                const uint16_t *x = (const uint16_t *)job->x + row * 2 * job->stride;
                if (row == first || chunk_rows < 2 * TILE_ROWS)
                    set_tile_rows(least_of(chunk_rows, TILE_ROWS), chunk_rows - TILE_ROWS);
                if (chunk_rows > TILE_ROWS) split_tile_products(2, sums, x, whole, job->stride);
                else split_tile_products(1, sums, x, whole, job->stride);
                write_sums(&to, sums, row, chunk_rows, panel);
            }
        }
    tiles_ended(before);
}
#endif

KERNEL(native_linear) {
    int64_t rows = a->x.size[0], in = a->x.size[1], least = items_of(SHARED_WORK, rows * in * PANEL);
    struct product job = {.a = a, .stride = a->x.stride[0]};
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
    if (has_tiles && in % TILE_IN == 0) {
        job.x = a->x.data;
        least = items_of(SHARED_WORK, least_of(rows, rows_together(in)) * in * PANEL);
        int64_t parts = (rows + rows_together(in) - 1) / rows_together(in);
        parallel(threads, tiled_panels, &job, parts * a->panels.size[0], least);
        return;
    }
#elif defined(ELEMENT_F16) && defined(WITH_TILES)
    if (has_tiles) {
        job.stride = (in + TILE_IN - 1) / TILE_IN * TILE_IN, job.x = scratch(rows * job.stride);
        parallel(threads, split_rows, &job, rows, items_of(PARALLEL_WORK, in));
        parallel(threads, rows > TILE_ROWS ? split_many_rows : split_few_rows, &job, a->panels.size[0], least);
        return;
    }
#endif
#ifdef WITH_BLOCKS
    if (use_blocks(rows, in)) {
        by_blocks(linear_blocks, &job, a->panels.size[0], threads);
        return;
    }
#endif
    job.x = prepared(a->x.data, &job.stride, rows, in);
    parallel(threads, linear_panels, &job, a->panels.size[0], least);
}

KERNEL(gated_linear) {
    int64_t rows = a->x.size[0], in = a->x.size[1];
    native_linear_args gate_up_args = {0};
    HAND_OVER(gate_up_args.out, a->out), HAND_OVER(gate_up_args.x, a->x);
    HAND_OVER(gate_up_args.panels, a->panels), HAND_OVER(gate_up_args.bias, a->bias);
    struct product job = {.a = &gate_up_args, .stride = a->x.stride[0], .activation = a->activation};
#ifdef WITH_BLOCKS
    if (use_blocks(rows, in)) {
        by_blocks(gated_blocks, &job, a->panels.size[0] / 2, threads);
        return;
    }
#endif
    job.x = prepared(a->x.data, &job.stride, rows, in);
    parallel(threads, gated_panels, &job, a->panels.size[0] / 2, items_of(SHARED_WORK, 2 * rows * in * PANEL));
}
