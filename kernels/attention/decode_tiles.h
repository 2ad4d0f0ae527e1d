/* Attention of few queries in matrix tiles of bf16 (native_tiles.h), with keys and values in their pages.
 *
 * TILE_ROWS keys are the rows of a tile. Queries of several heads share the other, each with zeros for the features of
 * heads that are not its own, so that all of a key's heads are added up in one tile of sums; where a key is infinite or no
 * number in one head, its logits are no numbers in all of these. TILE_ROWS values are the rows of a tile, too: what it
 * takes for a pair are two features of one value, so that each query has two rows of weights. The first is (weight, 0) of
 * each value, and gives even features, the second (0, weight), and gives odd ones.
 */
#ifndef GRAPHDECODE_DECODE_TILES_H
#define GRAPHDECODE_DECODE_TILES_H

#include "attention_lanes.h"

#if defined(WITH_TILES) && IN_PAIRS
#define WEIGHED (TILE_ROWS / 2) /* queries, at most, that are multiplied with values together */
#define PANELS_IN_TILES 4           /* of their sums, in tiles */
#define KEY_SUMS 5              /* tiles: of logits; keys or values; queries. The first ones are sums and weights */
#define ENTRY_TILE 6
#define QUERY_TILE 7
#define WEIGHTS 4
#define TURN_WORK 4   /* to turn logits takes as long as so many products of tiles */
#define WEIGHT_WORK 8 /* the same of a query's weights of a block */

/* The queries of some key heads of one row, and workspace for a block of keys. */
struct few_queries {
    int64_t heads, count, dim;     /* key heads, and the queries of each */
    int64_t side, tiles;           /* heads that share a tile, and tiles of one head: one of them is 1 */
    int64_t together;              /* queries that are multiplied with values together */
    int64_t position, group;       /* of the first query's token; queries of one token */
    struct logits logits;
    float *largest, *total;        /* [heads][count], of the logits, as they are kept, and of their powers */
    uint16_t *q;                   /* [heads][tiles][feature / 2][TILE_ROWS][2] */
    float *scores;                 /* [tiles of all heads][TILE_ROWS][KEYS] */
    float *sums;                   /* [heads][parts][feature / PANEL][2 * together][LANES] */
    uint32_t *weights;             /* [key / TILE_ROWS][2 * together][LANES] */
    uint16_t *copied;              /* entries that are not contiguous */
    float *key_scales, *value_scales;
    int64_t share;                 /* bytes of the next block to prefetch with a product of tiles */
};

/* A block of a row's keys, of which nobody sees those before `first_visible`. */
struct block {
    const struct paged *row;
    const int64_t *offsets;
    int64_t first, first_visible, count, code;
};

static int64_t parts_of(int64_t queries) { return (queries + WEIGHED - 1) / WEIGHED; }

static int64_t query_tiles(const struct few_queries *few) { return (few->heads + few->side - 1) / few->side * few->tiles; }

/* Size what is known of `heads` heads of `count` queries each; return how many floats of room they take. */
static int64_t few_queries_floats(struct few_queries *few, int64_t heads, int64_t count, int64_t dim) {
    few->heads = heads, few->count = count, few->dim = dim;
    few->side = count < TILE_ROWS ? least_of(TILE_ROWS / count, heads) : 1;
    few->tiles = (count + TILE_ROWS - 1) / TILE_ROWS, few->together = least_of(count, WEIGHED);
    int64_t copied = TILE_ROWS * heads > KEYS ? TILE_ROWS * heads : KEYS;
    return heads * few->tiles * dim * TILE_ROWS / 2 + query_tiles(few) * TILE_ROWS * KEYS +
           heads * parts_of(count) * few->together * dim + KEYS * 2 * few->together + copied * dim / 2 + 2 * KEYS + 8 * LANES;
}

static void carve_few_queries(struct few_queries *few, float **at, int has_scales) {
    int64_t dim = few->dim, sums = few->heads * parts_of(few->count) * few->together * dim;
    int64_t q = few->heads * few->tiles * dim * TILE_ROWS / 2;
    few->q = (uint16_t *)carved(at, q), few->scores = carved(at, query_tiles(few) * TILE_ROWS * KEYS);
    few->sums = carved(at, sums), few->weights = (uint32_t *)carved(at, KEYS * 2 * few->together);
    few->key_scales = has_scales ? carved(at, KEYS) : 0, few->value_scales = has_scales ? carved(at, KEYS) : 0;
    few->copied = (uint16_t *)*at;
    memset(few->q, 0, q * sizeof(float));
    memset(few->sums, 0, sums * sizeof(float));
}

static void set_few_shapes(const struct few_queries *few) {
    struct tile_shapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.rows[tile] = (uint8_t)(tile <= WEIGHTS ? 2 * few->together : TILE_ROWS);
        shapes.row_bytes[tile] = 4 * LANES;
    }
    load_shapes(&shapes);
}

/* Put the `r`th query of a head where the tiles take it. */
static void put_query(const struct few_queries *few, int64_t head, int64_t r, const uint16_t *q) {
    uint32_t *to = (uint32_t *)few->q + (head * few->tiles + r / TILE_ROWS) * few->dim / 2 * TILE_ROWS;
    to += head % few->side * few->count + r % TILE_ROWS;
    for (int64_t i = 0; i < few->dim / 2; i++) memcpy(to + i * TILE_ROWS, q + 2 * i, sizeof *to);
}

/* How many bytes to prefetch with each product of tiles, if it is `bytes` while a block of `count` keys is attended to. */
static int64_t share_of(const struct few_queries *few, int64_t count, int64_t bytes) {
    int64_t products = few->heads * (few->tiles + parts_of(few->count)) * few->dim / TILE_IN;
    int64_t work = (count + TILE_ROWS - 1) / TILE_ROWS * (products + TURN_WORK * query_tiles(few));
    return bytes / (work + WEIGHT_WORK * few->heads * few->count) + 1;
}

static float *scores_of(const struct few_queries *few, int64_t head, int64_t r) {
    return few->scores + (head / few->side * few->tiles * TILE_ROWS + head % few->side * few->count + r) * KEYS;
}

INLINE void copy_entries(const int64_t code, uint16_t *to, const struct block *block, const void *entries, int64_t from,
                         int64_t width) {
    for (int64_t j = from; j < from + TILE_ROWS; j++, to += width)
        for (int64_t i = 0; i < width; i += PANEL)
            store_words(to + i, visible_features(code, entries, block->offsets, j, block->first_visible, block->count, i, width));
}

/* Find TILE_ROWS entries of a block, `width` values of each: in place, if they are visible and in one page, else copied,
 * with zeros for what nobody sees. */
static const uint16_t *tile_entries(const struct block *block, const void *entries, int64_t from, int64_t width,
                                    uint16_t *copied, int64_t *stride) {
    int is_visible = from >= block->first_visible && from + TILE_ROWS <= block->count;
    if (is_visible && !block->code && (block->first + from) % block->row->size + TILE_ROWS <= block->row->size) {
        *stride = 2 * block->row->entry;
        return (const uint16_t *)entries + block->offsets[from];
    }
    BY_CODE(block->code, copy_entries, copied, block, entries, from, width);
    *stride = 2 * width;
    return copied;
}

/* The logits of all queries with a block of keys. */
static void block_of_logits(const struct few_queries *few, const struct block *block, const void *keys,
                            struct prefetches *next) {
    int64_t dim = few->dim, stride, of_head = few->tiles * dim * TILE_ROWS;
    float sums[TILE_ROWS * LANES];
    for (int64_t from = 0; from < block->count; from += TILE_ROWS) {
        const uint16_t *at = tile_entries(block, keys, from, few->heads * dim, few->copied, &stride);
        for (int64_t head = 0; head < few->heads; head += few->side) {
            int64_t behind = least_of(head + few->side, few->heads);
            for (int64_t tile = 0; tile < few->tiles; tile++) {
                _tile_zero(KEY_SUMS);
                for (int64_t h = head; h < behind; h++) {
                    const uint16_t *q = few->q + h * of_head + tile * dim * TILE_ROWS;
                    for (int64_t i = 0; i < dim; i += TILE_IN) {
                        prefetch(next, few->share);
                        _tile_loadd(ENTRY_TILE, at + h * dim + i, stride);
                        _tile_loadd(QUERY_TILE, q + i * TILE_ROWS, 64);
                        _tile_dpbf16ps(KEY_SUMS, ENTRY_TILE, QUERY_TILE);
                    }
                }
                _tile_stored(KEY_SUMS, sums, 4 * LANES);
                prefetch(next, TURN_WORK * few->share);
                uvec words[LANES];
                for (int64_t k = 0; k < LANES; k++) words[k] = load_words(sums + k * LANES);
                write_turned(scores_of(few, head, tile * TILE_ROWS) + from, KEYS, words);
            }
        }
    }
}

/* Turn a query's logits of `count` keys into weights of all tiles, as the `r`th of those that are together; return by what
 * to multiply what was summed before. It sees the keys from `begin` to `end`, of which there is at least one. */
static float few_weights(const struct few_queries *few, float *logits, int64_t r, int64_t count, int64_t begin, int64_t end,
                         float *largest, float *total) {
    const ivec lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float unit = unit_of(few->logits, LOG2_OF_E);
    vec sum = splat(0.0f);
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (int64_t n = 0; n < count; n += LANES) {
        vec v = load_f32(logits + n);
        if (few->key_scales) v *= load_f32(few->key_scales + n);
        if (are_changed(few->logits)) v = logits_from(v, few->logits);
        if (begin > n || end < n + LANES) {
            ivec key = lanes + (int32_t)n, visible = (key >= (int32_t)begin) & (key < (int32_t)end);
            v = (vec)((visible & (ivec)v) | (~visible & (ivec)splat(-INFINITY)));
        }
        store_f32(logits + n, v);
        most = _mm512_max_ps(most, (__m512)v);
    }
    float top = _mm512_reduce_max_ps(most), shrink = 1.0f;
    if (top > *largest) {
        shrink = exp2f((*largest - top) * unit);
        *largest = top;
    }
    uint32_t *to = few->weights + 2 * r * LANES;
    for (int64_t n = 0; n < count; n += LANES, to += 2 * few->together * LANES) {
        vec weight = weights_of(load_f32(logits + n), splat(*largest), unit);
        sum += weight;
        if (few->value_scales) weight *= load_f32(few->value_scales + n);
        uvec rounded = ((uvec)weight + 0x8000) & 0xffff0000;
        store_f32((float *)to, (vec)(rounded >> 16));
        store_f32((float *)to + LANES, (vec)rounded);
    }
    *total = *total * shrink + sum_lanes(sum);
    return shrink;
}

/* Add weighted values to the sums of `panels` panels, a constant where this is used. */
INLINE void add_panels(const int panels, const struct few_queries *few, float *sums, const uint16_t *const *values,
                       const int64_t *strides, struct prefetches *next, int64_t tiles, int64_t offset) {
    int64_t rows = 2 * few->together;
    _tile_loadd(0, sums, 4 * LANES);
    if (panels > 1) _tile_loadd(1, sums + rows * LANES, 4 * LANES);
    if (panels > 2) _tile_loadd(2, sums + 2 * rows * LANES, 4 * LANES);
    if (panels > 3) _tile_loadd(3, sums + 3 * rows * LANES, 4 * LANES);
    for (int64_t n = 0; n < tiles; n++) {
        const uint16_t *at = values[n] + offset;
        prefetch(next, panels * few->share);
        _tile_loadd(WEIGHTS, few->weights + n * rows * LANES, 4 * LANES);
        _tile_loadd(ENTRY_TILE, at, strides[n]);
        _tile_dpbf16ps(0, WEIGHTS, ENTRY_TILE);
        if (panels > 1) {
            _tile_loadd(QUERY_TILE, at + PANEL, strides[n]);
            _tile_dpbf16ps(1, WEIGHTS, QUERY_TILE);
        }
        if (panels > 2) {
            _tile_loadd(ENTRY_TILE, at + 2 * PANEL, strides[n]);
            _tile_dpbf16ps(2, WEIGHTS, ENTRY_TILE);
        }
        if (panels > 3) {
            _tile_loadd(QUERY_TILE, at + 3 * PANEL, strides[n]);
            _tile_dpbf16ps(3, WEIGHTS, QUERY_TILE);
        }
    }
    _tile_stored(0, sums, 4 * LANES);
    if (panels > 1) _tile_stored(1, sums + rows * LANES, 4 * LANES);
    if (panels > 2) _tile_stored(2, sums + 2 * rows * LANES, 4 * LANES);
    if (panels > 3) _tile_stored(3, sums + 3 * rows * LANES, 4 * LANES);
}

/* Weigh a block's keys for the queries of a head from `from` on that are together, and add its weighted values. */
static void add_few_values(const struct few_queries *few, const struct block *block, const uint16_t *const *values,
                       const int64_t *strides, struct prefetches *next, int64_t head, int64_t from) {
    int64_t dim = few->dim, rows = 2 * few->together, panels = dim / PANEL, tiles = (block->count + TILE_ROWS - 1) / TILE_ROWS;
    float *sums = few->sums + (head * parts_of(few->count) + from / WEIGHED) * few->together * dim;
    for (int64_t r = from; r < least_of(from + few->together, few->count); r++) {
        int64_t last = few->position + r / few->group - block->first, end = least_of(last + 1, block->count);
        int64_t window = window_at(few->logits, last + block->first);
        int64_t begin = window >= 0 && last > window ? last - window : 0, state = head * few->count + r;
        float shrink = 1.0f, *of_query = sums + 2 * (r - from) * LANES;
        if (begin < end) {
            prefetch(next, WEIGHT_WORK * few->share);
            shrink = few_weights(few, scores_of(few, head, r), r - from, tiles * TILE_ROWS, begin, end,
                                 few->largest + state, few->total + state);
        } else {
            for (int64_t n = 0; n < tiles; n++)
                memset(few->weights + (n * rows + 2 * (r - from)) * LANES, 0, 2 * LANES * sizeof *few->weights);
        }
        for (int64_t i = 0; shrink != 1.0f && i < panels * rows * LANES; i += rows * LANES) {
            store_f32(of_query + i, load_f32(of_query + i) * shrink);
            store_f32(of_query + i + LANES, load_f32(of_query + i + LANES) * shrink);
        }
    }
    for (int64_t i = 0; i < panels; i += PANELS_IN_TILES) {
        float *at = sums + i * rows * LANES;
        switch (least_of(panels - i, PANELS_IN_TILES)) {
            case 1: add_panels(1, few, at, values, strides, next, tiles, i * PANEL); break;
            case 2: add_panels(2, few, at, values, strides, next, tiles, i * PANEL); break;
            case 3: add_panels(3, few, at, values, strides, next, tiles, i * PANEL); break;
            default: add_panels(4, few, at, values, strides, next, tiles, i * PANEL);
        }
    }
}

/* Let a head's queries attend to a block, whose logits are known. */
static void attend_to_values(const struct few_queries *few, const struct block *block, const void *values,
                             struct prefetches *next, int64_t head) {
    const uint16_t *at[KEYS / TILE_ROWS];
    int64_t strides[KEYS / TILE_ROWS];
    for (int64_t n = 0; n * TILE_ROWS < block->count; n++)
        at[n] = tile_entries(block, values, n * TILE_ROWS, few->dim, few->copied + n * TILE_ROWS * few->dim, strides + n);
    for (int64_t from = 0; from < few->count; from += WEIGHED) add_few_values(few, block, at, strides, next, head, from);
}

/* Write one query's sums in the order of their features. */
static void write_head_sums(float *to, const struct few_queries *few, int64_t head, int64_t r) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i second = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    const float *sums = few->sums + (head * parts_of(few->count) + r / WEIGHED) * few->together * few->dim;
    sums += 2 * (r % WEIGHED) * LANES;
    for (int64_t i = 0; i < few->dim; i += PANEL, sums += 2 * few->together * LANES) {
        __m512 even = _mm512_loadu_ps(sums), odd = _mm512_loadu_ps(sums + LANES);
        _mm512_storeu_ps(to + i, _mm512_permutex2var_ps(even, first, odd));
        _mm512_storeu_ps(to + i + LANES, _mm512_permutex2var_ps(even, second, odd));
    }
}
#endif
#endif
