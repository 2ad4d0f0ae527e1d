/* Decode attention of one query a row over the row's own pages; see decode_attention.py for the formula.
 *
 * Keys are taken BLOCK at a time, with a running maximum and sum (Milakov and Gimelshein, 2018), so each key and value
 * is read once. Which heads are done together, and by which thread, changes nothing in a head's result.
 */
#include "native.h"

#ifndef GRAPHDECODE_DECODE_ATTENTION
#define GRAPHDECODE_DECODE_ATTENTION
#define BLOCK 32 /* keys; both they and their values as floats stay in the first cache */

/* Lanes of two vectors: of each, from `from` on, the next `width` of every 2 * width. */
#define LANE(n, width, from) \
    ((n) / (LANES / 2) * LANES + (n) % (LANES / 2) / (width) * 2 * (width) + (n) % (width) + (from))
#define LANES_4(n, ...) LANE(n, __VA_ARGS__), LANE(n + 1, __VA_ARGS__), LANE(n + 2, __VA_ARGS__), LANE(n + 3, __VA_ARGS__)
#if LANES == 16
#define ALL_LANES(...) \
    LANES_4(0, __VA_ARGS__), LANES_4(4, __VA_ARGS__), LANES_4(8, __VA_ARGS__), LANES_4(12, __VA_ARGS__)
#elif LANES == 8
#define ALL_LANES(...) LANES_4(0, __VA_ARGS__), LANES_4(4, __VA_ARGS__)
#else
#define ALL_LANES(...) LANES_4(0, __VA_ARGS__)
#endif
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
#define FOLD(width) (SHUFFLE(a, b, ALL_LANES(width, 0)) + SHUFFLE(a, b, ALL_LANES(width, width)))

/* Add lanes of two vectors to the ones `width` beside them; `width` is a constant where this is used. */
INLINE vec fold_pair(const int width, vec a, vec b) {
#if LANES >= 16
    if (width == 8) return FOLD(8);
#endif
#if LANES >= 8
    if (width == 4) return FOLD(4);
#endif
    return width == 2 ? FOLD(2) : FOLD(1);
}

/* cap * tanh(logit / cap) of a block; tanh(x) = 1 - 2 / (e^2x + 1). */
static void cap_logits(float *logits, float cap) {
    for (int64_t j = 0; j < BLOCK; j += LANES) {
        vec twice = load_f32(logits + j) * (2.0f / cap);
        store_f32(logits + j, cap - 2.0f * cap / (exp_lanes(twice) + 1.0f));
    }
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

/* logits[head][key] of `heads` queries, a constant where this is used, with LANES / heads keys: each key is loaded once.
 * Each sum is added up in the order of sum_lanes. */
INLINE void NAME(add_dots)(const int heads, float *logits, const float *q, const element *const *found, int64_t dim) {
    const int keys = LANES / heads;
    vec sums[LANES];
#pragma GCC unroll 16
    for (int n = 0; n < LANES; n++) sums[n] = splat(0.0f);
    for (int64_t i = 0; i < dim; i += LANES)
#pragma GCC unroll 16
        for (int j = 0; j < keys; j++) {
            vec key = load(found[j] + i);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) sums[h * keys + j] += load_f32(q + h * dim + i) * key;
        }
#pragma GCC unroll 4
    for (int width = LANES / 2; width > 0; width /= 2)
#pragma GCC unroll 16
        for (int n = 0; n < width; n++) sums[n] = fold_pair(width, sums[2 * n], sums[2 * n + 1]);
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++) memcpy(logits + h * BLOCK, (float *)sums + h * keys, keys * sizeof(float));
}

/* sums[head] += weights[head][key] * values[key] over `vectors` vectors of each; `heads` and `vectors` are constants. */
INLINE void NAME(add_weighted)(const int heads, const int vectors, float *sums, const float *weights,
                               const element *const *values, int64_t offset, int64_t count, int64_t dim) {
    vec held[4][4];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) held[h][v] = load_f32(sums + h * dim + offset + v * LANES);
    for (int64_t j = 0; j < count; j++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            vec value = load(values[j] + offset + v * LANES);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) held[h][v] += value * weights[h * BLOCK + j];
        }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store_f32(sums + h * dim + offset + v * LANES, held[h][v]);
}

INLINE void NAME(dots)(const int heads, float *logits, const float *q, const element *const *found, int64_t count,
                       int64_t dim) {
    for (int64_t j = 0; j < count; j += LANES / heads) NAME(add_dots)(heads, logits + j, q, found + j, dim);
}

INLINE void NAME(weigh)(const int heads, float *sums, const float *weights, const element *const *values, int64_t count,
                        int64_t dim) {
    int64_t i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES) NAME(add_weighted)(heads, 4, sums, weights, values, i, count, dim);
    for (; i < dim; i += LANES) NAME(add_weighted)(heads, 1, sums, weights, values, i, count, dim);
}

/* Both for all queries of a key head, as many at once as leave the sums in registers. */
static void NAME(group_dots)(float *logits, const float *q, const element *const *found, int64_t group, int64_t count,
                             int64_t dim) {
    int64_t h = 0;
    for (; h + 4 <= group; h += 4) NAME(dots)(4, logits + h * BLOCK, q + h * dim, found, count, dim);
    for (; h + 2 <= group; h += 2) NAME(dots)(2, logits + h * BLOCK, q + h * dim, found, count, dim);
    for (; h < group; h++) NAME(dots)(1, logits + h * BLOCK, q + h * dim, found, count, dim);
}

static void NAME(group_weigh)(float *sums, const float *weights, const element *const *values, int64_t group,
                              int64_t count, int64_t dim) {
    int64_t h = 0;
    for (; h + 4 <= group; h += 4) NAME(weigh)(4, sums + h * dim, weights + h * BLOCK, values, count, dim);
    for (; h + 2 <= group; h += 2) NAME(weigh)(2, sums + h * dim, weights + h * BLOCK, values, count, dim);
    for (; h < group; h++) NAME(weigh)(1, sums + h * dim, weights + h * BLOCK, values, count, dim);
}

/* Let the next block's entries of a head come while others are worked on. */
static void NAME(ask_for)(const element *cache, const int64_t *places, int64_t count, int64_t dim) {
    for (int64_t j = 0; j < count; j++)
        for (int64_t byte = 0; byte < dim * (int64_t)sizeof(element); byte += 64)
            __builtin_prefetch((const char *)(cache + places[j]) + byte);
}

/* Find where a block's entries begin. */
static int64_t NAME(locate)(int64_t *places, const decode_attention_args *a, const int32_t *row_pages, int64_t first,
                            int64_t length) {
    int64_t pages = a->k_cache.size[0], page_size = a->k_cache.size[1], entry = a->k_cache.size[2] * a->k_cache.size[3];
    int64_t count = length - first < BLOCK ? length - first : BLOCK;
    for (int64_t j = 0; j < count; j++) {
        int64_t page = row_pages[(first + j) / page_size];
        page = page < 0 || page >= pages ? pages - 1 : page; /* the trash page: never other memory */
        places[j] = (page * page_size + (first + j) % page_size) * entry;
    }
    return count;
}

/* One row's attention over key heads `head` to `last`, whose entries stand side by side: a block of them is read as one
 * stream. */
static void NAME(attend_heads)(const decode_attention_args *a, int64_t row, int64_t head, int64_t last) {
    int64_t kv_heads = a->k_cache.size[2], dim = a->k_cache.size[3], group = a->q.size[1] / kv_heads;
    int64_t heads = (last - head) * group, window = a->window_left, at = (row * kv_heads + head) * group * dim;
    int64_t length = least_of(a->kv_lens.data[row], a->table.size[1] * a->k_cache.size[1]);
    const int32_t *row_pages = a->table.data + row * a->table.size[1];
    element *out = (element *)a->out.data + at;
    const element *q = (const element *)a->q.data + at;
    const element *k_cache = (const element *)a->k_cache.data + head * dim;
    const element *v_cache = (const element *)a->v_cache.data + head * dim;
    const element *found[BLOCK];
    int64_t memory[2][BLOCK], *places = memory[0], *next = memory[1];
    if (length <= 0) {
        memset(out, 0, heads * dim * sizeof(element));
        return;
    }
    float *room = scratch(heads * (2 * dim + BLOCK + 2) + 2 * LANES), *scaled = carved(&room, heads * dim);
    float *sums = carved(&room, heads * dim), *logits = carved(&room, heads * BLOCK);
    float *largest = carved(&room, heads), *total = carved(&room, heads);
    for (int64_t i = 0; i < heads * dim; i++) scaled[i] = widen(q[i]) * (float)a->sm_scale, sums[i] = 0.0f;
    for (int64_t h = 0; h < heads; h++) {
        largest[h] = a->sinks.data ? a->sinks.data[head * group + h] : -INFINITY;
        total[h] = a->sinks.data ? 1.0f : 0.0f; /* e^(sink - sink), as if it were a key */
    }
    int64_t first = window >= 0 && window < length ? length - 1 - window : 0;
    int64_t count = NAME(locate)(places, a, row_pages, first, length), coming;
    for (; count > 0; count = coming, first += BLOCK) {
        coming = first + BLOCK < length ? NAME(locate)(next, a, row_pages, first + BLOCK, length) : 0;
        for (int64_t h = 0; h < heads; h += group) {
            const element *of_head = k_cache + h / group * dim;
            NAME(ask_for)(of_head, next, coming, dim);
            for (int64_t j = 0; j < BLOCK; j++) found[j] = of_head + places[j < count ? j : count - 1];
            NAME(group_dots)(logits + h * BLOCK, scaled + h * dim, found, group, count, dim);
        }
        for (int64_t h = 0; h < heads; h++) {
            if (a->soft_cap > 0.0) cap_logits(logits + h * BLOCK, (float)a->soft_cap);
            soften(logits + h * BLOCK, count, sums + h * dim, largest + h, total + h, dim);
        }
        for (int64_t h = 0; h < heads; h += group) {
            const element *of_head = v_cache + h / group * dim;
            NAME(ask_for)(of_head, next, coming, dim);
            for (int64_t j = 0; j < count; j++) found[j] = of_head + places[j];
            NAME(group_weigh)(sums + h * dim, logits + h * BLOCK, found, group, count, dim);
        }
        int64_t *done = places;
        places = next, next = done;
    }
    for (int64_t h = 0; h < heads; h++)
        for (int64_t i = 0; i < dim; i++) out[h * dim + i] = narrow(sums[h * dim + i] / total[h]);
}

struct NAME(attention) {
    const decode_attention_args *a;
    int64_t parts; /* that a row's key heads are shared out in */
};

static void NAME(attend_parts)(const void *job, int64_t begin, int64_t end) {
    const decode_attention_args *a = ((const struct NAME(attention) *)job)->a;
    int64_t parts = ((const struct NAME(attention) *)job)->parts, kv_heads = a->k_cache.size[2];
    for (int64_t task = begin; task < end; task++) {
        int64_t part = task % parts;
        NAME(attend_heads)(a, task / parts, part * kv_heads / parts, (part + 1) * kv_heads / parts);
    }
}

KERNEL(decode_attention) {
    int64_t rows = least_of(a->q.size[0], least_of(a->table.size[0], a->kv_lens.size[0])), keys = 0;
    if (rows == 0) return;
    /* as few parts as keep all threads busy, for whole rows are one stream */
    struct NAME(attention) job = {a, least_of(1 + 2 * threads / rows, a->k_cache.size[2])};
    for (int64_t row = 0; row < rows; row++) keys += a->kv_lens.data[row] > 0 ? a->kv_lens.data[row] : 0;
    int64_t tasks = rows * job.parts, work = keys * a->q.size[1] * a->q.size[2];
    parallel(threads, NAME(attend_parts), &job, tasks, items_of(tasks * PARALLEL_WORK, work));
}
