/* Causal attention of each row's newest tokens over the row's own pages; see extend_attention.py for the formula.
 *
 * Some tokens of a row, and all heads that share a key head, are done together: a key or value is read from its page once for
 * all of them. Keys are taken KEYS at a time with a running sum and reference, as in decode_attention.c, which comes before
 * this file in the unit.
 */
#include "native.h"
#include "attention_lanes.h"

#ifndef GRAPHDECODE_EXTEND_ATTENTION
#define GRAPHDECODE_EXTEND_ATTENTION
#define LEAST_QUERIES 128 /* that share a block of keys, about */
#define MOST_QUERIES 1536 /* where that leaves EXTEND_TASKS */
#define MOST_BYTES (1 << 20) /* of them and their sums, which stay in the second cache */
#define EXTEND_TASKS 8
#define FEW_QUERIES 8 /* up to as many it is better to leave keys and values where they are */
#endif

static int64_t NAME(tokens_together)(const extend_attention_args *a) {
    int64_t group = a->q.size[1] / a->k_cache.size[2], shared = a->q.size[0] * a->q.size[1] / EXTEND_TASKS;
    int64_t bytes = width_of_head(a->q.size[2]) * (sizeof(factor) + sizeof(float));
    shared = least_of(least_of(shared, MOST_QUERIES), MOST_BYTES / bytes);
    return items_of((shared < LEAST_QUERIES ? LEAST_QUERIES : shared) - 1, group);
}

/* Some neighbouring tokens of a row, over one key head. */
static void NAME(extend)(const extend_attention_args *a, int64_t row, int64_t begin, int64_t end, int64_t head) {
    const int32_t *cu_q = a->cu_seqlens_q.data, *cu_kv = a->cu_seqlens_kv.data;
    int64_t heads = a->q.size[1], dim = a->q.size[2], kv_heads = a->k_cache.size[2], group = heads / kv_heads;
    int64_t queries = (end - begin) * group, padded = (queries + QUERY_LANES - 1) / QUERY_LANES * QUERY_LANES;
    int64_t position = (int64_t)cu_kv[row + 1] - cu_kv[row] - ((int64_t)cu_q[row + 1] - cu_q[row]) + begin;
    int64_t width = width_of_head(dim), code = a->k_cache.code, size = code ? 1 : sizeof(element);
    float *at = scratch(padded * (width / OF_WORD + width + 2) + block_room_floats(width) + 4 * LANES);
    factor *q = (factor *)carved(&at, padded * width / OF_WORD);
    float *sums = carved(&at, padded * width), *largest = carved(&at, padded), *total = carved(&at, padded);
    struct block_room room = block_room_at(&at, width, a->k_scales.data != 0);
    struct query_lanes lanes = {q, sums, largest, total, queries, dim, width, position, group, logits_of(&a->options)};
    struct paged entries = PAGES_OF(row, a->page_table, a->k_cache);
    const char *keys = (const char *)a->k_cache.data + head * dim * size;
    const char *values = VALUES(a) + head * dim * size;
    int64_t memory[2][KEYS], *offsets = memory[0], *next = memory[1], offset = (cu_q[row] + begin) * heads + head * group;
    pack_queries(&lanes, (const element *)a->q.data + offset * dim, heads, a->sinks.data ? a->sinks.data + head * group : 0);
    int64_t last = least_of(position + end - begin, a->page_table.size[1] * a->k_cache.size[1]);
    int64_t window = window_at(lanes.logits, position), begins = window >= 0 && position > window ? position - window : 0;
    int64_t first = begins / KEYS * KEYS, count = least_of(last - first, KEYS), coming;
    if (count > 0) locate(offsets, &entries, first, count);
    for (; count > 0; count = coming, first += KEYS) {
        coming = first + KEYS < last ? least_of(last - first - KEYS, KEYS) : 0;
        locate(next, &entries, first + KEYS, coming);
        struct prefetches ahead = {keys, values, next, coming, dim * size, size};
        if (room.key_scales) {
            read_scales(room.key_scales, a->k_scales.data, &entries, kv_heads, head, first, begins - first, count);
            read_scales(room.value_scales, a->v_scales.data, &entries, kv_heads, head, first, begins - first, count);
        }
        BY_CODE(code, gather, &room, keys, values, offsets, begins - first, count, dim, width);
        attend_block(&lanes, &room, first, count, &ahead);
        int64_t *done = offsets;
        offsets = next, next = done;
    }
    write_results((element *)a->out.data + offset * a->out.size[2], &lanes, heads, SKIPPED(a), (float)a->v_scale);
}

static int NAME(are_few)(const extend_attention_args *a, int64_t tokens) {
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
    if (has_tiles) return 0; /* tiles want rows of many queries */
#endif
    return tokens * (a->q.size[1] / a->k_cache.size[2]) <= FEW_QUERIES;
}

/* All tokens of a row that has few, over one key head: as a decode step takes them. */
static void NAME(extend_few)(const extend_attention_args *a, int64_t row, int64_t tokens, int64_t head) {
    int64_t offset = a->cu_seqlens_q.data[row] * a->q.size[1];
    int64_t length = (int64_t)a->cu_seqlens_kv.data[row + 1] - a->cu_seqlens_kv.data[row];
    decode_attention_args decode = {.q_len = tokens, .options = a->options, .v_scale = a->v_scale, .scales = a->scales};
    HAND_OVER(decode.out, a->out), HAND_OVER(decode.q, a->q), HAND_OVER(decode.k_cache, a->k_cache);
    HAND_OVER(decode.v_cache, a->v_cache);
    decode.q.data = (element *)decode.q.data + offset * a->q.size[2];
    decode.out.data = (element *)decode.out.data + offset * a->out.size[2];
    length = least_of(length, a->page_table.size[1] * a->k_cache.size[1]);
    struct NAME(part) part = {.a = &decode, .visible = visible_range(length, tokens, &a->options),
                              .head = head, .last = head + 1};
    part.entries = (struct paged)PAGES_OF(row, a->page_table, a->k_cache);
    part.queries = tokens * (a->q.size[1] / a->k_cache.size[2]);
    part.span = part.visible.begin / SPAN, part.first = part.visible.begin / BLOCK * BLOCK, part.end = length;
    struct sharing whole = {&decode, 1, 1, 0};
    NAME(attend_heads)(&whole, part, 0, 0);
}

/* The tokens of a row; 0 for lengths that are not valid. */
static int64_t NAME(tokens_of)(const extend_attention_args *a, int64_t row) {
    int64_t begin = a->cu_seqlens_q.data[row], end = a->cu_seqlens_q.data[row + 1];
    return begin >= 0 && end >= begin && end <= a->q.size[0] ? end - begin : 0;
}

static void NAME(extend_tasks)(const void *job, int64_t begin, int64_t end) {
    const extend_attention_args *a = job;
    int64_t kv_heads = a->k_cache.size[2], together = NAME(tokens_together)(a), row = 0, before = 0, tasks_of_row = 0;
    struct tile_shapes shapes = tiles_begun();
    set_tile_rows(TILE_ROWS, TILE_ROWS);
    for (int64_t task = begin; task < end; task++) {
        for (;; row++, before += tasks_of_row) { /* which row's task it is */
            tasks_of_row = (NAME(tokens_of)(a, row) + together - 1) / together * kv_heads;
            if (task < before + tasks_of_row) break;
        }
        int64_t part = tasks_of_row / kv_heads - 1 - (task - before) / kv_heads; /* the last see the most: first in a share */
        int64_t first = part * together, tokens = NAME(tokens_of)(a, row), head = (task - before) % kv_heads;
        if (NAME(are_few)(a, tokens)) NAME(extend_few)(a, row, tokens, head);
        else NAME(extend)(a, row, first, least_of(first + together, tokens), head);
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
