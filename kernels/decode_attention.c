/* Decode attention of one query a row over the row's own pages; see decode_attention.py for the formula.
 *
 * One task is one row's group of query heads that share a key head. Keys are taken BLOCK at a time, with a running
 * maximum and sum (Milakov and Gimelshein, 2018), so each key and value is read once.
 */
#include "native.h"

#ifndef GRAPHDECODE_DECODE_ATTENTION
#define GRAPHDECODE_DECODE_ATTENTION
#define BLOCK 64 /* keys */
#endif

/* The logits of `count` keys for one query, -inf behind them. */
static void NAME(logits_of)(float *logits, const float *q, const element *const *keys, int64_t count, int64_t dim) {
    for (int64_t j = 0; j < count; j++) {
        vec sums = splat(0.0f);
        for (int64_t i = 0; i < dim; i += LANES) sums += load_f32(q + i) * load(keys[j] + i);
        logits[j] = sum_lanes(sums);
    }
    for (int64_t j = count; j < BLOCK; j++) logits[j] = -INFINITY;
}

static void NAME(attend_group)(element *out, const element *q, const element *k_cache, const element *v_cache,
                               const int32_t *row_pages, int64_t begin, int64_t end, int64_t group, int64_t dim,
                               int64_t page_size, int64_t pages, int64_t token_stride, float scale) {
    float scaled[group * dim], sums[group * dim], largest[group], total[group], logits[BLOCK];
    const element *keys[BLOCK], *values[BLOCK];
    for (int64_t i = 0; i < group * dim; i++) scaled[i] = widen(q[i]) * scale, sums[i] = 0.0f;
    for (int64_t g = 0; g < group; g++) largest[g] = -INFINITY, total[g] = 0.0f;
    for (int64_t first = begin; first < end; first += BLOCK) {
        int64_t count = end - first < BLOCK ? end - first : BLOCK;
        for (int64_t j = 0; j < count; j++) {
            int64_t page = row_pages[(first + j) / page_size];
            page = page < 0 || page >= pages ? pages - 1 : page; /* the trash page: never other memory */
            int64_t place = (page * page_size + (first + j) % page_size) * token_stride;
            keys[j] = k_cache + place;
            values[j] = v_cache + place;
        }
        for (int64_t g = 0; g < group; g++) {
            NAME(logits_of)(logits, scaled + g * dim, keys, count, dim);
            vec most = load_f32(logits);
            for (int64_t j = LANES; j < BLOCK; j += LANES) {
                vec v = load_f32(logits + j);
                ivec more = v > most;
                most = (vec)((more & (ivec)v) | (~more & (ivec)most));
            }
            float top = max_lanes(most);
            if (top > largest[g]) {
                float shrink = expf(largest[g] - top);
                for (int64_t i = 0; i < dim; i++) sums[g * dim + i] *= shrink;
                total[g] *= shrink;
                largest[g] = top;
            }
            vec weights = splat(0.0f);
            for (int64_t j = 0; j < BLOCK; j += LANES) {
                vec v = exp_lanes(load_f32(logits + j) - largest[g]);
                store_f32(logits + j, v);
                weights += v;
            }
            total[g] += sum_lanes(weights);
            for (int64_t i = 0; i < dim; i += LANES) {
                vec sum = load_f32(sums + g * dim + i);
                for (int64_t j = 0; j < count; j++) sum += load(values[j] + i) * logits[j];
                store_f32(sums + g * dim + i, sum);
            }
        }
    }
    for (int64_t g = 0; g < group; g++)
        for (int64_t i = 0; i < dim; i++) out[g * dim + i] = narrow(sums[g * dim + i] / total[g]);
}

static void NAME(attend_groups)(const void *job, int64_t begin, int64_t end) {
    const arg *args = job;
    element *out = args[0].p;
    const element *q = args[1].p, *k_cache = args[2].p, *v_cache = args[3].p;
    const int32_t *page_table = args[4].p, *kv_lens = args[5].p;
    int64_t kv_heads = args[7].i, group = args[8].i, dim = args[9].i, page_size = args[10].i;
    int64_t pages = args[11].i, row_pages = args[12].i, window = args[13].i;
    float scale = (float)args[14].d;
    for (int64_t task = begin; task < end; task++) {
        int64_t row = task / kv_heads, head = task % kv_heads;
        int64_t length = kv_lens[row] < row_pages * page_size ? kv_lens[row] : row_pages * page_size;
        int64_t at = (row * kv_heads + head) * group * dim;
        if (length <= 0) {
            memset(out + at, 0, group * dim * sizeof(element));
            continue;
        }
        int64_t first = window >= 0 && window < length - 1 ? length - 1 - window : 0;
        NAME(attend_group)
        (out + at, q + at, k_cache + head * dim, v_cache + head * dim, page_table + row * row_pages, first, length, group,
         dim, page_size, pages, kv_heads * dim, scale);
    }
}

/* out, q, k_cache, v_cache, page_table, kv_lens, rows, key heads, group, head_dim, page size, pages, pages of a row,
 * window or -1, scale */
void NAME(decode_attention)(const arg *args) {
    const int32_t *kv_lens = args[5].p;
    int64_t rows = args[6].i, heads = args[7].i * args[8].i, keys = 0;
    for (int64_t row = 0; row < rows; row++) keys += kv_lens[row] > 0 ? kv_lens[row] : 0;
    int64_t tasks = rows * args[7].i;
    parallel(NAME(attend_groups), args, tasks, items_of(tasks * PARALLEL_WORK, keys * heads * args[9].i));
}
