/* Decode attention of one query a row over the row's own pages; see decode_attention.py for the formula.
 *
 * Keys are taken BLOCK at a time, with a running maximum and sum (Milakov and Gimelshein, 2018), so each key and value
 * is read once. Which heads are done together, and by which thread, changes nothing in a head's result.
 */
#include "native.h"

#ifndef GRAPHDECODE_DECODE_ATTENTION
#define GRAPHDECODE_DECODE_ATTENTION
#define BLOCK 32 /* keys; both they and their values as floats stay in the first cache */

/* The products of one query with `keys` keys, a constant where this is used. */
INLINE void add_dots(const int keys, float *logits, const float *q, const float *const *found, int64_t dim) {
    vec sums[4];
#pragma GCC unroll 4
    for (int j = 0; j < keys; j++) sums[j] = splat(0.0f);
    for (int64_t i = 0; i < dim; i += LANES) {
        vec of_query = load_f32(q + i);
#pragma GCC unroll 4
        for (int j = 0; j < keys; j++) sums[j] += of_query * load_f32(found[j] + i);
    }
#pragma GCC unroll 4
    for (int j = 0; j < keys; j++) logits[j] = sum_lanes(sums[j]);
}

static void dots(float *logits, const float *q, const float *const *found, int64_t count, int64_t dim) {
    int64_t j = 0;
    for (; j + 4 <= count; j += 4) add_dots(4, logits + j, q, found + j, dim);
    for (; j < count; j++) add_dots(1, logits + j, q, found + j, dim);
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
    vec most = load_f32(logits);
    for (int64_t j = LANES; j < BLOCK; j += LANES) {
        ivec more = load_f32(logits + j) > most;
        most = (vec)((more & (ivec)load_f32(logits + j)) | (~more & (ivec)most));
    }
    float top = *largest;
    for (int lane = 0; lane < LANES; lane++) top = most[lane] > top ? most[lane] : top;
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

/* Let a block's entries come while others are worked on. */
static void NAME(ask_for)(const element *cache, const int64_t *places, int64_t count, int64_t dim) {
    for (int64_t j = 0; j < count; j++)
        for (int64_t byte = 0; byte < dim * (int64_t)sizeof(element); byte += 64)
            __builtin_prefetch((const char *)(cache + places[j]) + byte);
}

/* One row's attention over key heads `head` to `last`, whose entries stand side by side: a block of them is read as one
 * stream. */
static void NAME(attend_heads)(const arg *args, int64_t row, int64_t head, int64_t last) {
    const int32_t *row_pages = (const int32_t *)args[4].p + row * args[12].i;
    int64_t kv_heads = args[7].i, group = args[8].i, dim = args[9].i, page_size = args[10].i, pages = args[11].i;
    int64_t window = args[13].i, heads = (last - head) * group, length = ((const int32_t *)args[5].p)[row];
    int64_t at = (row * kv_heads + head) * group * dim, span = (last - head) * dim;
    element *out = (element *)args[0].p + at;
    const element *q = (const element *)args[1].p + at;
    const element *k_cache = (const element *)args[2].p + head * dim, *v_cache = (const element *)args[3].p + head * dim;
    float scaled[heads * dim], sums[heads * dim], largest[heads], total[heads], logits[heads * BLOCK];
    float memory[BLOCK * dim];
    const float *found[BLOCK];
    int64_t places[BLOCK];
    length = length < args[12].i * page_size ? length : args[12].i * page_size;
    if (length <= 0) {
        memset(out, 0, heads * dim * sizeof(element));
        return;
    }
    for (int64_t i = 0; i < heads * dim; i++) scaled[i] = widen(q[i]) * (float)args[14].d, sums[i] = 0.0f;
    for (int64_t h = 0; h < heads; h++) largest[h] = -INFINITY, total[h] = 0.0f;
    for (int64_t first = window >= 0 && window < length ? length - 1 - window : 0; first < length; first += BLOCK) {
        int64_t count = length - first < BLOCK ? length - first : BLOCK;
        for (int64_t j = 0; j < count; j++) {
            int64_t page = row_pages[(first + j) / page_size];
            page = page < 0 || page >= pages ? pages - 1 : page; /* the trash page: never other memory */
            places[j] = (page * page_size + (first + j) % page_size) * kv_heads * dim;
        }
        NAME(ask_for)(k_cache, places, count, span);
        NAME(ask_for)(v_cache, places, count, span);
        for (int64_t h = 0; h < heads; h++) {
            if (h % group == 0) NAME(locate)(found, memory, k_cache + h / group * dim, places, count, dim);
            dots(logits + h * BLOCK, scaled + h * dim, found, count, dim);
            soften(logits + h * BLOCK, count, sums + h * dim, largest + h, total + h, dim);
        }
        for (int64_t h = 0; h < heads; h++) {
            if (h % group == 0) NAME(locate)(found, memory, v_cache + h / group * dim, places, count, dim);
            weigh(sums + h * dim, found, logits + h * BLOCK, count, dim);
        }
    }
    for (int64_t h = 0; h < heads; h++)
        for (int64_t i = 0; i < dim; i++) out[h * dim + i] = narrow(sums[h * dim + i] / total[h]);
}

/* In how many parts a row's key heads are shared out: as few as keep all threads busy, for whole rows are one stream. */
static int64_t NAME(parts_of_row)(const arg *args) {
    int64_t parts = 1 + 2 * atomic_load(&pool.threads) / args[6].i;
    return parts < args[7].i ? parts : args[7].i;
}

static void NAME(attend_parts)(const void *job, int64_t begin, int64_t end) {
    const arg *args = job;
    int64_t parts = NAME(parts_of_row)(args), kv_heads = args[7].i;
    for (int64_t task = begin; task < end; task++) {
        int64_t part = task % parts;
        NAME(attend_heads)(args, task / parts, part * kv_heads / parts, (part + 1) * kv_heads / parts);
    }
}

/* out, q, k_cache, v_cache, page_table, kv_lens, rows, key heads, group, head_dim, page size, pages, pages of a row,
 * window or -1, scale */
void NAME(decode_attention)(const arg *args) {
    const int32_t *kv_lens = args[5].p;
    int64_t rows = args[6].i, heads = args[7].i * args[8].i, keys = 0, tasks = rows * NAME(parts_of_row)(args);
    for (int64_t row = 0; row < rows; row++) keys += kv_lens[row] > 0 ? kv_lens[row] : 0;
    parallel(NAME(attend_parts), args, tasks, items_of(tasks * PARALLEL_WORK, keys * heads * args[9].i));
}
