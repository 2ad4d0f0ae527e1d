/* Decode attention of each row's newest queries over the row's own pages; see decode_attention.py for the formula.
 *
 * Keys are taken in blocks, with a running sum and a reference near the maximum (Milakov and Gimelshein, 2018), so each
 * key and value is read once. A long row is shared out among threads in spans of SPAN keys, which begin at multiples of it
 * and are merged in their order: which heads and spans are done together, and by which thread, changes nothing in a head's
 * result. Where the processor multiplies tiles of bf16, it does (decode_tiles.h).
 */
#include "decode_tiles.h"
#include "native.h"

#ifndef GRAPHDECODE_DECODE_ATTENTION
#define GRAPHDECODE_DECODE_ATTENTION
#define BLOCK 16 /* keys: what is asked for ahead of its use is not more than some KB */
#define VALUE_VECTORS (LANES == 8 ? 2 : 4) /* of values, whose sums of four queries stay in registers */
#define SLACK 8.0f /* of logits above the one that weights refer to */
#define SPAN 512 /* keys; a multiple of BLOCK and KEYS */

/* Add lanes of two vectors to the ones `width` beside them; `width` is a constant where this is used. */
INLINE vec fold_pair(const int width, vec a, vec b) { return parted(width, 0, a, b) + parted(width, 1, a, b); }

/* The rows' keys as they are shared out: each row's heads in parts, each part's keys in spans. */
struct sharing {
    const void *args;
    int64_t parts, spans;
    float *partial; /* of each row, span and query of all heads: its sum, reference and total */
};

/* What a row's queries see of its keys. */
struct seen {
    int64_t position, begin, end; /* of the first query; of all of them */
};

static struct seen seen_of(int64_t length, int64_t q_len, const AttentionOptions *options) {
    int64_t position = length - q_len, window = window_at(logits_of(options), position > 0 ? position : 0);
    return (struct seen){position, window >= 0 && position > window ? position - window : 0, length};
}

static float power_to(float logit) { return IN_PAIRS ? exp2f(logit) : expf(logit); }

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
static void soften(float *logits, struct logits of, const float *value_scales, int64_t count, int64_t begin, int64_t end,
                   float *sums, float *largest, float *total, int64_t width) {
    factor *weights = (factor *)logits;
    float scale = are_changed(of) ? 1.0f : of.scale * UNIT, top = *largest;
    int64_t padded = (count + LANES - 1) / LANES * LANES;
    if (begin >= end) {
        memset(logits, 0, BLOCK * sizeof *logits);
        return;
    }
    ivec more = {0};
    vec added = splat(0.0f);
    for (int64_t j = 0; are_changed(of) && j < padded; j += LANES)
        store_f32(logits + j, logits_from(load_f32(logits + j), of, UNIT));
    for (int64_t j = 0; j < begin; j++) logits[j] = -INFINITY;
    for (int64_t j = end; j < padded; j++) logits[j] = -INFINITY;
    for (int64_t j = 0; j < padded; j += LANES) more |= load_f32(logits + j) * scale - top > SLACK;
    if (any_lane(more)) {
        vec most = splat(-INFINITY);
        for (int64_t j = 0; j < padded; j += LANES) most = greater_of(load_f32(logits + j), most);
        float found = greatest_of(most) * scale;
        float shrink = power_to(top - found);
        for (int64_t i = 0; i < width; i += LANES) store_f32(sums + i, load_f32(sums + i) * shrink);
        *total *= shrink;
        *largest = top = found;
    }
    vec powers[BLOCK / LANES];
    for (int64_t j = 0; j < padded; j += LANES) {
        powers[j / LANES] = power_of(load_f32(logits + j) * scale - top);
        added += powers[j / LANES];
    }
    for (int64_t j = 0; j < padded; j += LANES)
        store_factors(weights + j, value_scales ? powers[j / LANES] * load_f32(value_scales + j) : powers[j / LANES]);
    *total += sum_lanes(added);
}
#endif

/* Add products with OF_VECTOR features of some keys, from the `i`th on, to the sums of `heads` queries: each key is loaded
 * once. */
INLINE void NAME(add_features)(const int heads, vec *sums, const factor *q, const element *const *found, int64_t i,
                               int64_t dim, int64_t width) {
    const int keys = LANES / heads;
#pragma GCC unroll 16
    for (int j = 0; j < keys; j++) {
        uvec key = features_at(found[j], i, dim);
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++)
            sums[h * keys + j] = add_factors(sums[h * keys + j], load_words(q + h * width + i), key);
    }
}

/* logits[head][key] of `heads` queries, a constant where this is used, with LANES / heads keys. Each sum is added up in the
 * order of sum_lanes. */
INLINE void NAME(add_dots)(const int heads, float *logits, const factor *q, const element *const *found, int64_t dim,
                           int64_t width) {
    const int keys = LANES / heads;
    vec sums[LANES];
    int64_t i = 0;
#pragma GCC unroll 16
    for (int n = 0; n < LANES; n++) sums[n] = splat(0.0f);
    for (; i + OF_VECTOR <= dim; i += OF_VECTOR) NAME(add_features)(heads, sums, q, found, i, i + OF_VECTOR, width);
    if (i < dim) NAME(add_features)(heads, sums, q, found, i, dim, width);
#pragma GCC unroll 4
    for (int width = LANES / 2; width > 0; width /= 2)
#pragma GCC unroll 16
        for (int n = 0; n < width; n++) sums[n] = fold_pair(width, sums[2 * n], sums[2 * n + 1]);
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++) memcpy(logits + h * BLOCK, (float *)sums + h * keys, keys * sizeof(float));
}

/* sums[head] += weights[head][key] * values[key] over `vectors` vectors of each from the `i`th feature on; `heads` and
 * `vectors` are constants. */
INLINE void NAME(add_weighted)(const int heads, const int vectors, float *sums, const factor *weights,
                               const element *const *values, int64_t i, int64_t count, int64_t dim, int64_t width) {
    vec held[4][4];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) held[h][v] = load_f32(sums + h * width + i + v * LANES);
    for (int64_t j = 0; j < count; j += OF_WORD) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v += OF_WORD) {
            uvec value[OF_WORD];
            value[0] = features_at(values[j], i + v * LANES, dim);
#if IN_PAIRS
            uvec odd = features_at(values[j + 1], i + v * LANES, dim);
            value[1] = next_pairs(value[0], odd), value[0] = first_pairs(value[0], odd);
#endif
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++)
#pragma GCC unroll 2
                for (int part = 0; part < OF_WORD; part++) { /* of pairs, and what was rounded off them */
                    uint32_t weight;
                    memcpy(&weight, weights + (h * OF_WORD + part) * BLOCK + j, sizeof weight);
#pragma GCC unroll 2
                    for (int n = 0; n < OF_WORD; n++)
                        held[h][v + n] = add_factors(held[h][v + n], value[n], (uvec){0} + weight);
                }
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store_f32(sums + h * width + i + v * LANES, held[h][v]);
}

INLINE void NAME(dots)(const int heads, float *logits, const factor *q, const element *const *found, int64_t count,
                       int64_t dim, int64_t width) {
    for (int64_t j = 0; j < count; j += LANES / heads) NAME(add_dots)(heads, logits + j, q, found + j, dim, width);
}

INLINE void NAME(weigh)(const int heads, float *sums, const factor *weights, const element *const *values, int64_t count,
                        int64_t dim, int64_t width) {
    int64_t i = 0, step = VALUE_VECTORS * LANES;
    for (; i + step <= dim; i += step)
        NAME(add_weighted)(heads, VALUE_VECTORS, sums, weights, values, i, count, i + step, width);
    for (; i < dim; i += OF_VECTOR) NAME(add_weighted)(heads, OF_WORD, sums, weights, values, i, count, dim, width);
}

/* Both for all queries of a key head, as many at once as leave the sums in registers. */
APART void NAME(group_dots)(float *logits, const factor *q, const element *const *found, int64_t group, int64_t count,
                            int64_t dim) {
    int64_t h = 0, width = width_of_head(dim);
    for (; h + 4 <= group; h += 4) NAME(dots)(4, logits + h * BLOCK, q + h * width, found, count, dim, width);
    for (; h + 2 <= group; h += 2) NAME(dots)(2, logits + h * BLOCK, q + h * width, found, count, dim, width);
    for (; h < group; h++) NAME(dots)(1, logits + h * BLOCK, q + h * width, found, count, dim, width);
}

APART void NAME(group_weigh)(float *sums, const factor *weights, const element *const *values, int64_t group, int64_t count,
                             int64_t dim) {
    int64_t width = width_of_head(dim);
    for (int64_t h = 0; h < group; h += 4, sums += 4 * width, weights += 4 * OF_WORD * BLOCK)
        switch (group - h) {
            case 1: NAME(weigh)(1, sums, weights, values, count, dim, width); break;
            case 2: NAME(weigh)(2, sums, weights, values, count, dim, width); break;
            case 3: NAME(weigh)(3, sums, weights, values, count, dim, width); break;
            default: NAME(weigh)(4, sums, weights, values, count, dim, width);
        }
}

/* Find one head's entries of a block, from `begin` to `count`; the others are one of these. Codes are widened in `room`. */
static void NAME(find_entries)(const element **found, element *room, int64_t code, const void *of_head,
                               const int64_t *places, int64_t begin, int64_t count, int64_t dim) {
    if (code)
        for (int64_t j = begin; j < count; j++)
            for (int64_t i = 0; i < dim; i += LANES)
                store(room + j * dim + i, load_codes(code, (const uint8_t *)of_head + places[j] + i));
    for (int64_t j = 0; j < BLOCK; j++) {
        int64_t entry = j < begin ? begin : j < count ? j : count - 1;
        found[j] = code ? room + entry * dim : (const element *)of_head + places[entry];
    }
}

/* The queries of some key heads of one row, and what becomes of them over a span of keys. */
struct NAME(part) {
    const decode_attention_args *a;
    struct paged entries;
    struct seen seen;
    int64_t row, head, last, queries;   /* key heads, and the queries of one */
    int64_t span, first, end, is_split; /* keys, which may be none; whether there are more, in other spans */
    float *sums, *largest, *total;
};

static int64_t NAME(place_of)(const struct NAME(part) *p, int64_t head, int64_t query, int64_t dim) {
    int64_t heads = p->a->q.size[1], group = heads / p->a->k_cache.size[2];
    return ((p->row * p->a->q_len + query / group) * heads + head * group + query % group) * dim;
}

/* Both over the keys from `first` to `end`, as blocks of one element type take them. */
static void NAME(attend_span)(const struct NAME(part) *p, float *at) {
    const decode_attention_args *a = p->a;
    int64_t dim = a->k_cache.size[3], group = a->q.size[1] / a->k_cache.size[2], queries = p->queries;
    const element *found[BLOCK];
    int64_t memory[2][BLOCK], *places = memory[0], *next = memory[1], heads = p->last - p->head;
    int64_t code = a->k_cache.code, size = code ? 1 : sizeof(element);
    int64_t width = width_of_head(dim), kv_heads = a->k_cache.size[2];
    struct logits of = logits_of(&a->options);
    factor *q = (factor *)carved(&at, heads * queries * width / OF_WORD);
    float *logits = carved(&at, heads * queries * BLOCK);
    float scales[2][PANEL], *widened = carved(&at, code ? BLOCK * dim : 0);
    for (int64_t h = 0; h < heads; h++)
        for (int64_t r = 0; r < queries; r++) {
            const element *from = (const element *)a->q.data + NAME(place_of)(p, p->head + h, r, dim);
            for (int64_t i = 0; i < width; i += OF_VECTOR)
                store_words(q + (h * queries + r) * width + i, features_at(from, i, dim));
        }
    const char *all_keys = (const char *)a->k_cache.data + p->head * dim * size;
    const char *all_values = VALUES(a) + p->head * dim * size;
    int64_t first = p->first, end = p->end, count = least_of(end - first, BLOCK), coming;
    locate(places, &p->entries, first, count);
    struct coming begun = {all_keys, all_values, places, count, heads * dim * size, size};
    ask_in_order(&begun, 2 * count);
    for (; count > 0; count = coming, first += BLOCK) {
        coming = first + BLOCK < end ? least_of(end - first - BLOCK, BLOCK) : 0;
        locate(next, &p->entries, first + BLOCK, coming);
        struct coming ahead = {all_keys, all_values, next, coming, heads * dim * size, size};
        int64_t share = (2 * coming + 4 * heads - 1) / (4 * heads); /* of their tokens, with each quarter of a head's work */
        int64_t unseen = p->seen.begin > first ? p->seen.begin - first : 0; /* by any query: it is not looked at */
        for (int64_t h = 0; h < heads; h++) {
            float *own = logits + h * queries * BLOCK;
            ask_in_order(&ahead, share);
            NAME(find_entries)(found, (element *)widened, code, all_keys + h * dim * size, places, unseen, count, dim);
            NAME(group_dots)(own, q + h * queries * width, found, queries, count, dim);
            if (a->k_scales.data) {
                read_scales(scales[0], a->k_scales.data, &p->entries, kv_heads, p->head + h, first, unseen, count);
                read_scales(scales[1], a->v_scales.data, &p->entries, kv_heads, p->head + h, first, unseen, count);
                scale_block(own, scales[0], queries);
            }
            ask_in_order(&ahead, share);
            for (int64_t r = 0; r < queries; r++) {
                int64_t at = h * queries + r, position = p->seen.position + r / group - first;
                int64_t window = window_at(of, position + first), end = least_of(position + 1, count);
                soften(own + r * BLOCK, of, a->k_scales.data ? scales[1] : 0, count,
                       window >= 0 && position > window ? position - window : 0, end, p->sums + at * width,
                       p->largest + at, p->total + at, width);
            }
            ask_in_order(&ahead, share);
            NAME(find_entries)(found, (element *)widened, code, all_values + h * dim * size, places, unseen, count, dim);
            ask_in_order(&ahead, share);
            NAME(group_weigh)(p->sums + h * queries * width, (factor *)own, found, queries, count, dim);
        }
        int64_t *done = places;
        places = next, next = done;
    }
#if IN_PAIRS
    for (int64_t i = 0; i < heads * queries * width; i += OF_VECTOR) in_order(p->sums + i);
#endif
}

/* Whether blocks are taken in tiles. */
static int NAME(decodes_in_tiles)(const decode_attention_args *a) {
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
    return has_tiles && a->q.size[2] % PANEL == 0 && a->q.size[2] <= MOST_DIM;
#else
    return (void)a, 0;
#endif
}

#if defined(ELEMENT_BF16) && defined(WITH_TILES)
/* Where a part's keys and values begin in the cache, and what is to be asked for of a block of them. */
static struct coming coming_of(const struct NAME(part) *p, const int64_t *places, int64_t count) {
    int64_t dim = p->a->k_cache.size[3], size = p->a->k_cache.code ? 1 : sizeof(uint16_t), at = p->head * dim * size;
    return (struct coming){(const char *)p->a->k_cache.data + at, VALUES(p->a) + at, places, count,
                           (p->last - p->head) * dim * size, size};
}

/* Both over a part's span in tiles; meanwhile the first block of the part that comes after it, if any, is asked for. What
 * no part before has asked for is asked for first. */
static void attend_span_in_tiles(const struct NAME(part) *p, struct few_queries *few, const struct NAME(part) *after,
                                 int is_asked_for, float *at) {
    const decode_attention_args *a = p->a;
    int64_t dim = few->dim, queries = p->queries, kv_heads = a->k_cache.size[2], memory[2][KEYS];
    int64_t *places = memory[0], *next = memory[1], first = p->first, count = least_of(p->end - first, KEYS), coming;
    few->position = p->seen.position, few->group = a->q.size[1] / kv_heads;
    few->logits = logits_of(&a->options), few->largest = p->largest, few->total = p->total;
    locate(places, &p->entries, first, count);
    struct coming ahead = coming_of(p, places, count);
    const char *keys = ahead.keys, *values = ahead.values;
    if (!is_asked_for) ask_for_rest(&ahead);
    carve_few_queries(few, &at, a->k_scales.data != 0);
    for (int64_t h = 0; h < few->heads; h++)
        for (int64_t r = 0; r < queries; r++)
            put_query(few, h, r, (const uint16_t *)a->q.data + NAME(place_of)(p, p->head + h, r, dim));
    set_few_shapes(few);
    for (; first < p->end; count = coming, first += KEYS) {
        const struct NAME(part) *then = first + KEYS < p->end || !after ? p : after;
        int64_t begin = then == p ? first + KEYS : then->first;
        coming = least_of(then->end - begin, KEYS);
        locate(next, &then->entries, begin, coming);
        ahead = coming_of(then, next, coming);
        struct block block = {&p->entries, places, first, p->seen.begin - first, count, a->k_cache.code};
        few->share = share_of(few, count, bytes_of(&ahead));
        block_of_logits(few, &block, keys, &ahead);
        for (int64_t h = 0; h < few->heads; h++) {
            if (few->key_scales) {
                read_scales(few->key_scales, a->k_scales.data, &p->entries, kv_heads, p->head + h, first, block.unseen, count);
                read_scales(few->value_scales, a->v_scales.data, &p->entries, kv_heads, p->head + h, first, block.unseen, count);
            }
            attend_to_values(few, &block, values + h * dim * (block.code ? 1 : sizeof(uint16_t)), &ahead, h);
        }
        ask_for_rest(&ahead);
        int64_t *done = places;
        places = next, next = done;
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

/* A part of the work: some key heads of a row, whose entries stand side by side, so that a block is read as one stream,
 * and one span of what its queries see. */
static struct NAME(part) NAME(part_of)(const struct sharing *job, int64_t task) {
    const decode_attention_args *a = job->args;
    int64_t kv_heads = a->k_cache.size[2], row = task / job->parts / job->spans, at = task / job->spans % job->parts;
    int64_t span = task % job->spans, block = NAME(decodes_in_tiles)(a) ? KEYS : BLOCK;
    int64_t length = least_of(a->kv_lens.data[row], a->table.size[1] * a->k_cache.size[1]);
    struct NAME(part) part = {a, PAGES_OF(row, a->table, a->k_cache), seen_of(length, a->q_len, &a->options), row,
                              at * kv_heads / job->parts, (at + 1) * kv_heads / job->parts,
                              a->q_len * (a->q.size[1] / kv_heads), span};
    part.first = part.seen.begin > span * SPAN ? part.seen.begin / block * block : span * SPAN;
    part.end = least_of((span + 1) * SPAN, length);
    part.is_split = (length + SPAN - 1) / SPAN - part.seen.begin / SPAN > 1;
    return part;
}

static void NAME(attend_heads)(const struct sharing *job, struct NAME(part) part, const struct NAME(part) *after,
                               int is_asked_for) {
    const decode_attention_args *a = job->args;
    int64_t dim = a->k_cache.size[3], width = width_of_head(dim), queries = part.queries;
    int64_t count = (part.last - part.head) * queries, room = count * (width + BLOCK) + (a->k_cache.code ? BLOCK * dim : 0);
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
    struct few_queries few = {0};
    if (NAME(decodes_in_tiles)(a)) room = few_queries_floats(&few, part.last - part.head, queries, dim);
#endif
    float *at = scratch(room + count * (width + 2) + 8 * LANES);
    part.sums = carved(&at, count * width), part.largest = carved(&at, count), part.total = carved(&at, count);
    memset(part.sums, 0, count * width * sizeof(float));
    for (int64_t r = 0; r < count; r++) {
        int has_sink = a->sinks.data && part.span == part.seen.begin / SPAN;
        int64_t of_head = (part.head + r / queries) * (queries / a->q_len) + r % queries % (queries / a->q_len);
        part.largest[r] = has_sink ? a->sinks.data[of_head] * UNIT : -INFINITY;
        part.total[r] = has_sink ? 1.0f : 0.0f; /* e^(sink - sink), as if it were a key */
    }
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
    if (NAME(decodes_in_tiles)(a)) attend_span_in_tiles(&part, &few, after, is_asked_for, at);
    else
#endif
    NAME(attend_span)(&part, at);
    float *partial = part.is_split ? NAME(partial_of)(job, part.row, part.span) + part.head * queries * (dim + 2) : 0;
    for (int64_t r = 0; r < count; r++) {
        float *sums = part.sums + r * width, whole = part.total[r] > 0.0f ? (float)a->v_scale / part.total[r] : 0.0f;
        element *out = (element *)a->out.data + NAME(place_of)(&part, part.head + r / queries, r % queries, a->out.size[2]);
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
            memset((element *)part->a->out.data + NAME(place_of)(part, head, r, part->a->out.size[2]), 0,
                   part->a->out.size[2] * sizeof(element));
}

static void NAME(attend_parts)(const void *given, int64_t begin, int64_t end) {
    const struct sharing *job = given;
    struct tile_shapes shapes = tiles_begun();
    int is_asked_for = 0;
    for (int64_t task = begin; task < end; task++) {
        struct NAME(part) part = NAME(part_of)(job, task), after = {0};
        if (part.seen.end <= 0 && part.span == 0) NAME(write_zeros)(&part);
        if (part.first >= part.end) continue;
        for (int64_t then = task + 1; then < end && after.first >= after.end; then++) after = NAME(part_of)(job, then);
        NAME(attend_heads)(job, part, after.first < after.end ? &after : 0, is_asked_for);
        is_asked_for = 1;
    }
    tiles_ended(shapes);
}

/* Merge the spans of some queries, each of one head, in the order of the spans. */
static void NAME(merge_spans)(const void *given, int64_t begin, int64_t end) {
    const struct sharing *job = given;
    const decode_attention_args *a = job->args;
    int64_t heads = a->q.size[1], dim = a->q.size[2], kv_heads = a->k_cache.size[2], queries = a->q_len * heads / kv_heads;
    for (int64_t task = begin; task < end; task++) {
        int64_t row = task / (kv_heads * queries), entry = task % (kv_heads * queries);
        int64_t length = least_of(a->kv_lens.data[row], a->table.size[1] * a->k_cache.size[1]);
        int64_t first = seen_of(length, a->q_len, &a->options).begin / SPAN, last = (length + SPAN - 1) / SPAN;
        if (last - first < 2) continue;
        struct NAME(part) part = {.a = a, .row = row};
        element *out = (element *)a->out.data + NAME(place_of)(&part, entry / queries, entry % queries, a->out.size[2]);
        float top = -INFINITY, total = 0.0f, shrinks[2], *sums = scratch(dim);
        memset(sums, 0, dim * sizeof *sums);
        for (int64_t span = first; span < last; span++) {
            const float *from = NAME(partial_of)(job, row, span) + entry * (dim + 2);
            float higher = from[dim] > top ? from[dim] : top;
            if (higher == -INFINITY && from[dim + 1] == 0.0f) continue; /* it sees nothing yet */
            shrinks[0] = power_to(top - higher), shrinks[1] = power_to(from[dim] - higher);
            for (int64_t i = 0; i < dim; i += LANES)
                store_f32(sums + i, load_f32(sums + i) * shrinks[0] + load_f32(from + i) * shrinks[1]);
            total = total * shrinks[0] + from[dim + 1] * shrinks[1], top = higher;
        }
        float whole = total > 0.0f ? (float)a->v_scale / total : 0.0f;
        for (int64_t i = SKIPPED(a); i < dim; i += LANES) store(out + i - SKIPPED(a), load_f32(sums + i) * whole);
    }
}

KERNEL(decode_attention) {
    int64_t rows = least_of(a->q.size[0] / a->q_len, least_of(a->table.size[0], a->kv_lens.size[0])), keys = 0, most = 0;
    for (int64_t row = 0; row < rows; row++) {
        int64_t length = least_of(a->kv_lens.data[row], a->table.size[1] * a->k_cache.size[1]);
        struct seen seen = seen_of(length, a->q_len, &a->options);
        if (length <= 0) continue;
        keys += length - seen.begin;
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
