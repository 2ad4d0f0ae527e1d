/* Causal attention of each row's newest tokens over the row's own pages; see extend_attention.py for the formula.
 *
 * Some tokens of a row, and all heads that share a key head, are done together: a block of keys is turned once, so that
 * a vector holds one feature of many keys, and serves them all. Keys are taken BLOCK at a time with a running maximum
 * and sum, as in decode_attention.c, which comes before this file in the unit.
 *
 * Where the processor multiplies bf16 (native_products.h), queries, keys, weights and values of bf16 stay so, and only
 * sums, maxima and the exponential are floats: some hundred queries share KEYS keys, which become panels.
 */
#include "native.h"
#include "native_products.h"

#ifndef GRAPHDECODE_EXTEND_ATTENTION
#define GRAPHDECODE_EXTEND_ATTENTION
#define KEY_VECTORS (BLOCK / LANES)
#define TOGETHER 4      /* queries whose sums stay in registers */
#define QUERIES 32      /* about so many share a block of keys */
#define PAIR_QUERIES 128 /* the same, in pairs */
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
static void NAME(gather_block)(float *keys, float *values, const extend_attention_args *a, int64_t row, int64_t head,
                               int64_t first, int64_t begin, int64_t count) {
    const int32_t *row_pages = a->page_table.data + row * a->page_table.size[1];
    int64_t pages = a->k_cache.size[0], page_size = a->k_cache.size[1];
    int64_t kv_heads = a->k_cache.size[2], dim = a->k_cache.size[3];
    for (int64_t j = 0; j < BLOCK; j++) {
        if (j < begin || j >= count) {
            for (int64_t i = 0; i < dim; i++) keys[i * BLOCK + j] = values[j * dim + i] = 0.0f;
            continue;
        }
        int64_t page = row_pages[(first + j) / page_size];
        page = page < 0 || page >= pages ? pages - 1 : page; /* the trash page: never other memory */
        int64_t at = ((page * page_size + (first + j) % page_size) * kv_heads + head) * dim;
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
    int64_t at = ((cu_q[row] + begin) * heads + head * group) * dim;
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
        NAME(gather_block)(keys, values, a, row, head, first, begins - first, count);
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
            float value = total[r] > 0.0f ? sums[r * dim + i] / total[r] : 0.0f;
            out[(r / group * heads + r % group) * dim + i] = narrow(value);
        }
}

#if defined(ELEMENT_BF16) && defined(WITH_PAIRS)
#define KEYS 128 /* that are in panels at once */
#define GROUPS (KEYS / PANEL)
#define LOG2_OF_E 1.44269504f

/* 2^v for v <= 0 to about 4e-6 of it, which bf16 does not see; 0 below the smallest normal float. */
static inline vec exp2_lanes(vec v) {
    ivec tiny = v < -126.0f;
    vec shifted = v + 12582912.0f; /* 1.5 * 2^23: what is left of the fraction is rounded off */
    vec n = shifted - 12582912.0f, rest = v - n;
    vec sum = splat(0.0096181291f);
    sum = sum * rest + 0.0555041087f;
    sum = sum * rest + 0.2402265070f;
    sum = sum * rest + 0.6931471806f;
    sum = sum * rest + 1.0f;
    return (vec)(~tiny & ((ivec)sum + (((ivec)shifted) << 23)));
}

/* to[j][i] = from[i][j] of 16 x 16 words. */
static inline void transpose_words(uint32_t *to, int64_t stride, const uint16_t *const *from, int64_t offset) {
    __m512i r[16], t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from[i] + offset);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) { /* each holds a quarter of four columns */
        __m512i even_low = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), odd_low = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
        __m512i even = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88), odd = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
        _mm512_storeu_si512(to + c * stride, _mm512_shuffle_i32x4(even_low, even, 0x88));
        _mm512_storeu_si512(to + (4 + c) * stride, _mm512_shuffle_i32x4(odd_low, odd, 0x88));
        _mm512_storeu_si512(to + (8 + c) * stride, _mm512_shuffle_i32x4(even_low, even, 0xdd));
        _mm512_storeu_si512(to + (12 + c) * stride, _mm512_shuffle_i32x4(odd_low, odd, 0xdd));
    }
}

/* Bring KEYS keys of one head and their values out of their pages, into panels: keys [feature / 2][key][2], values
 * [key / 2][feature][2]. Before `begin`, which nobody sees, and from `count` on they are `zeros`. */
static void gather_panels(uint16_t *keys, uint16_t *values, const uint16_t *zeros, const extend_attention_args *a,
                          int64_t row, int64_t head, int64_t first, int64_t begin, int64_t count) {
    const int32_t *row_pages = a->page_table.data + row * a->page_table.size[1];
    int64_t pages = a->k_cache.size[0], page_size = a->k_cache.size[1];
    int64_t kv_heads = a->k_cache.size[2], dim = a->k_cache.size[3];
    const uint16_t *key[KEYS], *value[KEYS];
    for (int64_t j = 0; j < KEYS; j++) {
        key[j] = value[j] = zeros;
        if (j < begin || j >= count) continue;
        int64_t page = row_pages[(first + j) / page_size];
        page = page < 0 || page >= pages ? pages - 1 : page; /* the trash page: never other memory */
        int64_t at = ((page * page_size + (first + j) % page_size) * kv_heads + head) * dim;
        key[j] = (const uint16_t *)a->k_cache.data + at, value[j] = (const uint16_t *)a->v_cache.data + at;
    }
    for (int64_t j = 0; j < KEYS; j += LANES)
        for (int64_t i = 0; i < dim; i += PANEL) {
            uint32_t *to = (uint32_t *)(keys + j / PANEL * PANEL * dim) + i / 2 * PANEL + j % PANEL;
            transpose_words(to, PANEL, key + j, i);
        }
    for (int64_t j = 0; j < KEYS; j += 2)
        for (int64_t i = 0; i < dim; i += LANES) {
            hvec low, high;
            memcpy(&low, value[j] + i, sizeof low);
            memcpy(&high, value[j + 1] + i, sizeof high);
            uvec both = __builtin_convertvector(low, uvec) | __builtin_convertvector(high, uvec) << 16;
            memcpy((uint32_t *)(values + i / PANEL * PANEL * KEYS) + j / 2 * PANEL + i % PANEL, &both, sizeof both);
        }
}

/* Turn one query's logits, PANEL of each group, into weights; return by what to multiply what was summed before. It sees
 * the keys from `begin` to `end`, of which there is at least one. */
static float weights_of(uint16_t *weights, float *logits, int64_t begin, int64_t end, float scale, float cap,
                        float *largest, float *total) {
    const ivec lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vec v[KEYS / LANES], most = splat(-INFINITY);
    for (int n = 0; n < KEYS / LANES; n++) {
        float *at = logits + n / VECTORS * TOGETHER_IN_PAIRS * PANEL + n % VECTORS * LANES;
        if (cap > 0.0f) {
            vec twice = load_f32(at) * (2.0f * scale / cap);
            v[n] = (cap - 2.0f * cap / (exp_lanes(twice) + 1.0f)) * LOG2_OF_E;
        } else {
            v[n] = load_f32(at) * (scale * LOG2_OF_E);
        }
    }
    if (begin > 0 || end < KEYS)
        for (int n = 0; n < KEYS / LANES; n++) {
            ivec key = lanes + n * LANES, seen = (key >= (int32_t)begin) & (key < (int32_t)end);
            v[n] = (vec)((seen & (ivec)v[n]) | (~seen & (ivec)splat(-INFINITY)));
        }
    for (int n = 0; n < KEYS / LANES; n++) {
        ivec more = v[n] > most;
        most = (vec)((more & (ivec)v[n]) | (~more & (ivec)most));
    }
    float top = _mm512_reduce_max_ps((__m512)most), shrink = 1.0f;
    if (top > *largest) {
        shrink = exp2f(*largest - top);
        *largest = top;
    }
    vec sum = splat(0.0f);
    for (int n = 0; n < KEYS / LANES; n++) {
        vec weight = exp2_lanes(v[n] - *largest);
        sum += weight;
        store_bf16(weights + n * LANES, weight);
    }
    *total = *total * shrink + sum_lanes(sum);
    return shrink;
}

/* As `extend_tokens`, in pairs. */
static void extend_pairs(const extend_attention_args *a, int64_t row, int64_t begin, int64_t end, int64_t head) {
    const int32_t *cu_q = a->cu_seqlens_q.data, *cu_kv = a->cu_seqlens_kv.data;
    int64_t heads = a->q.size[1], dim = a->q.size[2], group = heads / a->k_cache.size[2], window = a->window_left;
    int64_t queries = (end - begin) * group, length = (int64_t)cu_kv[row + 1] - cu_kv[row];
    int64_t padded = (queries + TOGETHER_IN_PAIRS - 1) / TOGETHER_IN_PAIRS * TOGETHER_IN_PAIRS;
    int64_t position = length - ((int64_t)cu_q[row + 1] - cu_q[row]) + begin;
    int64_t halves = padded * dim + 2 * KEYS * dim + TOGETHER_IN_PAIRS * KEYS + dim; /* of a float: values of bf16 */
    float *room = scratch(halves / 2 + padded * (dim + 2) + TOGETHER_IN_PAIRS * (KEYS + PANEL) + 9 * LANES);
    float *sums = carved(&room, padded * dim), *largest = carved(&room, padded), *total = carved(&room, padded);
    float *logits = carved(&room, TOGETHER_IN_PAIRS * KEYS), *added = carved(&room, TOGETHER_IN_PAIRS * PANEL);
    uint16_t *q = (uint16_t *)carved(&room, padded * dim / 2), *zeros = (uint16_t *)carved(&room, dim / 2);
    uint16_t *keys = (uint16_t *)carved(&room, KEYS * dim / 2), *values = (uint16_t *)carved(&room, KEYS * dim / 2);
    uint16_t *weights = (uint16_t *)carved(&room, TOGETHER_IN_PAIRS * KEYS / 2);
    int64_t at = ((cu_q[row] + begin) * heads + head * group) * dim;
    uint16_t *out = (uint16_t *)a->out.data + at;
    const uint16_t *given = (const uint16_t *)a->q.data + at;
    memset(sums, 0, padded * dim * sizeof *sums);
    memset(zeros, 0, dim * sizeof *zeros);
    memset(q + queries * dim, 0, (padded - queries) * dim * sizeof *q);
    for (int64_t r = 0; r < queries; r++) {
        memcpy(q + r * dim, given + (r / group * heads + r % group) * dim, dim * sizeof *q);
        largest[r] = a->sinks.data ? a->sinks.data[head * group + r % group] * LOG2_OF_E : -INFINITY;
        total[r] = a->sinks.data ? 1.0f : 0.0f; /* e^(sink - sink), as if it were a key */
    }
    int64_t last = least_of(position + end - begin, a->page_table.size[1] * a->k_cache.size[1]);
    int64_t begins = window >= 0 && position > window ? position - window : 0;
    for (int64_t first = begins / KEYS * KEYS; first < last; first += KEYS) {
        int64_t count = least_of(last - first, KEYS);
        gather_panels(keys, values, zeros, a, row, head, first, begins - first, count);
        for (int64_t from = 0; from < queries; from += TOGETHER_IN_PAIRS) {
            int64_t to = least_of(from + TOGETHER_IN_PAIRS, queries);
            if (position + (to - 1) / group < first) continue; /* all of the keys come later */
            float shrinks[TOGETHER_IN_PAIRS];
            for (int64_t n = 0; n < GROUPS; n++)
                pair_products(logits + n * TOGETHER_IN_PAIRS * PANEL, q + from * dim, dim, keys + n * PANEL * dim, dim);
            memset(weights, 0, TOGETHER_IN_PAIRS * KEYS * sizeof *weights);
            for (int64_t r = from; r < to; r++) {
                int64_t own = position + r / group - first, seen = least_of(own + 1, count);
                int64_t unseen = window >= 0 && own > window ? own - window : 0;
                shrinks[r - from] = unseen >= seen ? 1.0f
                    : weights_of(weights + (r - from) * KEYS, logits + (r - from) * PANEL, unseen, seen,
                                 (float)a->sm_scale, (float)a->soft_cap, largest + r, total + r);
            }
            for (int64_t i = 0; i < dim; i += PANEL) {
                pair_products(added, weights, KEYS, values + i * KEYS, KEYS);
                for (int64_t r = from; r < to; r++)
                    for (int64_t j = 0; j < PANEL; j += LANES) {
                        float *sum = sums + r * dim + i + j;
                        store_f32(sum, load_f32(sum) * shrinks[r - from] + load_f32(added + (r - from) * PANEL + j));
                    }
            }
        }
    }
    for (int64_t r = 0; r < queries; r++) {
        float whole = total[r] > 0.0f ? 1.0f / total[r] : 0.0f;
        uint16_t *to = out + (r / group * heads + r % group) * dim;
        for (int64_t i = 0; i < dim; i += LANES) store_bf16(to + i, load_f32(sums + r * dim + i) * whole);
    }
}
#endif

static int NAME(in_pairs)(const extend_attention_args *a) {
#if defined(ELEMENT_BF16) && defined(WITH_PAIRS)
    return a->q.size[2] % PANEL == 0;
#else
    return (void)a, 0;
#endif
}

static int64_t NAME(tokens_together)(const extend_attention_args *a) {
    return items_of((NAME(in_pairs)(a) ? PAIR_QUERIES : QUERIES) - 1, a->q.size[1] / a->k_cache.size[2]);
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
        int64_t first = (task - before) / kv_heads * together, last = least_of(first + together, NAME(tokens_of)(a, row));
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
