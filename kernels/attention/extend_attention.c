/* Causal attention of each row's newest tokens over the row's own pages; see extend_attention.py for the formula.
 *
 * Some tokens of a row, and all heads that share a key head, are done together: a block of keys is turned once, so that
 * a vector holds one feature of many keys, and serves them all. Keys are taken BLOCK at a time with a running maximum
 * and sum, as in decode_attention.c, which comes before this file in the unit.
 *
 * Where the processor multiplies bf16, some hundred queries share keys that become panels (attention_pairs.h), or tiles
 * (attention_tiles.h).
 */
#include "native.h"
#include "attention_tiles.h"

#ifndef GRAPHDECODE_EXTEND_ATTENTION
#define GRAPHDECODE_EXTEND_ATTENTION
#define KEY_VECTORS (BLOCK / LANES)
#define TOGETHER 4      /* queries whose sums stay in registers */
#define QUERIES 32      /* about so many share a block of keys */
#define PAIR_QUERIES 128 /* the same, in pairs */
#define MOST_PAIR_QUERIES 1536 /* where that leaves PAIR_TASKS */
#define PAIR_TASKS 8
#define OUT_VECTORS 4   /* of a query's sums that are held at once */

/* logits[query][key] of `count` queries, a constant where this is used, with keys[feature][key]. */
INLINE void block_logits(const int count, float *logits, const float *q, const float *keys, int64_t dim) {
    vec sums[TOGETHER][KEY_VECTORS];
#pragma GCC unroll 4
    for (int r = 0; r < count; r++)
#pragma GCC unroll 8
        for (int v = 0; v < KEY_VECTORS; v++) sums[r][v] = splat(0.0f);
    for (int64_t i = 0; i < dim; i++)
#pragma GCC unroll 8
        for (int v = 0; v < KEY_VECTORS; v++) {
            vec of_keys = load_f32(keys + i * BLOCK + v * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < count; r++) sums[r][v] += of_keys * q[r * dim + i];
        }
#pragma GCC unroll 4
    for (int r = 0; r < count; r++)
#pragma GCC unroll 8
        for (int v = 0; v < KEY_VECTORS; v++) store_f32(logits + r * BLOCK + v * LANES, sums[r][v]);
}

/* sums[query] += weights[query][key] * values[key] over OUT_VECTORS vectors of each. */
INLINE void block_values(const int count, const int vectors, float *sums, const float *weights, const float *values,
                         int64_t keys, int64_t dim) {
    vec held[TOGETHER][OUT_VECTORS];
#pragma GCC unroll 4
    for (int r = 0; r < count; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) held[r][v] = load_f32(sums + r * dim + v * LANES);
    for (int64_t j = 0; j < keys; j++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            vec value = load_f32(values + j * dim + v * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < count; r++) held[r][v] += value * weights[r * BLOCK + j];
        }
#pragma GCC unroll 4
    for (int r = 0; r < count; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store_f32(sums + r * dim + v * LANES, held[r][v]);
}

static void all_logits(float *logits, const float *q, const float *keys, int64_t queries, int64_t dim) {
    int64_t r = 0;
    for (; r + TOGETHER <= queries; r += TOGETHER) block_logits(TOGETHER, logits + r * BLOCK, q + r * dim, keys, dim);
    for (; r < queries; r++) block_logits(1, logits + r * BLOCK, q + r * dim, keys, dim);
}

static void all_values(float *sums, const float *weights, const float *values, int64_t queries, int64_t keys,
                       int64_t dim) {
    for (int64_t r = 0; r < queries;) {
        int together = r + TOGETHER <= queries ? TOGETHER : 1;
        for (int64_t i = 0; i < dim;) {
            int vectors = i + OUT_VECTORS * LANES <= dim ? OUT_VECTORS : 1;
            float *at = sums + r * dim + i;
            const float *of_keys = values + i, *w = weights + r * BLOCK;
            if (together > 1 && vectors > 1) block_values(TOGETHER, OUT_VECTORS, at, w, of_keys, keys, dim);
            else if (together > 1) block_values(TOGETHER, 1, at, w, of_keys, keys, dim);
            else if (vectors > 1) block_values(1, OUT_VECTORS, at, w, of_keys, keys, dim);
            else block_values(1, 1, at, w, of_keys, keys, dim);
            i += vectors * LANES;
        }
        r += together;
    }
}
#endif

/* Bring a block of one head's keys and values out of their pages: keys as [feature][key], values as [key][feature].
 * Before `begin`, which nobody sees, and from `count` on they are zeros. */
static void NAME(gather_block)(float *keys, float *values, const extend_attention_args *a, const struct paged *row,
                               const int64_t *places, int64_t head, int64_t first, int64_t begin, int64_t count) {
    int64_t dim = a->k_cache.size[3], heads = a->k_cache.size[2], code = a->k_cache.code;
    float key_scales[BLOCK], value_scales[BLOCK];
    if (a->k_scales.data) {
        read_scales(key_scales, a->k_scales.data, row, heads, head, first, begin, count);
        read_scales(value_scales, a->v_scales.data, row, heads, head, first, begin, count);
    }
    for (int64_t j = 0; j < BLOCK; j++) {
        if (j < begin || j >= count) {
            for (int64_t i = 0; i < dim; i++) keys[i * BLOCK + j] = values[j * dim + i] = 0.0f;
            continue;
        }
        int64_t at = places[j] + head * dim;
        if (code) {
            const uint8_t *key = (const uint8_t *)a->k_cache.data + at, *value = (const uint8_t *)a->v_cache.data + at;
            float key_scale = a->k_scales.data ? key_scales[j] : 1.0f, value_scale = a->k_scales.data ? value_scales[j] : 1.0f;
            for (int64_t i = 0; i < dim; i += LANES) {
                vec wide = load_codes(code, key + i) * key_scale;
                for (int lane = 0; lane < LANES; lane++) keys[(i + lane) * BLOCK + j] = wide[lane];
                store_f32(values + j * dim + i, load_codes(code, value + i) * value_scale);
            }
            continue;
        }
        const element *key = (const element *)a->k_cache.data + at, *value = (const element *)a->v_cache.data + at;
        for (int64_t i = 0; i < dim; i++) keys[i * BLOCK + j] = widen(key[i]);
        for (int64_t i = 0; i < dim; i += LANES) store_f32(values + j * dim + i, load(value + i));
    }
}

/* Some neighbouring tokens of a row, over one key head. */
static void NAME(extend_tokens)(const extend_attention_args *a, int64_t row, int64_t begin, int64_t end, int64_t head) {
    const int32_t *cu_q = a->cu_seqlens_q.data, *cu_kv = a->cu_seqlens_kv.data;
    int64_t heads = a->q.size[1], dim = a->q.size[2], group = heads / a->k_cache.size[2], window = a->window_left;
    int64_t queries = (end - begin) * group, length = (int64_t)cu_kv[row + 1] - cu_kv[row];
    int64_t position = length - ((int64_t)cu_q[row + 1] - cu_q[row]) + begin;
    float *room = scratch(queries * (2 * dim + BLOCK + 2) + 2 * BLOCK * dim + 4 * LANES);
    float *q = carved(&room, queries * dim), *sums = carved(&room, queries * dim);
    float *logits = carved(&room, queries * BLOCK), *keys = carved(&room, BLOCK * dim);
    float *values = carved(&room, BLOCK * dim), *largest = carved(&room, queries), *total = carved(&room, queries);
    struct paged entries = {a->page_table.data + row * a->page_table.size[1], a->k_cache.size[0], a->k_cache.size[1],
                            a->k_cache.size[2] * dim};
    int64_t places[BLOCK], at = ((cu_q[row] + begin) * heads + head * group) * dim;
    element *out = (element *)a->out.data + at;
    const element *given = (const element *)a->q.data + at;
    for (int64_t r = 0; r < queries; r++) {
        for (int64_t i = 0; i < dim; i++)
            q[r * dim + i] = widen(given[(r / group * heads + r % group) * dim + i]) * (float)a->sm_scale;
        largest[r] = a->sinks.data ? a->sinks.data[head * group + r % group] : -INFINITY;
        total[r] = a->sinks.data ? 1.0f : 0.0f; /* e^(sink - sink), as if it were a key */
    }
    memset(sums, 0, queries * dim * sizeof(float));
    int64_t last = least_of(position + end - begin, a->page_table.size[1] * a->k_cache.size[1]);
    int64_t begins = window >= 0 && position > window ? position - window : 0;
    for (int64_t first = begins / BLOCK * BLOCK; first < last; first += BLOCK) {
        int64_t count = last - first < BLOCK ? last - first : BLOCK;
        locate(places, &entries, first, count);
        NAME(gather_block)(keys, values, a, &entries, places, head, first, begins - first, count);
        all_logits(logits, q, keys, queries, dim);
        for (int64_t r = 0; r < queries; r++) {
            if (a->soft_cap > 0.0) cap_logits(logits + r * BLOCK, (float)a->soft_cap);
            if (mask_block(logits + r * BLOCK, first, position + r / group, window))
                soften(logits + r * BLOCK, BLOCK, sums + r * dim, largest + r, total + r, dim);
            else
                memset(logits + r * BLOCK, 0, BLOCK * sizeof(float));
        }
        all_values(sums, logits, values, queries, count, dim);
    }
    for (int64_t r = 0; r < queries; r++)
        for (int64_t i = 0; i < dim; i++) {
            float value = total[r] > 0.0f ? sums[r * dim + i] / total[r] * (float)a->v_scale : 0.0f;
            out[(r / group * heads + r % group) * dim + i] = narrow(value);
        }
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
        gather_turned(code, room, keys, values, places, begin, count, dim);
        attend_turned(queries, room, first, count);
        return;
    }
#endif
    gather_keys(code, room, keys, places, begin, count, dim);
    gather_values(code, room, values, places, begin, count, dim);
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
    struct pair_queries given = {q, sums, largest, total, queries, dim, position, group, a->window_left,
                                 (float)a->sm_scale, (float)a->soft_cap};
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
    int64_t begins = a->window_left >= 0 && position > a->window_left ? position - a->window_left : 0;
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
    int64_t queries = QUERIES, shared = a->q.size[0] * a->q.size[1] / PAIR_TASKS;
    if (NAME(in_pairs)(a)) queries = shared < PAIR_QUERIES ? PAIR_QUERIES : least_of(shared, MOST_PAIR_QUERIES);
    return items_of(queries - 1, a->q.size[1] / a->k_cache.size[2]);
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
