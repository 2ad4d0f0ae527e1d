/* Decode attention of each row's newest queries over the row's own pages; see decode_attention.py for the formula.
 *
 * Keys are taken in blocks, with a running sum and a reference near the maximum (Milakov and Gimelshein, 2018), so each
 * key and value is read once. A long row is shared out among threads in spans of SPAN keys, which begin at multiples of it
 * and are merged in their order: which heads and spans are done together, and by which thread, changes nothing in a head's
 * result. Where the processor multiplies tiles of bf16, it does (decode_tiles.h).
 */
#include "decode_tiles.h"
#include "native.h"

#define BLOCK 32 /* keys: some tens of KB are prefetched */
#define VALUE_VECTORS (LANES == 8 ? 2 : 4) /* of values, whose sums of four queries stay in registers */
#define SLACK 8.0f /* of logits above the one that weights refer to */
#define WEIGHT_UNITS 10 /* of work, each LANES features of a key: LANES weights of a query */
#define SPAN 512 /* keys; a multiple of BLOCK and KEYS */
#if defined(ELEMENT_BF16) && !IN_PAIRS
#define IS_WIDENED 1 /* words hold two features, which become floats apart: all even ones, all odd ones */
static void in_order(float *sums) {
    float pairs[LANES][2];
    for (int k = 0; k < LANES; k++) pairs[k][0] = sums[k], pairs[k][1] = sums[LANES + k];
    memcpy(sums, pairs, sizeof pairs);
}
#else
#define IS_WIDENED 0
#endif
#define OF_LOAD (1 + IS_WIDENED)     /* vectors of keys that are loaded together */
#define LOADED (OF_LOAD * OF_VECTOR) /* their features */
#define VALUES_OF_LOAD (OF_LOAD > OF_WORD ? OF_LOAD : OF_WORD) /* vectors of values */

/* Whether keys are in two parts: `k_cache` has the channels before those of the values. */
#define IS_IN_PARTS(a) ((a)->k_cache.size[3] < (a)->q.size[2])

/* Features of a head, up to whole LOADED: what is behind the last are zeros. */
static int64_t width_of_query(int64_t dim) { return (dim + LOADED - 1) / LOADED * LOADED; }

/* Add lanes of two vectors to the ones `width` beside them; `width` is a constant where this is used. */
INLINE vec fold_pair(const int width, vec a, vec b) { return parted(width, 0, a, b) + parted(width, 1, a, b); }

/* The rows' keys as they are shared out: each row's heads in parts, each part's keys in spans. */
struct sharing {
    const void *args;
    int64_t parts, spans;
    float *partial; /* of each row, span and query of all heads: its sum, reference and total */
};

/* The pages of a row, and how many of its tokens are in these. */
static const int32_t *pages_of(const decode_attention_args *a, int64_t row) {
    return a->table.data + (a->indptr.data ? a->indptr.data[row] : row * a->table.size[1]);
}

static int64_t length_of(const decode_attention_args *a, int64_t row) {
    int64_t pages = a->indptr.data ? a->table.size[0] - a->indptr.data[row] : a->table.size[1];
    return least_of(a->kv_lens.data[row], pages * a->k_cache.size[1]);
}

/* The keys that a row's queries see. */
struct visible {
    int64_t position, begin, end; /* of the first query; of all of them */
};

static struct visible visible_range(int64_t length, int64_t q_len, const AttentionOptions *options) {
    int64_t position = length - q_len, window = window_at(logits_of(options), position > 0 ? position : 0);
    return (struct visible){position, window >= 0 && position > window ? position - window : 0, length};
}

/* Multiply the logits of some queries with the scales of a block's keys. */
static void scale_block(float *logits, const float *scales, int64_t queries) {
    for (int64_t r = 0; r < queries; r++)
        for (int64_t j = 0; j < BLOCK; j += LANES)
            store_f32(logits + r * BLOCK + j, load_f32(logits + r * BLOCK + j) * load_f32(scales + j));
}

/* Store weights as they are multiplied with values: where these are pairs, rounded, and BLOCK behind what is rounded off. */
INLINE void store_factors(factor *at, vec weights) {
#if IN_PAIRS
    store_bf16(at, weights);
    store_bf16(at + BLOCK, weights - load_bf16(at));
#else
    store_f32(at, weights);
#endif
}

INLINE float greatest_of(vec v) {
#pragma GCC unroll 4
    for (int width = LANES / 2; width > 0; width /= 2) v = greater_of(parted(width, 0, v, v), parted(width, 1, v, v));
    return v[0];
}

/* Turn a query's logits of `count` keys, of which it sees those from `begin` to `end`, into weights, in their place; shrink
 * what was summed before if a logit is SLACK above what weights refer to. */
static void softmax_block(float *logits, struct logits of, const float *value_scales, int64_t count, int64_t begin,
                          int64_t end, float *sums, float *largest, float *total, int64_t width) {
    factor *weights = (factor *)logits;
    float unit = unit_of(of, UNIT), top = *largest;
    int64_t padded = (count + LANES - 1) / LANES * LANES;
    if (begin >= end) {
        memset(logits, 0, BLOCK * sizeof *logits);
        return;
    }
    vec added = splat(0.0f), most = splat(-INFINITY);
    for (int64_t j = 0; are_changed(of) && j < padded; j += LANES)
        store_f32(logits + j, logits_from(load_f32(logits + j), of));
    for (int64_t j = 0; j < begin; j++) logits[j] = -INFINITY;
    for (int64_t j = end; j < padded; j++) logits[j] = -INFINITY;
    for (int64_t j = 0; j < padded; j += LANES) most = greater_of(load_f32(logits + j), most);
    if (any_lane((most - top) * unit > SLACK)) {
        float higher = greatest_of(most);
        float shrink = power_to((top - higher) * unit);
        for (int64_t i = 0; i < width; i += LANES) store_f32(sums + i, load_f32(sums + i) * shrink);
        *total *= shrink;
        *largest = top = higher;
    }
    vec powers[BLOCK / LANES];
    for (int64_t j = 0; j < padded; j += LANES) {
        powers[j / LANES] = weights_of(load_f32(logits + j), splat(top), unit);
        added += powers[j / LANES];
    }
    for (int64_t j = 0; j < padded; j += LANES)
        store_factors(weights + j, value_scales ? powers[j / LANES] * load_f32(value_scales + j) : powers[j / LANES]);
    *total += sum_lanes(added);
}

/* LOADED features of an entry, from the `i`th on, in as many vectors as it takes to multiply them. */
INLINE void NAME(load_features)(uvec *to, const element *at, int64_t i, int64_t dim) {
#if IS_WIDENED
    uvec pairs = pairs_at(at, i, dim);
    to[0] = pairs << 16, to[1] = pairs & 0xffff0000;
#else
    to[0] = features_at(at, i, dim);
#endif
}

/* Add products with the same of `count` keys to the sums of `heads` queries: each key is loaded once. */
INLINE void NAME(add_features)(const int heads, const int count, vec (*sums)[LANES], const factor *q, const element *keys,
                               const int64_t *offsets, int64_t i, int64_t dim, int64_t width, struct prefetches *next) {
    prefetch(next, count * (LOADED / LANES) * next->share);
#pragma GCC unroll 16
    for (int j = 0; j < count; j++) {
        uvec key[OF_LOAD];
        NAME(load_features)(key, keys + offsets[j], i, dim);
#pragma GCC unroll 2
        for (int n = 0; n < OF_LOAD; n++)
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++)
                sums[h][j] = add_factors(sums[h][j], load_words(q + h * width + i + n * OF_VECTOR), key[n]);
    }
}

/* logits[head][key] of `heads` queries, a constant where this is used, with LANES keys, each of which is loaded once. Each
 * sum is added up in the order of sum_lanes. */
INLINE void NAME(dots)(const int heads, float *logits, const factor *q, const element *keys, const int64_t *offsets,
                       int64_t dim, int64_t width, struct prefetches *next) {
    const int count = heads == 3 ? LANES / 4 : LANES / heads;
    vec folded[4][LANES];
    for (int from = 0; from < LANES; from += count) {
        vec sums[4][LANES];
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 16
            for (int j = 0; j < count; j++) sums[h][j] = splat(0.0f);
        int64_t i = 0;
        for (; i + LOADED <= dim; i += LOADED)
            NAME(add_features)(heads, count, sums, q, keys, offsets + from, i, i + LOADED, width, next);
        if (i < dim) NAME(add_features)(heads, count, sums, q, keys, offsets + from, i, dim, width, next);
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
#pragma GCC unroll 4
            for (int part = LANES / 2, left = count / 2; left > 0; part /= 2, left /= 2)
#pragma GCC unroll 8
                for (int j = 0; j < left; j++) sums[h][j] = fold_pair(part, sums[h][2 * j], sums[h][2 * j + 1]);
            folded[h][from / count] = sums[h][0];
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++) {
#pragma GCC unroll 4
        for (int part = LANES / count / 2; part > 0; part /= 2)
#pragma GCC unroll 8
            for (int j = 0; j < part; j++) folded[h][j] = fold_pair(part, folded[h][2 * j], folded[h][2 * j + 1]);
        store_f32(logits + h * BLOCK, folded[h][0]);
    }
}

/* sums[head] += weights[head][key] * values[key] over `vectors` vectors of each from the `i`th feature on; `heads` and
 * `vectors` are constants. */
INLINE void NAME(add_weighted)(const int heads, const int vectors, float *sums, const factor *weights, const element *values,
                               const int64_t *offsets, int64_t i, int64_t count, int64_t dim, int64_t width,
                               struct prefetches *next) {
    vec acc[4][4];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) acc[h][v] = load_f32(sums + h * width + i + v * LANES);
    for (int64_t j = 0; j < count; j += OF_WORD) {
        prefetch(next, OF_WORD * vectors * next->share);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v += VALUES_OF_LOAD) {
            uvec value[2];
            NAME(load_features)(value, values + offsets[j], i + v * LANES, dim);
#if IN_PAIRS
            uvec odd = features_at(values + offsets[j + 1], i + v * LANES, dim);
            value[1] = next_pairs(value[0], odd), value[0] = first_pairs(value[0], odd);
#endif
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++)
#pragma GCC unroll 2
                for (int part = 0; part < OF_WORD; part++) { /* of pairs, and what was rounded off them */
                    uint32_t weight;
                    memcpy(&weight, weights + (h * OF_WORD + part) * BLOCK + j, sizeof weight);
#pragma GCC unroll 2
                    for (int n = 0; n < VALUES_OF_LOAD; n++)
                        acc[h][v + n] = add_factors(acc[h][v + n], value[n], (uvec){0} + weight);
                }
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store_f32(sums + h * width + i + v * LANES, acc[h][v]);
}

INLINE void NAME(weigh)(const int heads, float *sums, const factor *weights, const element *values, const int64_t *offsets,
                        int64_t count, int64_t dim, int64_t width, struct prefetches *next) {
    int64_t i = 0, step = VALUE_VECTORS * LANES;
    for (; i + step <= dim; i += step)
        NAME(add_weighted)(heads, VALUE_VECTORS, sums, weights, values, offsets, i, count, i + step, width, next);
    for (; i < dim; i += LOADED)
        NAME(add_weighted)(heads, VALUES_OF_LOAD, sums, weights, values, offsets, i, count, dim, width, next);
}

/* Call a function for all queries of a key head, as many at once as leave their sums in registers: how many is a constant,
 * `h` the first of them. */
#define BY_QUERIES(function, queries, h, ...)            \
    for (int64_t h = 0; h < queries; h += 4)             \
        switch (queries - h) {                           \
            case 1: function(1, __VA_ARGS__); break;     \
            case 2: function(2, __VA_ARGS__); break;     \
            case 3: function(3, __VA_ARGS__); break;     \
            default: function(4, __VA_ARGS__);           \
        }

NOINLINE void NAME(group_dots)(float *logits, const factor *q, const element *keys, const int64_t *offsets, int64_t queries,
                            int64_t count, int64_t dim, struct prefetches *next) {
    int64_t width = width_of_query(dim);
    for (int64_t j = 0; j < count; j += LANES)
        BY_QUERIES(NAME(dots), queries, h, logits + h * BLOCK + j, q + h * width, keys, offsets + j, dim, width, next)
}

NOINLINE void NAME(group_weigh)(float *sums, const factor *weights, const element *values, const int64_t *offsets,
                             int64_t queries, int64_t count, int64_t dim, struct prefetches *next) {
    int64_t width = width_of_query(dim);
    BY_QUERIES(NAME(weigh), queries, h, sums + h * width, weights + h * OF_WORD * BLOCK, values, offsets, count, dim, width,
               next)
}

/* One head's entries of a block, and in `offsets` their offsets: codes are widened in `room`. */
static const element *NAME(entries_of)(element *room, int64_t code, const void *of_head, const int64_t **offsets,
                                       const int64_t *in_room, int64_t count, int64_t dim) {
    if (!code) return of_head;
    for (int64_t j = 0; j < count; j++)
        for (int64_t i = 0; i < dim; i += LANES)
            store(room + in_room[j] + i, load_codes(code, (const uint8_t *)of_head + (*offsets)[j] + i));
    *offsets = in_room;
    return room;
}

/* Keys of one head, of which both parts are put together in `room`; `offsets` are the numbers of their tokens. */
static const element *NAME(joined)(element *room, const decode_attention_args *a, const int64_t *offsets, int64_t count) {
    const struct {
        const void *data;
        int64_t stride, dim;
    } parts[] = {{a->k_cache.data, a->k_cache.stride[1], a->k_cache.size[3]},
                 {a->v_cache.data, a->v_cache.stride[1], a->v_cache.size[3]}};
    element *to = room;
    for (int64_t j = 0; j < count; j++)
        for (int part = 0; part < 2; to += parts[part++].dim) {
            int64_t at = offsets[j] * parts[part].stride, dim = parts[part].dim;
            if (!a->k_cache.code) memcpy(to, (const element *)parts[part].data + at, dim * sizeof *to);
            for (int64_t i = 0; a->k_cache.code && i < dim; i += LANES)
                store(to + i, load_codes(a->k_cache.code, (const uint8_t *)parts[part].data + at + i));
        }
    return room;
}

/* The queries of some key heads of one row, and their results over a span of keys. */
struct NAME(part) {
    const decode_attention_args *a;
    struct paged entries;
    struct visible visible;
    int64_t row, head, last, queries;   /* key heads, and the queries of one */
    int64_t span, first, end, is_split; /* keys, which may be none; whether there are more, in other spans */
    float *sums, *largest, *total;
};

static int64_t NAME(query_offset)(const struct NAME(part) *p, int64_t head, int64_t query, int64_t dim) {
    int64_t heads = p->a->q.size[1], group = heads / p->a->k_cache.size[2];
    return ((p->row * p->a->q_len + query / group) * heads + head * group + query % group) * dim;
}

/* The prefetches of a block of a part's keys and values. */
static struct prefetches NAME(prefetches_of)(const struct NAME(part) *p, const int64_t *offsets, int64_t count) {
    int64_t dim = p->a->k_cache.size[3], size = p->a->k_cache.code ? 1 : (int64_t)sizeof(element), at = p->head * dim * size;
    if (IS_IN_PARTS(p->a)) return (struct prefetches){0}; /* they come as they are put together */
    return (struct prefetches){(const char *)p->a->k_cache.data + at, VALUES(p->a) + at, offsets, count,
                           (p->last - p->head) * dim * size, size};
}

/* Attend to the keys from `first` to `end` in blocks. Meanwhile the first block of the part after it, if any, is prefetched;
 * a block that no part before has prefetched is prefetched first. */
static void NAME(attend_span)(const struct NAME(part) *p, const struct NAME(part) *after, int is_prefetched, float *at) {
    const decode_attention_args *a = p->a;
    int64_t dim = a->q.size[2], group = a->q.size[1] / a->k_cache.size[2], queries = p->queries;
    int64_t memory[3][BLOCK], *entry_offsets = memory[0], *next = memory[1], *in_room = memory[2], heads = p->last - p->head;
    int64_t first = p->first, count = least_of(p->end - first, BLOCK), coming;
    int64_t code = a->k_cache.code, size = code ? 1 : sizeof(element), first_visible = p->visible.begin - first;
    int64_t width = width_of_query(dim), kv_heads = a->k_cache.size[2];
    struct logits of = logits_of(&a->options);
    factor *q = (factor *)carved(&at, heads * queries * width / OF_WORD);
    float *logits = carved(&at, heads * queries * BLOCK);
    float scales[2][PANEL], *widened = carved(&at, code || IS_IN_PARTS(a) ? BLOCK * dim : 0);
    locate(entry_offsets, &p->entries, first, count);
    struct prefetches ahead = NAME(prefetches_of)(p, entry_offsets, count);
    if (!is_prefetched) prefetch_remaining(&ahead);
    for (int64_t h = 0; h < heads; h++)
        for (int64_t r = 0; r < queries; r++) {
            const element *from = (const element *)a->q.data + NAME(query_offset)(p, p->head + h, r, dim);
            for (int64_t i = 0; i < width; i += LOADED) {
                uvec words[OF_LOAD];
                NAME(load_features)(words, from, i, dim);
                for (int n = 0; n < OF_LOAD; n++)
                    store_words(q + (h * queries + r) * width + i + n * OF_VECTOR, words[n]);
            }
        }
    for (int64_t j = 0; j < BLOCK; j++) in_room[j] = j * dim;
    for (; first < p->end; first += BLOCK, count = coming, first_visible = 0) {
        const struct NAME(part) *then = first + BLOCK < p->end || !after ? p : after;
        int64_t begin = then == p ? first + BLOCK : then->first, *done = entry_offsets;
        coming = least_of(then->end - begin, BLOCK);
        locate(next, &then->entries, begin, coming);
        ahead = NAME(prefetches_of)(then, next, coming);
        int64_t padded = (count + LANES - 1) / LANES * LANES;
        int64_t work = 2 * padded * width * ((queries + 3) / 4) + WEIGHT_UNITS * queries * padded;
        ahead.share = LANES * bytes_of(&ahead) / (heads * work) + 1;
        /* what no query sees is not read */
        for (int64_t j = 0; j < first_visible; j++) entry_offsets[j] = entry_offsets[first_visible];
        for (int64_t j = count; j < padded; j++) entry_offsets[j] = entry_offsets[count - 1];
        for (int64_t h = 0; h < heads; h++) {
            float *scores = logits + h * queries * BLOCK;
            const int64_t *offsets = entry_offsets;
            const void *keys = (const char *)a->k_cache.data + (p->head + h) * dim * size;
            const void *values = VALUES(a) + (p->head + h) * dim * size;
            if (IS_IN_PARTS(a)) keys = NAME(joined)((element *)widened, a, entry_offsets, padded), offsets = in_room;
            else keys = NAME(entries_of)((element *)widened, code, keys, &offsets, in_room, padded, dim);
            NAME(group_dots)(scores, q + h * queries * width, keys, offsets, queries, count, dim, &ahead);
            if (a->k_scales.data) {
                read_scales(scales[0], a->k_scales.data, &p->entries, kv_heads, p->head + h, first, first_visible, count);
                read_scales(scales[1], a->v_scales.data, &p->entries, kv_heads, p->head + h, first, first_visible, count);
                scale_block(scores, scales[0], queries);
            }
            for (int64_t r = 0; r < queries; r++) {
                prefetch(&ahead, WEIGHT_UNITS * (padded / LANES) * ahead.share);
                int64_t at = h * queries + r, position = p->visible.position + r / group - first;
                int64_t window = window_at(of, position + first), end = least_of(position + 1, count);
                softmax_block(scores + r * BLOCK, of, a->k_scales.data ? scales[1] : 0, count,
                              window >= 0 && position > window ? position - window : 0, end, p->sums + at * width,
                              p->largest + at, p->total + at, width);
            }
            if (IS_IN_PARTS(a)) values = keys;
            else {
                offsets = entry_offsets;
                values = NAME(entries_of)((element *)widened, code, values, &offsets, in_room, padded, dim);
            }
            NAME(group_weigh)(p->sums + h * queries * width, (factor *)scores, values, offsets, queries, count, dim, &ahead);
        }
        prefetch_remaining(&ahead);
        entry_offsets = next, next = done;
    }
#if IN_PAIRS || IS_WIDENED
    for (int64_t i = 0; i < heads * queries * width; i += LOADED) in_order(p->sums + i);
#endif
}

/* Whether blocks are taken in tiles. */
static int NAME(decodes_in_tiles)(const decode_attention_args *a) {
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
    return has_tiles && a->q.size[2] % PANEL == 0 && a->q.size[2] <= MOST_DIM && !IS_IN_PARTS(a);
#else
    return (void)a, 0;
#endif
}

#if defined(ELEMENT_BF16) && defined(WITH_TILES)
/* Attend to a part's span in tiles; meanwhile the first block of the part after it, if any, is prefetched. A block that no
 * part before has prefetched is prefetched first. */
static void attend_span_in_tiles(const struct NAME(part) *p, struct few_queries *few, const struct NAME(part) *after,
                                 int is_prefetched, float *at) {
    const decode_attention_args *a = p->a;
    int64_t dim = few->dim, queries = p->queries, kv_heads = a->k_cache.size[2], memory[2][KEYS];
    int64_t *entry_offsets = memory[0], *next = memory[1], first = p->first, count = least_of(p->end - first, KEYS), coming;
    few->position = p->visible.position, few->group = a->q.size[1] / kv_heads;
    few->logits = logits_of(&a->options), few->largest = p->largest, few->total = p->total;
    locate(entry_offsets, &p->entries, first, count);
    struct prefetches ahead = NAME(prefetches_of)(p, entry_offsets, count);
    const char *keys = ahead.keys, *values = ahead.values;
    if (!is_prefetched) prefetch_remaining(&ahead);
    carve_few_queries(few, &at, a->k_scales.data != 0);
    for (int64_t h = 0; h < few->heads; h++)
        for (int64_t r = 0; r < queries; r++)
            put_query(few, h, r, (const uint16_t *)a->q.data + NAME(query_offset)(p, p->head + h, r, dim));
    set_few_shapes(few);
    for (; first < p->end; count = coming, first += KEYS) {
        const struct NAME(part) *then = first + KEYS < p->end || !after ? p : after;
        int64_t begin = then == p ? first + KEYS : then->first;
        coming = least_of(then->end - begin, KEYS);
        locate(next, &then->entries, begin, coming);
        ahead = NAME(prefetches_of)(then, next, coming);
        struct block block = {&p->entries, entry_offsets, first, p->visible.begin - first, count, a->k_cache.code};
        few->share = share_of(few, count, bytes_of(&ahead));
        block_of_logits(few, &block, keys, &ahead);
        for (int64_t h = 0; h < few->heads; h++) {
            if (few->key_scales) {
                read_scales(few->key_scales, a->k_scales.data, &p->entries, kv_heads, p->head + h, first,
                            block.first_visible, count);
                read_scales(few->value_scales, a->v_scales.data, &p->entries, kv_heads, p->head + h, first,
                            block.first_visible, count);
            }
            attend_to_values(few, &block, values + h * dim * (block.code ? 1 : sizeof(uint16_t)), &ahead, h);
        }
        prefetch_remaining(&ahead);
        int64_t *done = entry_offsets;
        entry_offsets = next, next = done;
    }
    for (int64_t h = 0; h < few->heads; h++)
        for (int64_t r = 0; r < queries; r++) write_head_sums(p->sums + (h * queries + r) * dim, few, h, r);
}
#endif

/* Where a span's results of one row wait to be merged: sums, largest logits and totals of all heads' queries. */
static float *NAME(partial_of)(const struct sharing *job, int64_t row, int64_t span) {
    const decode_attention_args *a = job->args;
    return job->partial + (row * job->spans + span) * a->q_len * a->q.size[1] * (a->q.size[2] + 2);
}

/* A part of the work: some key heads of a row, whose entries are contiguous, so that a block is read as one stream,
 * and one span of what its queries see. */
static struct NAME(part) NAME(part_of)(const struct sharing *job, int64_t task) {
    const decode_attention_args *a = job->args;
    int64_t kv_heads = a->k_cache.size[2], row = task / job->parts / job->spans, at = task / job->spans % job->parts;
    int64_t span = task % job->spans, block = NAME(decodes_in_tiles)(a) ? KEYS : BLOCK;
    int64_t length = length_of(a, row);
    int64_t entry = IS_IN_PARTS(a) ? 1 : a->k_cache.size[2] * a->k_cache.size[3];
    struct paged entries = {pages_of(a, row), a->k_cache.size[0], a->k_cache.size[1], entry};
    struct NAME(part) part = {a, entries, visible_range(length, a->q_len, &a->options), row,
                              at * kv_heads / job->parts, (at + 1) * kv_heads / job->parts,
                              a->q_len * (a->q.size[1] / kv_heads), span};
    part.first = part.visible.begin > span * SPAN ? part.visible.begin / block * block : span * SPAN;
    part.end = least_of((span + 1) * SPAN, length);
    part.is_split = (length + SPAN - 1) / SPAN - part.visible.begin / SPAN > 1;
    return part;
}

static void NAME(attend_heads)(const struct sharing *job, struct NAME(part) part, const struct NAME(part) *after,
                               int is_prefetched) {
    const decode_attention_args *a = job->args;
    int64_t dim = a->q.size[2], width = width_of_query(dim), queries = part.queries;
    int64_t count = (part.last - part.head) * queries, room = count * (width + BLOCK);
    if (a->k_cache.code || IS_IN_PARTS(a)) room += BLOCK * dim;
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
    struct few_queries few = {0};
    if (NAME(decodes_in_tiles)(a)) room = few_queries_floats(&few, part.last - part.head, queries, dim);
#endif
    float *at = scratch(room + count * (width + 2) + 8 * LANES);
    part.sums = carved(&at, count * width), part.largest = carved(&at, count), part.total = carved(&at, count);
    memset(part.sums, 0, count * width * sizeof(float));
    for (int64_t r = 0; r < count; r++) {
        int has_sink = a->sinks.data && part.span == part.visible.begin / SPAN;
        int64_t of_head = (part.head + r / queries) * (queries / a->q_len) + r % queries % (queries / a->q_len);
        part.largest[r] = has_sink ? sink_logit(a->sinks.data[of_head], logits_of(&a->options)) : -INFINITY;
        part.total[r] = has_sink ? 1.0f : 0.0f; /* e^(sink - sink), as if it were a key */
    }
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
    if (NAME(decodes_in_tiles)(a)) attend_span_in_tiles(&part, &few, after, is_prefetched, at);
    else
#endif
    NAME(attend_span)(&part, after, is_prefetched, at);
    float *partial = part.is_split ? NAME(partial_of)(job, part.row, part.span) + part.head * queries * (dim + 2) : 0;
    for (int64_t r = 0; r < count; r++) {
        float *sums = part.sums + r * width, whole = part.total[r] > 0.0f ? (float)a->v_scale / part.total[r] : 0.0f;
        element *out = (element *)a->out.data +
                       NAME(query_offset)(&part, part.head + r / queries, r % queries, a->out.size[2]);
        if (part.is_split) {
            memcpy(partial + r * (dim + 2), sums, dim * sizeof(float));
            partial[r * (dim + 2) + dim] = part.largest[r], partial[r * (dim + 2) + dim + 1] = part.total[r];
        } else {
            for (int64_t i = SKIPPED(a); i < dim; i += LANES) store(out + i - SKIPPED(a), load_f32(sums + i) * whole);
        }
    }
}

/* No attention: of a row without tokens. */
static void NAME(write_zeros)(const struct NAME(part) *part) {
    for (int64_t head = part->head; head < part->last; head++)
        for (int64_t r = 0; r < part->queries; r++)
            memset((element *)part->a->out.data + NAME(query_offset)(part, head, r, part->a->out.size[2]), 0,
                   part->a->out.size[2] * sizeof(element));
}

static void NAME(attend_parts)(const void *arg, int64_t begin, int64_t end) {
    const struct sharing *job = arg;
    struct tile_shapes shapes = tiles_begun();
    int is_prefetched = 0;
    for (int64_t task = begin; task < end; task++) {
        struct NAME(part) part = NAME(part_of)(job, task), after = {0};
        if (part.visible.end <= 0 && part.span == 0) NAME(write_zeros)(&part);
        if (part.first >= part.end) continue;
        for (int64_t then = task + 1; then < end && after.first >= after.end; then++) after = NAME(part_of)(job, then);
        NAME(attend_heads)(job, part, after.first < after.end ? &after : 0, is_prefetched);
        is_prefetched = 1;
    }
    tiles_ended(shapes);
}

/* Merge the spans of some queries, each of one head, in the order of the spans. */
static void NAME(merge_spans)(const void *arg, int64_t begin, int64_t end) {
    const struct sharing *job = arg;
    const decode_attention_args *a = job->args;
    int64_t heads = a->q.size[1], dim = a->q.size[2], kv_heads = a->k_cache.size[2], queries = a->q_len * heads / kv_heads;
    for (int64_t task = begin; task < end; task++) {
        int64_t row = task / (kv_heads * queries), entry = task % (kv_heads * queries);
        int64_t length = length_of(a, row);
        int64_t first = visible_range(length, a->q_len, &a->options).begin / SPAN, last = (length + SPAN - 1) / SPAN;
        if (last - first < 2) continue;
        struct NAME(part) part = {.a = a, .row = row};
        element *out = (element *)a->out.data + NAME(query_offset)(&part, entry / queries, entry % queries, a->out.size[2]);
        float top = -INFINITY, total = 0.0f, unit = unit_of(logits_of(&a->options), UNIT), shrinks[2], *sums = scratch(dim);
        memset(sums, 0, dim * sizeof *sums);
        for (int64_t span = first; span < last; span++) {
            const float *from = NAME(partial_of)(job, row, span) + entry * (dim + 2);
            float higher = from[dim] > top ? from[dim] : top;
            if (higher == -INFINITY && from[dim + 1] == 0.0f) continue; /* it sees nothing yet */
            shrinks[0] = power_to((top - higher) * unit), shrinks[1] = power_to((from[dim] - higher) * unit);
            for (int64_t i = 0; i < dim; i += LANES)
                store_f32(sums + i, load_f32(sums + i) * shrinks[0] + load_f32(from + i) * shrinks[1]);
            total = total * shrinks[0] + from[dim + 1] * shrinks[1], top = higher;
        }
        float whole = total > 0.0f ? (float)a->v_scale / total : 0.0f;
        for (int64_t i = SKIPPED(a); i < dim; i += LANES) store(out + i - SKIPPED(a), load_f32(sums + i) * whole);
    }
}

KERNEL(decode_attention) {
    int64_t listed = a->indptr.data ? a->indptr.size[0] : a->table.size[0], keys = 0, most = 0;
    int64_t rows = least_of(a->q.size[0] / a->q_len, least_of(listed, a->kv_lens.size[0]));
    for (int64_t row = 0; row < rows; row++) {
        int64_t length = length_of(a, row);
        struct visible visible = visible_range(length, a->q_len, &a->options);
        if (length <= 0) continue;
        keys += length - visible.begin;
        if ((length + SPAN - 1) / SPAN > most) most = (length + SPAN - 1) / SPAN;
    }
    struct sharing job = {a, 1, most > 0 ? most : 1, 0};
    /* as few parts of a row's heads as keep all threads busy, for whole rows are one stream */
    job.parts = least_of(1 + 2 * threads / items_of(keys, SPAN), a->k_cache.size[2]);
    int64_t tasks = rows * job.parts * job.spans, work = keys * a->q.size[1] * a->q.size[2] * a->q_len;
    int64_t merges = most > 1 ? rows * a->q_len * a->q.size[1] : 0;
    if (merges) job.partial = lasting(merges * job.spans * (a->q.size[2] + 2));
    if (tasks > 0) parallel(threads, NAME(attend_parts), &job, tasks, items_of(tasks * PARALLEL_WORK, work));
    if (merges) parallel(threads, NAME(merge_spans), &job, merges, items_of(PARALLEL_WORK, job.spans * a->q.size[2]));
}
