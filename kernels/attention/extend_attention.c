/* Causal attention of each row's newest tokens over the row's own pages; see extend_attention.py for the formula.
 *
 * Some tokens of a row, and all heads that share a key head, are done together: a block of keys is turned once, so that
 * a vector holds one feature of many keys, and serves them all. Keys are taken BLOCK at a time with a running maximum
 * and sum, as in decode_attention.c, which comes before this file in the unit.
 */
#include "native.h"

#ifndef GRAPHDECODE_EXTEND_ATTENTION
#define GRAPHDECODE_EXTEND_ATTENTION
#define KEY_VECTORS (BLOCK / LANES)
#define TOGETHER 4      /* queries whose sums stay in registers */
#define QUERIES 32      /* about so many share a block of keys */
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

/* Forbid what a query does not see of a block that begins at key `first`; return whether it sees anything. */
static int mask_block(float *logits, int64_t first, int64_t position, int64_t window) {
    int64_t begin = window >= 0 && position - window > first ? position - window - first : 0;
    int64_t end = position - first + 1 < BLOCK ? position - first + 1 : BLOCK;
    for (int64_t j = 0; j < begin && j < BLOCK; j++) logits[j] = -INFINITY;
    for (int64_t j = end > 0 ? end : 0; j < BLOCK; j++) logits[j] = -INFINITY;
    return begin < end;
}
#endif

/* Bring a block of one head's keys and values out of their pages: keys as [feature][key], values as [key][feature].
 * Before `begin`, which nobody sees, and from `count` on they are zeros. */
static void NAME(gather_block)(float *keys, float *values, const arg *args, int64_t row, int64_t head, int64_t first,
                               int64_t begin, int64_t count) {
    const int32_t *row_pages = (const int32_t *)args[4].p + row * args[13].i;
    int64_t kv_heads = args[8].i, dim = args[10].i, page_size = args[11].i, pages = args[12].i;
    for (int64_t j = 0; j < BLOCK; j++) {
        if (j < begin || j >= count) {
            for (int64_t i = 0; i < dim; i++) keys[i * BLOCK + j] = values[j * dim + i] = 0.0f;
            continue;
        }
        int64_t page = row_pages[(first + j) / page_size];
        page = page < 0 || page >= pages ? pages - 1 : page; /* the trash page: never other memory */
        int64_t at = ((page * page_size + (first + j) % page_size) * kv_heads + head) * dim;
        const element *key = (const element *)args[2].p + at, *value = (const element *)args[3].p + at;
        for (int64_t i = 0; i < dim; i++) keys[i * BLOCK + j] = widen(key[i]);
        for (int64_t i = 0; i < dim; i += LANES) store_f32(values + j * dim + i, load(value + i));
    }
}

/* Some neighbouring tokens of a row, over one key head. */
static void NAME(extend_tokens)(const arg *args, int64_t row, int64_t begin, int64_t end, int64_t head) {
    const int32_t *cu_q = args[5].p, *cu_kv = args[6].p;
    int64_t group = args[9].i, dim = args[10].i, heads = args[8].i * group, window = args[14].i;
    int64_t queries = (end - begin) * group, most = args[13].i * args[11].i;
    int64_t length = cu_kv[row + 1] - cu_kv[row], position = length - (cu_q[row + 1] - cu_q[row]) + begin;
    float q[queries * dim], sums[queries * dim], logits[queries * BLOCK], largest[queries], total[queries];
    float keys[BLOCK * dim], values[BLOCK * dim];
    element *out = (element *)args[0].p + ((cu_q[row] + begin) * heads + head * group) * dim;
    const element *given = (const element *)args[1].p + ((cu_q[row] + begin) * heads + head * group) * dim;
    for (int64_t r = 0; r < queries; r++) {
        for (int64_t i = 0; i < dim; i++)
            q[r * dim + i] = widen(given[(r / group * heads + r % group) * dim + i]) * (float)args[15].d;
        largest[r] = -INFINITY, total[r] = 0.0f;
    }
    memset(sums, 0, sizeof sums);
    int64_t last = position + end - begin < most ? position + end - begin : most;
    int64_t begins = window >= 0 && position > window ? position - window : 0;
    for (int64_t first = begins / BLOCK * BLOCK; first < last; first += BLOCK) {
        int64_t count = last - first < BLOCK ? last - first : BLOCK;
        NAME(gather_block)(keys, values, args, row, head, first, begins - first, count);
        all_logits(logits, q, keys, queries, dim);
        for (int64_t r = 0; r < queries; r++) {
            if (mask_block(logits + r * BLOCK, first, position + r / group, window))
                soften(logits + r * BLOCK, BLOCK, sums + r * dim, largest + r, total + r, dim);
            else
                memset(logits + r * BLOCK, 0, BLOCK * sizeof(float));
        }
        all_values(sums, logits, values, queries, count, dim);
    }
    for (int64_t r = 0; r < queries; r++)
        for (int64_t i = 0; i < dim; i++) {
            float value = total[r] > 0.0f ? sums[r * dim + i] / total[r] : 0.0f;
            out[(r / group * heads + r % group) * dim + i] = narrow(value);
        }
}

static int64_t NAME(tokens_together)(const arg *args) { return items_of(QUERIES - 1, args[9].i); }

static void NAME(extend_tasks)(const void *job, int64_t begin, int64_t end) {
    const arg *args = job;
    const int32_t *cu_q = args[5].p;
    int64_t kv_heads = args[8].i, together = NAME(tokens_together)(args);
    int64_t row = 0, before = 0, here = 0;
    for (int64_t task = begin; task < end; task++) {
        for (;; row++, before += here) { /* which row's task it is */
            here = (cu_q[row + 1] - cu_q[row] + together - 1) / together * kv_heads;
            if (task < before + here) break;
        }
        int64_t first = (task - before) / kv_heads * together, tokens = cu_q[row + 1] - cu_q[row];
        int64_t last = first + together < tokens ? first + together : tokens;
        NAME(extend_tokens)(args, row, first, last, (task - before) % kv_heads);
    }
}

/* out, q, k_cache, v_cache, page_table, cu_seqlens_q, cu_seqlens_kv, rows, key heads, group, head_dim, page size, pages,
 * pages of a row, window or -1, scale */
void NAME(extend_attention)(const arg *args) {
    const int32_t *cu_q = args[5].p, *cu_kv = args[6].p;
    int64_t kv_heads = args[8].i, together = NAME(tokens_together)(args), tasks = 0, work = 0;
    for (int64_t row = 0; row < args[7].i; row++) {
        int64_t tokens = cu_q[row + 1] - cu_q[row];
        tasks += (tokens + together - 1) / together * kv_heads;
        work += tokens * (cu_kv[row + 1] - cu_kv[row]) * kv_heads * args[9].i * args[10].i;
    }
    if (tasks > 0) parallel(NAME(extend_tasks), args, tasks, items_of(tasks * PARALLEL_WORK, work));
}
