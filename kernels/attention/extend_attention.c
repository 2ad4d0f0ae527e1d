/* Causal attention of each row's newest tokens over the row's own pages; see extend_attention.py for the formula.
 *
 * Some tokens of a row, and all heads that share a key head, are done together, and each lane of a vector is a query: a
 * key or value that was widened once serves them all, and nothing is added up across lanes. Keys are taken BLOCK at a
 * time with a running maximum and sum, as in decode_attention.c, which comes before this file in the unit.
 *
 * Where the processor multiplies bf16, some hundred queries share keys that become panels (attention_pairs.h), or tiles
 * (attention_tiles.h).
 */
#include "native.h"
#include "attention_tiles.h"

#ifndef GRAPHDECODE_EXTEND_ATTENTION
#define GRAPHDECODE_EXTEND_ATTENTION
#if LANES == 8 || defined(__SSE2__) && LANES == 4 /* of 16 registers */
#define QUERY_VECTORS 2
#else
#define QUERY_VECTORS 4
#endif
#define ROWS_OF_ONE (LANES < 8 ? 4 : 8) /* that are summed beside one vector of queries */
#define QUERIES 64       /* about so many share a block of keys */
#define PAIR_QUERIES 128 /* the same, in pairs */
#define MOST_PAIR_QUERIES 1536 /* where that leaves PAIR_TASKS */
#define PAIR_TASKS 8

/* Queries of one key head, a lane each, and what is known of their results so far. */
struct query_lanes {
    int64_t count, padded, dim; /* padded to whole vectors */
    float *q, *sums;            /* [dim][padded] */
    float *largest, *total, *shrink;
    int32_t *position, *window; /* of its token, and how many keys before it are seen */
    float scale;
};

/* Sums of products as `add_lanes` has them, of what stood in `to` times `shrink`, or without that of nothing; for `rows` m,
 * which are a multiple of 4 and of ROWS_OF_ONE, and all lanes. */
static void lane_products(float *to, const float *shrink, int64_t rows, const float *a, int64_t row, int64_t step,
                         const float *b, int64_t steps, int64_t padded) {
    int64_t at = 0;
    for (; at + QUERY_VECTORS * LANES <= padded; at += QUERY_VECTORS * LANES)
        for (int64_t m = 0; m < rows; m += 4) {
            float *sums = to + m * padded + at;
            if (shrink) add_lanes(4, QUERY_VECTORS, SHRUNK, sums, shrink + at, a + m * row, row, step, b + at, steps, padded);
            else add_lanes(4, QUERY_VECTORS, FRESH, sums, 0, a + m * row, row, step, b + at, steps, padded);
        }
    for (; at < padded; at += LANES)
        for (int64_t m = 0; m < rows; m += ROWS_OF_ONE) {
            float *sums = to + m * padded + at;
            if (shrink) add_lanes(ROWS_OF_ONE, 1, SHRUNK, sums, shrink + at, a + m * row, row, step, b + at, steps, padded);
            else add_lanes(ROWS_OF_ONE, 1, FRESH, sums, 0, a + m * row, row, step, b + at, steps, padded);
        }
}

/* Forbid what a query does not see of `count` keys that begin at `first`. */
static void mask_lanes(const struct query_lanes *queries, float *logits, int64_t first, int64_t count) {
    for (int64_t j = 0; j < count; j++)
        for (int64_t at = 0; at < queries->padded; at += LANES) {
            ivec behind = (ivec)load_words(queries->position + at) - (int32_t)(first + j);
            ivec seen = (behind >= 0) & (behind <= (ivec)load_words(queries->window + at));
            ivec bits = (ivec)load_f32(logits + j * queries->padded + at);
            store_f32(logits + j * queries->padded + at, (vec)((seen & bits) | (~seen & (ivec)splat(-INFINITY))));
        }
}

/* Turn the logits of `count` keys into weights, and say by what to multiply what was summed before. A query that has seen
 * nothing yet has -infinity for its largest logit. */
static void soften_lanes(const struct query_lanes *queries, float *logits, int64_t count) {
    int64_t padded = queries->padded;
    for (int64_t at = 0; at < padded; at += LANES) {
        vec before = load_f32(queries->largest + at), most = before, sum = splat(0.0f);
        for (int64_t j = 0; j < count; j++) {
            vec logit = load_f32(logits + j * padded + at);
            ivec more = logit > most;
            most = (vec)((more & (ivec)logit) | (~more & (ivec)most));
        }
        vec from = (vec)((ivec)most & (most != -INFINITY)), shrink = exp_lanes(before - from);
        for (int64_t j = 0; j < count; j++) {
            vec weight = exp_lanes(load_f32(logits + j * padded + at) - from);
            store_f32(logits + j * padded + at, weight);
            sum += weight;
        }
        store_f32(queries->largest + at, most);
        store_f32(queries->shrink + at, shrink);
        store_f32(queries->total + at, load_f32(queries->total + at) * shrink + sum);
    }
}
#endif

/* Bring a block of one head's keys and values, as floats, out of their pages. Before `begin`, which nobody sees, and from
 * `count` on they are zeros. */
static void NAME(gather_block)(float *keys, float *values, const extend_attention_args *a, const struct paged *row,
                               const int64_t *places, int64_t head, int64_t first, int64_t begin, int64_t count) {
    int64_t dim = a->k_cache.size[3], heads = a->k_cache.size[2], code = a->k_cache.code;
    float key_scales[BLOCK], value_scales[BLOCK];
    if (a->k_scales.data) {
        read_scales(key_scales, a->k_scales.data, row, heads, head, first, begin, count);
        read_scales(value_scales, a->v_scales.data, row, heads, head, first, begin, count);
    }
    for (int64_t j = 0; j < BLOCK; j++) {
        float *key = keys + j * dim, *value = values + j * dim;
        if (j < begin || j >= count) {
            memset(key, 0, dim * sizeof *key);
            memset(value, 0, dim * sizeof *value);
            continue;
        }
        int64_t at = places[j] + head * dim;
        float key_scale = a->k_scales.data ? key_scales[j] : 1.0f, value_scale = a->k_scales.data ? value_scales[j] : 1.0f;
        for (int64_t i = 0; i < dim; i += LANES) {
            if (code) {
                store_f32(key + i, load_codes(code, (const uint8_t *)a->k_cache.data + at + i) * key_scale);
                store_f32(value + i, load_codes(code, (const uint8_t *)a->v_cache.data + at + i) * value_scale);
            } else {
                store_f32(key + i, load((const element *)a->k_cache.data + at + i));
                store_f32(value + i, load((const element *)a->v_cache.data + at + i));
            }
        }
    }
}

/* Put queries, whose heads of one token stand side by side, into lanes. */
static void NAME(bring_lanes)(const struct query_lanes *to, const extend_attention_args *a, int64_t at, int64_t head,
                              int64_t position) {
    const element *q = (const element *)a->q.data + at;
    int64_t heads = a->q.size[1], dim = to->dim, padded = to->padded, group = heads / a->k_cache.size[2];
    for (int64_t r = 0; r < padded; r++) {
        const element *from = q + (r / group * heads + r % group) * dim;
        for (int64_t i = 0; i < dim; i++) to->q[i * padded + r] = r < to->count ? widen(from[i]) * to->scale : 0.0f;
        int64_t window = window_at(logits_of(&a->options), position + r / group);
        to->position[r] = (int32_t)(position + r / group);
        to->window[r] = window < 0 ? INT32_MAX : (int32_t)least_of(window, INT32_MAX);
        to->largest[r] = a->sinks.data ? a->sinks.data[head * group + r % group] : -INFINITY;
        to->total[r] = a->sinks.data ? 1.0f : 0.0f; /* e^(sink - sink), as if it were a key */
    }
    memset(to->sums, 0, dim * padded * sizeof *to->sums);
}

static void NAME(write_lanes)(const struct query_lanes *of, const extend_attention_args *a, int64_t at) {
    element *out = (element *)a->out.data + at;
    int64_t heads = a->q.size[1], dim = of->dim, padded = of->padded, group = heads / a->k_cache.size[2];
    for (int64_t r = 0; r < of->count; r++) {
        element *to = out + (r / group * heads + r % group) * dim;
        float total = of->total[r];
        for (int64_t i = 0; i < dim; i++)
            to[i] = narrow(total == 0.0f ? 0.0f : of->sums[i * padded + r] / total * (float)a->v_scale);
    }
}

/* Some neighbouring tokens of a row, over one key head. */
static void NAME(extend_tokens)(const extend_attention_args *a, int64_t row, int64_t begin, int64_t end, int64_t head) {
    const int32_t *cu_q = a->cu_seqlens_q.data, *cu_kv = a->cu_seqlens_kv.data;
    int64_t heads = a->q.size[1], dim = a->q.size[2], group = heads / a->k_cache.size[2];
    int64_t count = (end - begin) * group, padded = (count + LANES - 1) / LANES * LANES;
    int64_t position = (int64_t)cu_kv[row + 1] - cu_kv[row] - ((int64_t)cu_q[row + 1] - cu_q[row]) + begin;
    int64_t window = window_at(logits_of(&a->options), position);
    float *room = scratch(padded * (2 * dim + BLOCK + 5) + 2 * BLOCK * dim);
    struct query_lanes queries = {count, padded, dim, carved(&room, dim * padded), carved(&room, dim * padded),
                                  carved(&room, padded), carved(&room, padded), carved(&room, padded),
                                  (int32_t *)carved(&room, padded), (int32_t *)carved(&room, padded), (float)a->sm_scale};
    float *logits = carved(&room, BLOCK * padded), *keys = carved(&room, BLOCK * dim), *values = carved(&room, BLOCK * dim);
    struct paged entries = {a->page_table.data + row * a->page_table.size[1], a->k_cache.size[0], a->k_cache.size[1],
                            a->k_cache.size[2] * dim};
    int64_t places[BLOCK], at = ((cu_q[row] + begin) * heads + head * group) * dim;
    NAME(bring_lanes)(&queries, a, at, head, position);
    int64_t last = least_of(position + end - begin, a->page_table.size[1] * a->k_cache.size[1]);
    int64_t begins = window >= 0 && position > window ? position - window : 0;
    for (int64_t first = begins / BLOCK * BLOCK; first < last; first += BLOCK) {
        int64_t here = least_of(last - first, BLOCK), all_see = first + here - 1 <= position;
        locate(places, &entries, first, here);
        NAME(gather_block)(keys, values, a, &entries, places, head, first, begins - first, here);
        lane_products(logits, 0, BLOCK, keys, dim, 1, queries.q, dim, padded);
        change_logits(logits, here * padded, logits_of(&a->options));
        if (!all_see || window >= 0) mask_lanes(&queries, logits, first, here);
        soften_lanes(&queries, logits, here);
        lane_products(queries.sums, queries.shrink, dim, values, 1, dim, logits, here, padded);
    }
    NAME(write_lanes)(&queries, a, at);
}

#if defined(ELEMENT_BF16) && defined(WITH_PAIRS)
/* Queries as they are multiplied: in rows, or in tiles in panels; behind the last they are zeros. */
static void bring_queries(const struct pair_queries *queries, uint16_t *to, const uint16_t *q, int64_t heads) {
    int64_t count = queries->count, dim = queries->dim, group = queries->group;
    for (int64_t from = 0; from < count; from += PANEL) {
#ifdef WITH_TILES
        if (has_tiles) {
            panel_of_queries(to + from * dim, q, from, least_of(count - from, PANEL), heads, group, dim);
            continue;
        }
#endif
        for (int64_t r = from; r < least_of(from + PANEL, count); r++)
            memcpy(to + r * dim, q + (r / group * heads + r % group) * dim, dim * sizeof *to);
    }
}

static void write_results(uint16_t *out, const struct pair_queries *queries, int64_t heads, float scale) {
    int64_t dim = queries->dim, group = queries->group;
    for (int64_t from = 0; from < queries->count; from += PANEL) {
#ifdef WITH_TILES
        if (has_tiles) {
            write_turned_sums(out, queries, from, heads, scale);
            continue;
        }
#endif
        for (int64_t r = from; r < least_of(from + PANEL, queries->count); r++) {
            float whole = queries->total[r] > 0.0f ? scale / queries->total[r] : 0.0f, *sums = queries->sums + r * dim;
            uint16_t *to = out + (r / group * heads + r % group) * dim;
            for (int64_t i = 0; i < dim; i += PANEL) in_order(sums + i);
            for (int64_t i = 0; i < dim; i += LANES) store_bf16(to + i, load_f32(sums + i) * whole);
        }
    }
}

/* Bring the keys and values of one head together and let the queries attend to them. */
static void attend_block(const extend_attention_args *a, const struct pair_queries *queries, const struct pair_room *room,
                         const struct paged *entries, const int64_t *places, int64_t head, int64_t first, int64_t begin,
                         int64_t count) {
    int64_t dim = queries->dim, code = a->k_cache.code, offset = head * dim * (code ? 1 : sizeof(uint16_t));
    const char *keys = (const char *)a->k_cache.data + offset, *values = (const char *)a->v_cache.data + offset;
    if (room->key_scales) {
        read_scales(room->key_scales, a->k_scales.data, entries, a->k_cache.size[2], head, first, begin, count);
        read_scales(room->value_scales, a->v_scales.data, entries, a->k_cache.size[2], head, first, begin, count);
    }
#ifdef WITH_TILES
    if (has_tiles) {
        BY_CODE(code, gather_turned, room, keys, values, places, begin, count, dim);
        attend_turned(queries, room, first, count);
        return;
    }
#endif
    BY_CODE(code, gather_keys, room, keys, places, begin, count, dim);
    BY_CODE(code, gather_values, room, values, places, begin, count, dim);
    attend_panels(queries, room, first, count);
}

/* As `extend_tokens`, in pairs. */
static void extend_pairs(const extend_attention_args *a, int64_t row, int64_t begin, int64_t end, int64_t head) {
    const int32_t *cu_q = a->cu_seqlens_q.data, *cu_kv = a->cu_seqlens_kv.data;
    int64_t heads = a->q.size[1], dim = a->q.size[2], kv_heads = a->k_cache.size[2], group = heads / kv_heads;
    int64_t queries = (end - begin) * group, padded = (queries + PANEL - 1) / PANEL * PANEL;
    int64_t position = (int64_t)cu_kv[row + 1] - cu_kv[row] - ((int64_t)cu_q[row + 1] - cu_q[row]) + begin;
    float *at = scratch(padded * (dim / 2 + dim + 2) + pair_room_floats(dim) + 4 * LANES);
    uint16_t *q = (uint16_t *)carved(&at, padded * dim / 2);
    float *sums = carved(&at, padded * dim), *largest = carved(&at, padded), *total = carved(&at, padded);
    struct pair_room room = pair_room_at(&at, dim, a->k_scales.data != 0);
    struct pair_queries given = {q, sums, largest, total, queries, dim, position, group, logits_of(&a->options)};
    struct paged entries = {a->page_table.data + row * a->page_table.size[1], a->k_cache.size[0], a->k_cache.size[1],
                            kv_heads * dim};
    int64_t places[KEYS], offset = ((cu_q[row] + begin) * heads + head * group) * dim;
    bring_queries(&given, q, (const uint16_t *)a->q.data + offset, heads);
    memset(sums, 0, padded * dim * sizeof *sums);
    for (int64_t r = 0; r < padded; r++) {
        largest[r] = a->sinks.data ? a->sinks.data[head * group + r % group] * LOG2_OF_E : LEAST_LOGIT;
        total[r] = a->sinks.data ? 1.0f : 0.0f; /* e^(sink - sink), as if it were a key */
    }
    int64_t last = least_of(position + end - begin, a->page_table.size[1] * a->k_cache.size[1]);
    int64_t window = window_at(given.logits, position), begins = window >= 0 && position > window ? position - window : 0;
    for (int64_t first = begins / KEYS * KEYS; first < last; first += KEYS) {
        int64_t count = least_of(last - first, KEYS);
        locate(places, &entries, first, count);
        attend_block(a, &given, &room, &entries, places, head, first, begins - first, count);
    }
    write_results((uint16_t *)a->out.data + offset, &given, heads, (float)a->v_scale);
}
#endif

static int NAME(in_pairs)(const extend_attention_args *a) {
#if defined(ELEMENT_BF16) && defined(WITH_PAIRS)
    return a->q.size[2] % PANEL == 0 && a->q.size[2] <= MOST_DIM;
#else
    return (void)a, 0;
#endif
}

static int64_t NAME(tokens_together)(const extend_attention_args *a) {
    int64_t group = a->q.size[1] / a->k_cache.size[2], shared = a->q.size[0] * a->q.size[1] / PAIR_TASKS;
    if (!NAME(in_pairs)(a)) return group < QUERIES ? QUERIES / group : 1; /* whole vectors */
    return items_of((shared < PAIR_QUERIES ? PAIR_QUERIES : least_of(shared, MOST_PAIR_QUERIES)) - 1, group);
}

static void NAME(extend)(const extend_attention_args *a, int64_t row, int64_t begin, int64_t end, int64_t head) {
#if defined(ELEMENT_BF16) && defined(WITH_PAIRS)
    if (NAME(in_pairs)(a)) {
        extend_pairs(a, row, begin, end, head);
        return;
    }
#endif
    NAME(extend_tokens)(a, row, begin, end, head);
}

/* How many tokens of a row there are to do: none where what stands there cannot be. */
static int64_t NAME(tokens_of)(const extend_attention_args *a, int64_t row) {
    int64_t begin = a->cu_seqlens_q.data[row], end = a->cu_seqlens_q.data[row + 1];
    return begin >= 0 && end >= begin && end <= a->q.size[0] ? end - begin : 0;
}

static void NAME(extend_tasks)(const void *job, int64_t begin, int64_t end) {
    const extend_attention_args *a = job;
    int64_t kv_heads = a->k_cache.size[2], together = NAME(tokens_together)(a), row = 0, before = 0, here = 0;
    struct tile_shapes shapes = tiles_begun();
    set_tile_rows(TILE_ROWS, TILE_ROWS);
    for (int64_t task = begin; task < end; task++) {
        for (;; row++, before += here) { /* which row's task it is */
            here = (NAME(tokens_of)(a, row) + together - 1) / together * kv_heads;
            if (task < before + here) break;
        }
        int64_t part = here / kv_heads - 1 - (task - before) / kv_heads; /* the last see the most: they come first */
        int64_t first = part * together, last = least_of(first + together, NAME(tokens_of)(a, row));
        NAME(extend)(a, row, first, last, (task - before) % kv_heads);
    }
    tiles_ended(shapes);
}

KERNEL(extend_attention) {
    int64_t kv_heads = a->k_cache.size[2], together = NAME(tokens_together)(a), tasks = 0, work = 0;
    int64_t rows = least_of(least_of(a->cu_seqlens_q.size[0], a->cu_seqlens_kv.size[0]) - 1, a->page_table.size[0]);
    for (int64_t row = 0; row < rows; row++) {
        int64_t tokens = NAME(tokens_of)(a, row), keys = (int64_t)a->cu_seqlens_kv.data[row + 1] - a->cu_seqlens_kv.data[row];
        tasks += (tokens + together - 1) / together * kv_heads;
        work += tokens * (keys > 0 ? keys : 0) * a->q.size[1] * a->q.size[2];
    }
    if (tasks > 0) parallel(threads, NAME(extend_tasks), a, tasks, items_of(tasks * PARALLEL_WORK, work));
}
