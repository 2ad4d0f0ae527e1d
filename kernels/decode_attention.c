/* Decode attention of one query a row over the row's own pages; see decode_attention.py for the formula.
 *
 * One task is one row's group of query heads that share a key head. Keys are taken BLOCK at a time, with a running
 * maximum and sum (Milakov and Gimelshein, 2018), so each key and value is read once.
 */
#include "native.h"

#ifndef GRAPHDECODE_DECODE_ATTENTION
#define GRAPHDECODE_DECODE_ATTENTION
#define BLOCK 32 /* keys; both they and their values as floats stay in the first cache */

static inline float dot(const float *a, const float *b, int64_t dim) {
    vec even = splat(0.0f), odd = splat(0.0f);
    int64_t i = 0;
    for (; i + 2 * LANES <= dim; i += 2 * LANES) {
        even += load_f32(a + i) * load_f32(b + i);
        odd += load_f32(a + i + LANES) * load_f32(b + i + LANES);
    }
    if (i < dim) even += load_f32(a + i) * load_f32(b + i);
    return sum_lanes(even + odd);
}

/* sums += weights * values over `vectors` vectors of each value, a constant where this is used. */
INLINE void add_weighted(const int vectors, float *sums, const float *const *values, int64_t offset,
                         const float *weights, int64_t count) {
    vec held[8];
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++) held[i] = load_f32(sums + i * LANES);
    for (int64_t j = 0; j < count; j++) {
        const float *value = values[j] + offset;
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++) held[i] += load_f32(value + i * LANES) * weights[j];
    }
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++) store_f32(sums + i * LANES, held[i]);
}

static void weigh(float *sums, const float *const *values, const float *weights, int64_t count, int64_t dim) {
    int64_t i = 0;
    for (; i + 8 * LANES <= dim; i += 8 * LANES) add_weighted(8, sums + i, values, i, weights, count);
    for (; i + 4 * LANES <= dim; i += 4 * LANES) add_weighted(4, sums + i, values, i, weights, count);
    for (; i < dim; i += LANES) add_weighted(1, sums + i, values, i, weights, count);
}

/* Turn the logits of one block into weights; shrink what was summed before if the largest logit grew. */
static void soften(float *logits, int64_t count, float *sums, float *largest, float *total, int64_t dim) {
    for (int64_t j = count; j < BLOCK; j++) logits[j] = -INFINITY;
    float top = *largest;
    for (int64_t j = 0; j < BLOCK; j++) top = logits[j] > top ? logits[j] : top;
    if (top > *largest) {
        float shrink = expf(*largest - top);
        for (int64_t i = 0; i < dim; i++) sums[i] *= shrink;
        *total *= shrink;
        *largest = top;
    }
    vec weights = splat(0.0f);
    for (int64_t j = 0; j < BLOCK; j += LANES) {
        vec v = exp_lanes(load_f32(logits + j) - top);
        store_f32(logits + j, v);
        weights += v;
    }
    *total += sum_lanes(weights);
}
#endif

/* Say where a block's entries stand as floats: in the cache, or widened in `memory`. */
static void NAME(locate)(const float **found, float *memory, const element *cache, const int64_t *places, int64_t count,
                         int64_t dim) {
    for (int64_t j = 0; j < count; j++) {
        const element *at = cache + places[j];
#ifdef ELEMENT_BF16
        found[j] = memory + j * dim;
        for (int64_t i = 0; i < dim; i += LANES) store_f32(memory + j * dim + i, load(at + i));
#else
        found[j] = at;
#endif
    }
}

static void NAME(attend_group)(element *out, const element *q, const element *k_cache, const element *v_cache,
                               const int32_t *row_pages, int64_t begin, int64_t end, int64_t group, int64_t dim,
                               int64_t page_size, int64_t pages, int64_t token_stride, float scale) {
    float scaled[group * dim], sums[group * dim], largest[group], total[group], logits[group * BLOCK];
    float memory[BLOCK * dim];
    const float *found[BLOCK];
    int64_t places[BLOCK];
    for (int64_t i = 0; i < group * dim; i++) scaled[i] = widen(q[i]) * scale, sums[i] = 0.0f;
    for (int64_t g = 0; g < group; g++) largest[g] = -INFINITY, total[g] = 0.0f;
    for (int64_t first = begin; first < end; first += BLOCK) {
        int64_t count = end - first < BLOCK ? end - first : BLOCK;
        for (int64_t j = 0; j < count; j++) {
            int64_t page = row_pages[(first + j) / page_size];
            page = page < 0 || page >= pages ? pages - 1 : page; /* the trash page: never other memory */
            places[j] = (page * page_size + (first + j) % page_size) * token_stride;
        }
        NAME(locate)(found, memory, k_cache, places, count, dim);
        for (int64_t g = 0; g < group; g++) {
            for (int64_t j = 0; j < count; j++) logits[g * BLOCK + j] = dot(scaled + g * dim, found[j], dim);
            soften(logits + g * BLOCK, count, sums + g * dim, largest + g, total + g, dim);
        }
        NAME(locate)(found, memory, v_cache, places, count, dim);
        for (int64_t g = 0; g < group; g++) weigh(sums + g * dim, found, logits + g * BLOCK, count, dim);
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
