/* Linear layers over weights in panels; see linear.py for the layouts.
 *
 * A panel is PANEL output features: for each step of input features their weights stand side by side, so that a product
 * reads one stream from its beginning to its end. Up to ROWS rows share what was read. Each sum runs over the input
 * features in order, in one accumulator, whatever the number of rows and threads.
 */
#include "native.h"

#ifndef GRAPHDECODE_LINEAR
#define GRAPHDECODE_LINEAR
#include "native_products.h"
#define INT8_STEP 4 /* input features in one 32-bit word: [panel][in / 4][PANEL][4] */
#define LARGE_RESULT 1048576 /* bytes: about half of a second cache */
#define AHEAD 2048  /* bytes that are asked for ahead of their use */
#define TILES_AHEAD 3072 /* the same, of tiles: neither their bytes nor twice these, which is slower */
#include "linear/split_tiles.h"

struct product {
    const native_linear_args *a;
    const void *x; /* the rows as the kernel takes them */
    int64_t stride;
};

/* Where a product goes: rows of floats or of elements. */
struct results {
    void *out;
    int64_t stride, width;
    int is_wide;
    const void *scales, *bias; /* of output features, elements; or none */
};

/* sums += the products of `count` rows' values with the weights of one input feature; `count` is a constant. */
INLINE void add_products(const int count, panel_sums *sums, const float *x, int64_t stride, const vec *weights) {
#pragma GCC unroll 8
    for (int r = 0; r < count; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[r][v] += weights[v] * x[r * stride];
}

INLINE void int8_step(const int count, panel_sums *sums, const float *x, int64_t stride, const int8_t *at) {
    ivec words[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) words[v] = (ivec)load_words(at + v * INT8_STEP * LANES);
#pragma GCC unroll 4
    for (int byte = 0; byte < INT8_STEP; byte++) {
        vec weights[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            weights[v] = __builtin_convertvector((words[v] << (24 - 8 * byte)) >> 24, vec);
        add_products(count, sums, x + byte, stride, weights);
    }
}

INLINE void f32_step(const int count, panel_sums *sums, const float *x, int64_t stride, const float *at) {
    vec weights[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) weights[v] = load_f32(at + v * LANES);
    add_products(count, sums, x, stride, weights);
}

INLINE void f16_step(const int count, panel_sums *sums, const float *x, int64_t stride, const uint16_t *at) {
    vec weights[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) weights[v] = load_f16(at + v * LANES);
    add_products(count, sums, x, stride, weights);
}

#ifdef WITH_PAIRS
typedef uint16_t bf16_input;
#else
typedef float bf16_input;
INLINE void bf16_step(const int count, panel_sums *sums, const float *x, int64_t stride, const uint16_t *at) {
    vec even[VECTORS], odd[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
        uvec words = load_words(at + 2 * v * LANES);
        even[v] = (vec)(words << 16);
        odd[v] = (vec)(words & 0xffff0000);
    }
    add_products(count, sums, x, stride, even);
    add_products(count, sums, x + 1, stride, odd);
}
#endif
#endif

#undef STEP
#undef step
#undef input
#if defined(ELEMENT_BF16)
#define STEP 2 /* [panel][in / 2][PANEL][2] */
#define step bf16_step
#define input bf16_input
#elif defined(ELEMENT_F16)
#define STEP 1 /* [panel][in][PANEL] */
#define step f16_step
#define input float
#else
#define STEP 1
#define step f32_step
#define input float
#endif

/* Return the rows in the type that products take, each padded with zeros to a multiple of `multiple` features: in the
 * caller's scratch, which all threads of the product read, or where they are. */
static const float *NAME(widened)(const element *x, int64_t *stride, int64_t rows, int64_t in, int64_t multiple) {
    int64_t padded = (in + multiple - 1) / multiple * multiple;
    if (sizeof(element) == sizeof(float) && padded == in) return (const float *)x;
    float *wide = scratch(rows * padded);
    for (int64_t row = 0; row < rows; row++) {
        int64_t i = 0;
        for (; i + LANES <= in; i += LANES) store_f32(wide + row * padded + i, load(x + row * *stride + i));
        for (; i < padded; i++) wide[row * padded + i] = i < in ? widen(x[row * *stride + i]) : 0.0f;
    }
    *stride = padded;
    return wide;
}

static const input *NAME(prepared)(const element *x, int64_t *stride, int64_t rows, int64_t in) {
    if (sizeof(input) == sizeof(float)) return (const input *)NAME(widened)(x, stride, rows, in, STEP);
    if (in % STEP == 0) return (const input *)x;
    input *copy = (input *)scratch(rows * (in + 1));
    for (int64_t row = 0; row < rows; row++) {
        memcpy(copy + row * (in + 1), x + row * *stride, in * sizeof(input));
        copy[row * (in + 1) + in] = 0;
    }
    *stride = in + 1;
    return copy;
}

/* What a panel's output features have, `width` of them; there is nothing behind these. */
INLINE void NAME(of_panel)(vec *values, const element *given, int64_t width) {
    element tail[PANEL] = {0};
    if (width < PANEL) given = memcpy(tail, given, width * sizeof *given);
    for (int64_t v = 0; v < VECTORS; v++) values[v] = load(given + v * LANES);
}

INLINE void NAME(write_rows)(const int is_wide, const struct results *to, const float *sums, int64_t row, int64_t rows,
                             int64_t first) {
    int64_t width = least_of(PANEL, to->width - first);
    vec scales[VECTORS], biases[VECTORS];
    if (to->scales) NAME(of_panel)(scales, (const element *)to->scales + first, width);
    if (to->bias) NAME(of_panel)(biases, (const element *)to->bias + first, width);
    char *at = (char *)to->out + (row * to->stride + first) * width_of(is_wide);
    for (int64_t r = 0; r < rows; r++, at += to->stride * width_of(is_wide)) {
        float tail[PANEL];
        char *place = width == PANEL ? at : (char *)tail;
        for (int64_t v = 0; v < VECTORS; v++) {
            vec found = load_f32(sums + r * PANEL + v * LANES);
            if (to->scales) found *= scales[v];
            if (to->bias) found += biases[v];
            store_at(is_wide, place, v * LANES, found);
        }
        if (place != at) memcpy(at, place, width * width_of(is_wide));
    }
}

/* Write some rows' sums with a panel, [rows][PANEL], scaled and biased, where they belong; the last panel may be narrower
 * than PANEL. */
static void NAME(write_sums)(const struct results *to, const float *sums, int64_t row, int64_t rows, int64_t panel) {
    BY_WIDTH(to->is_wide, NAME(write_rows), to, sums, row, rows, panel * PANEL);
}

/* One tile: `count` rows, a constant where this is used, times one panel. */
#define TILE(STEP_FUNCTION, WIDTH)                                             \
    for (int r = 0; r < count; r++)                                            \
        for (int v = 0; v < VECTORS; v++) sums[r][v] = splat(0.0f);            \
    for (int64_t i = 0; i < in; i += WIDTH) {                                  \
        __builtin_prefetch((const char *)(panel + i * PANEL) + AHEAD);         \
        __builtin_prefetch((const char *)(panel + i * PANEL) + AHEAD + 64);    \
        STEP_FUNCTION(count, sums, x + i, stride, panel + i * PANEL);          \
    }

INLINE void NAME(tile)(const int count, panel_sums *out, const input *x, int64_t stride, const element *panel,
                       int64_t in) {
    panel_sums sums[MOST_ROWS];
    TILE(step, STEP)
    memcpy(out, sums, count * sizeof *sums);
}

INLINE void NAME(int8_tile)(const int count, panel_sums *out, const float *x, int64_t stride, const int8_t *panel,
                            int64_t in) {
    panel_sums sums[MOST_ROWS];
    TILE(int8_step, INT8_STEP)
    memcpy(out, sums, count * sizeof *sums);
}

#undef FOR_COUNT
#define FOR_COUNT(TILE_FUNCTION, count, ...)          \
    switch (count) {                                  \
        case 1: TILE_FUNCTION(1, __VA_ARGS__); break; \
        case 2: TILE_FUNCTION(2, __VA_ARGS__); break; \
        case 3: TILE_FUNCTION(3, __VA_ARGS__); break; \
        case 4: TILE_FUNCTION(4, __VA_ARGS__); break; \
        case 5: TILE_FUNCTION(5, __VA_ARGS__); break; \
        case 6: TILE_FUNCTION(6, __VA_ARGS__); break; \
        case 7: TILE_FUNCTION(7, __VA_ARGS__); break; \
        default: TILE_FUNCTION(8, __VA_ARGS__);       \
    }
#undef RESULTS
#define RESULTS(a) {(a)->out.data, (a)->out.size[1], (a)->out.size[1], IS_WIDE((a)->out), (a)->scales.data, (a)->bias.data}
/* The fields of one product, for the loops over its panels. */
#undef PRODUCT
#define PRODUCT(WEIGHT, INPUT)                                                          \
    const native_linear_args *a = ((const struct product *)job)->a;                     \
    int64_t stride = ((const struct product *)job)->stride;                             \
    const INPUT *x = ((const struct product *)job)->x;                                  \
    const WEIGHT *weight = a->panels.data;                                              \
    const struct results to = RESULTS(a);                                               \
    int64_t rows = a->x.size[0], in = a->x.size[1];

#undef PANEL_LOOP
#define PANEL_LOOP(TILE_FUNCTION, WIDTH)                                                                        \
    int64_t panel_size = (in + WIDTH - 1) / WIDTH * WIDTH * PANEL;                                              \
    for (int64_t panel = begin; panel < end; panel++)                                                           \
        for (int64_t row = 0; row < rows; row += ROWS) {                                                        \
            panel_sums sums[MOST_ROWS];                                                                         \
            int64_t count = rows - row < ROWS ? rows - row : ROWS;                                              \
            FOR_COUNT(TILE_FUNCTION, count, sums, x + row * stride, stride, weight + panel * panel_size, in)    \
            NAME(write_sums)(&to, (const float *)sums, row, count, panel);                                      \
        }

static void NAME(linear_panels)(const void *job, int64_t begin, int64_t end) {
    PRODUCT(element, input)
    PANEL_LOOP(NAME(tile), STEP)
}

#if defined(ELEMENT_BF16) && defined(WITH_TILES)
/* Write some rows' sums with a whole panel, a line at a time. A large result goes past the caches: it has left them before
 * it is read, and to bring each line in first takes longer than its products. */
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

/* Rows of two tiles, or fewer, times one panel, which is read once. */
static void two_tiles_of_rows(float *sums, const uint16_t *x, int64_t stride, const uint16_t *panel, int64_t in,
                              int64_t rows) {
    if (rows > TILE_ROWS) tile_product_of(2, 0, TILES_AHEAD, sums, x, stride, panel, in);
    else tile_product_of(1, 0, TILES_AHEAD, sums, x, stride, panel, in);
}

/* Some rows, a multiple of two tiles', times one panel. Where the lines of neighbouring rows do not drive one another out
 * of the first cache, a part of the panel stays there for all rows, and the part behind it comes into the second one. */
static void rows_of_panel(float *sums, const uint16_t *x, int64_t stride, const uint16_t *panel, int64_t in, int64_t rows) {
    int64_t part = 2 * stride % ONE_PLACE ? TILED_IN : in, lines = part < in ? part * PANEL * sizeof *panel / 64 : 0;
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

/* Items are parts of the rows, each with all panels: a thread's neighbouring ones are panels for the same rows. */
static void tiled_panels(const void *job, int64_t begin, int64_t end) {
    PRODUCT(uint16_t, uint16_t)
    struct tile_shapes before = tiles_begun();
    int64_t whole = rows / (2 * TILE_ROWS) * (2 * TILE_ROWS), together = rows_together(in), panels = a->panels.size[0];
    int is_even = to.width % PANEL == 0, is_large = is_even && (uintptr_t)to.out % 64 == 0;
    is_large &= whole * to.width * (int64_t)width_of(to.is_wide) >= LARGE_RESULT;
    float *sums = lasting(least_of(together, whole + 2 * TILE_ROWS) * PANEL);
    int64_t shaped = 0; /* rows that the tiles' shapes are for */
    for (int64_t item = begin; item < end; item++) {
        int64_t first = item / panels * together, at = item % panels * PANEL, last = least_of(first + together, rows);
        const uint16_t *of_panel = weight + at * in;
        for (int64_t here; first < last; first += here) { /* whole pairs of tiles, and then what is left */
            here = first < whole ? least_of(last, whole) - first : last - first;
            int64_t shape = least_of(here, 2 * TILE_ROWS);
            if (shape != shaped) set_tile_rows(least_of(shape, TILE_ROWS), shape - TILE_ROWS);
            shaped = shape;
            if (here > 2 * TILE_ROWS) rows_of_panel(sums, x + first * stride, stride, of_panel, in, here);
            else two_tiles_of_rows(sums, x + first * stride, stride, of_panel, in, here);
            if (is_even) BY_WIDTH(to.is_wide, write_lines, &to, sums, first, here, at, is_large && first < whole);
            else write_sums_bf16(&to, sums, first, here, at / PANEL);
        }
    }
    if (is_large) _mm_sfence();
    tiles_ended(before);
}
#endif

#if defined(ELEMENT_F16) && defined(WITH_TILES)
struct split_job {
    const native_linear_args *a;
    uint16_t *x; /* [rows][2][padded] */
    int64_t padded;
};

static void split_rows(const void *given, int64_t begin, int64_t end) {
    const struct split_job *job = given;
    for (int64_t row = begin; row < end; row++)
        split_row(job->x + row * 2 * job->padded, (const uint16_t *)job->a->x.data + row * job->a->x.stride[0],
                  job->a->x.size[1], job->padded);
}

static void split_few(const void *given, int64_t begin, int64_t end) {
    const struct split_job *job = given;
    const native_linear_args *a = job->a;
    const struct results to = RESULTS(a);
    int64_t rows = a->x.size[0], in = a->x.size[1], place = 0;
    const uint16_t *panels = a->panels.data;
    _Alignas(64) uint16_t ring[2 * SPLIT_BLOCK];
    _Alignas(64) float sums[TILE_ROWS * PANEL];
    struct tile_shapes before = tiles_begun();
    set_split_rows(rows);
    split_block(ring, panels + begin * in * PANEL, in);
    for (int64_t panel = begin; panel < end; panel++) {
        few_split_products(sums, job->x, ring, &place, panels + panel * in * PANEL, in, panel + 1 == end);
        write_sums_f16(&to, sums, 0, rows, panel);
    }
    tiles_ended(before);
}

static void split_many(const void *given, int64_t begin, int64_t end) {
    const struct split_job *job = given;
    const native_linear_args *a = job->a;
    const struct results to = RESULTS(a);
    int64_t rows = a->x.size[0], in = a->x.size[1];
    _Alignas(64) float sums[2 * TILE_ROWS * PANEL];
    uint16_t *whole = (uint16_t *)lasting(job->padded * PANEL);
    int64_t together = items_of(SPLIT_BYTES, job->padded * 8 * TILE_ROWS) * 2 * TILE_ROWS;
    struct tile_shapes before = tiles_begun();
    for (int64_t first = 0; first < rows; first += together)
        for (int64_t panel = begin; panel < end; panel++) {
            split_panel(whole, (const uint16_t *)a->panels.data + panel * in * PANEL, in);
            for (int64_t row = first; row < least_of(first + together, rows); row += 2 * TILE_ROWS) {
                int64_t here = least_of(2 * TILE_ROWS, rows - row);
                const uint16_t *x = job->x + row * 2 * job->padded;
                if (row == first || here < 2 * TILE_ROWS) set_tile_rows(least_of(here, TILE_ROWS), here - TILE_ROWS);
                if (here > TILE_ROWS) many_split_products(2, sums, x, whole, job->padded);
                else many_split_products(1, sums, x, whole, job->padded);
                write_sums_f16(&to, sums, row, here, panel);
            }
        }
    tiles_ended(before);
}
#endif

static void NAME(int8_panels)(const void *job, int64_t begin, int64_t end) {
    PRODUCT(int8_t, float)
    PANEL_LOOP(NAME(int8_tile), INT8_STEP)
}

KERNEL(native_linear) {
    int64_t rows = a->x.size[0], in = a->x.size[1], least = items_of(SHARED_WORK, rows * in * PANEL);
    struct product job = {a, 0, a->x.stride[0]};
    if (a->scales.data) {
        job.x = NAME(widened)(a->x.data, &job.stride, rows, in, INT8_STEP);
        parallel(threads, NAME(int8_panels), &job, a->panels.size[0], least);
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
    } else if (has_tiles && in % TILE_IN == 0) {
        job.x = a->x.data;
        least = items_of(SHARED_WORK, least_of(rows, rows_together(in)) * in * PANEL);
        parallel(threads, tiled_panels, &job, (rows + rows_together(in) - 1) / rows_together(in) * a->panels.size[0], least);
#elif defined(ELEMENT_F16) && defined(WITH_TILES)
    } else if (has_tiles) {
        struct split_job split = {.a = a, .padded = (in + TILE_IN - 1) / TILE_IN * TILE_IN};
        split.x = (uint16_t *)scratch(rows * split.padded);
        parallel(threads, split_rows, &split, rows, items_of(PARALLEL_WORK, in));
        parallel(threads, rows > TILE_ROWS ? split_many : split_few, &split, a->panels.size[0], least);
#endif
    } else {
        job.x = NAME(prepared)(a->x.data, &job.stride, rows, in);
        parallel(threads, NAME(linear_panels), &job, a->panels.size[0], least);
    }
}
