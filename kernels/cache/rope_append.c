/* Rotary embedding and append to the paged cache; see rope_append.py for the formulas and the shapes. */
#include "native.h"

/* Write one head, normed if a weight is given, rotated over its first 2 * half dimensions. */
static void NAME(rotate_head)(element *out, const element *x, const element *weight, const float *cos, int64_t half,
                              int64_t dim, float eps, float *wide) {
    float squares = 0.0f;
    for (int64_t i = 0; i < dim; i++) wide[i] = widen(x[i]);
    if (weight) {
        for (int64_t i = 0; i < dim; i++) squares += wide[i] * wide[i];
        float scale = 1.0f / sqrtf(squares / (float)dim + eps);
        for (int64_t i = 0; i < dim; i++) wide[i] = wide[i] * scale * widen(weight[i]);
    }
    const float *sin = cos + half;
    for (int64_t i = 0; i < half; i++) {
        float first = wide[i], second = wide[half + i];
        out[i] = narrow(first * cos[i] - second * sin[i]);
        out[half + i] = narrow(second * cos[i] + first * sin[i]);
    }
    for (int64_t i = 2 * half; i < dim; i++) out[i] = narrow(wide[i]);
}

static void NAME(append_tokens)(const void *job, int64_t begin, int64_t end) {
    const arg *args = job;
    element *q_out = args[0].p, *k_cache = args[1].p, *v_cache = args[2].p;
    const element *qkv = args[3].p, *q_norm = args[9].p, *k_norm = args[10].p;
    const int32_t *rows = args[4].p, *positions = args[5].p, *page_table = args[7].p;
    const float *cos_sin = args[8].p;
    int64_t qo_heads = args[12].i, kv_heads = args[13].i, dim = args[14].i, half = args[15].i;
    int64_t page_size = args[16].i, pages = args[17].i, row_pages = args[18].i;
    float eps = (float)args[19].d;
    int64_t heads = qo_heads + 2 * kv_heads;
    for (int64_t token = begin; token < end; token++) {
        float wide[dim];
        const element *x = qkv + token * heads * dim;
        int64_t position = positions[token];
        const float *cos = cos_sin + position * 2 * half;
        for (int64_t head = 0; head < qo_heads; head++)
            NAME(rotate_head)
        (q_out + (token * qo_heads + head) * dim, x + head * dim, q_norm, cos, half, dim, eps, wide);
        int64_t page = page_table[rows[token] * row_pages + position / page_size];
        if (page < 0 || page >= pages) continue; /* a page table that is wrong must not reach other memory */
        int64_t place = (page * page_size + position % page_size) * kv_heads * dim;
        for (int64_t head = 0; head < kv_heads; head++)
            NAME(rotate_head)
        (k_cache + place + head * dim, x + (qo_heads + head) * dim, k_norm, cos, half, dim, eps, wide);
        memcpy(v_cache + place, x + (qo_heads + kv_heads) * dim, kv_heads * dim * sizeof(element));
    }
}

/* q_out, k_cache, v_cache, qkv, rows, positions, live, page_table, cos_sin, q_norm or null, k_norm or null,
 * tokens, query heads, key heads, head_dim, half, page size, pages, pages of a row, eps */
void NAME(rope_append)(const arg *args) {
    int64_t live = *(const int32_t *)args[6].p, tokens = live < args[11].i ? live : args[11].i;
    int64_t size = (args[12].i + 2 * args[13].i) * args[14].i;
    parallel(NAME(append_tokens), args, tokens, items_of(PARALLEL_WORK, size));
}
