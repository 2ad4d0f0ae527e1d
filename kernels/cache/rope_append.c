/* Rotary embedding and append to the paged cache; see rope_append.py for the formulas and the shapes. */
#include "native.h"
#include "native_codes.h"

#if defined(ELEMENT_F16)
static const float NAME(most) = MOST_F16;
#else
static const float NAME(most) = INFINITY;
#endif

/* 1 / rms of some channels. */
static float NAME(inverse_root)(int64_t is_wide, const void *x, int64_t count, float eps) {
    float squares = 0.0f;
    for (int64_t i = 0; i < count; i++) squares += widen_at(is_wide, x, i) * widen_at(is_wide, x, i);
    return 1.0f / sqrtf(squares / (float)count + eps);
}

/* Some heads of a token as they are kept: in the element type, or in codes that are divided by `unit` or have scales. */
struct NAME(head_output) {
    void *at;
    int64_t code, scale_stride;
    float unit;
    uint16_t *scales;
};

static void NAME(store_head)(const struct NAME(head_output) *to, int64_t head, const float *wide, int64_t dim) {
    uint8_t *codes = (uint8_t *)to->at + head * dim;
    if (to->code == CODE_INT8) to->scales[head * to->scale_stride] = store_int8(codes, wide, dim);
    else if (to->code == CODE_FLOAT8_E4M3FN) store_e4m3(codes, wide, to->unit, dim);
    else write_floats(0, to->at, head * dim, wide, dim);
}

/* One head, times its norm if a weight is given, rotated over its first 2 * half dimensions. */
static void NAME(rotate_head)(int64_t is_wide, float *wide, const void *x, const float *weight, float scale,
                              const float *cos, int64_t half, int64_t dim) {
    read_floats(wide, is_wide, x, 0, dim);
    if (weight)
        for (int64_t i = 0; i < dim; i++) wide[i] = wide[i] * scale * weight[i];
    const float *sin = cos + half;
    for (int64_t i = 0; i < half; i++) {
        float first = wide[i], second = wide[half + i];
        wide[i] = first * cos[i] - second * sin[i];
        wide[half + i] = second * cos[i] + first * sin[i];
    }
}

/* The same for several heads; the norm is per head, or over all if the weight is as long as all heads. */
NOINLINE void NAME(rotate_heads)(int64_t is_wide, const struct NAME(head_output) *to, const char *x, const float *weight,
                              int64_t weights, float eps, const float *cos, int64_t half, int64_t heads, int64_t dim,
                              int is_mixed, float *wide) {
    int64_t normed = weights > dim ? weights : dim;
    float scale = 0.0f;
    for (int64_t head = 0; head < heads; head++) {
        int64_t at = head * dim;
        const char *from = x + at * width_of(is_wide);
        if (weight && at % normed == 0) scale = NAME(inverse_root)(is_wide, from, normed, eps);
        NAME(rotate_head)(is_wide, wide, from, weight ? weight + at % normed : weight, scale, cos, half, dim);
        if (is_mixed) mix_head(wide, dim, to->code ? INFINITY : NAME(most)); /* queries are clamped to an element's range */
        NAME(store_head)(to, head, wide, dim);
    }
}

/* The offset of one token's heads in a cache: `index` values. */
static struct NAME(head_output) NAME(output_at)(void *cache, int64_t code, int64_t index, float unit, uint16_t *scales,
                                                int64_t scale_index, int64_t page_size) {
    int64_t size = code ? 1 : sizeof(element);
    return (struct NAME(head_output)){(char *)cache + index * size, code, page_size, unit,
                                      scales ? scales + scale_index : 0};
}

/* Append one token, and write its queries; `wide` has room for a head. */
static void NAME(append_token)(const rope_append_args *a, int64_t token, int64_t row, int64_t position, float *wide) {
    const int64_t pages = a->k_cache.size[0], page_size = a->k_cache.size[1], kv_heads = a->k_cache.size[2];
    const int64_t value_heads = a->v_cache.size[2];
    const int64_t qo_heads = a->q_out.size[1], dim = a->q_out.size[2], heads = qo_heads + kv_heads + value_heads;
    const int64_t half = a->cos_sin.size[2], row_pages = a->page_table.size[1];
    const int is_mixed = a->k_cache.code == CODE_INT8, is_wide = IS_WIDE(a->qkv);
    const char *x = (const char *)a->qkv.data + token * heads * dim * width_of(is_wide);
    float eps = (float)a->eps;
    if (position < 0 || position >= a->cos_sin.size[0]) return; /* positions without an angle are not written */
    const float *cos = a->cos_sin.data + position * 2 * half;
    struct NAME(head_output) queries = {.at = (element *)a->q_out.data + token * qo_heads * dim};
    NAME(rotate_heads)(is_wide, &queries, x, a->q_norm.data, a->q_norm.size[0], eps, cos, half, qo_heads, dim,
                       is_mixed, wide);
    if (row < 0 || row >= a->page_table.size[0] || position >= row_pages * page_size) return;
    int64_t page = a->page_table.data[row * row_pages + position / page_size];
    if (page < 0 || page >= pages) return; /* an invalid page must not reach other memory */
    int64_t offset = position % page_size, index = (page * page_size + offset) * kv_heads * dim;
    int64_t scale_index = page * kv_heads * page_size + offset;
    struct NAME(head_output) keys = NAME(output_at)(a->k_cache.data, a->k_cache.code, index, (float)a->k_scale,
                                                    a->k_scales.data, scale_index, page_size);
    struct NAME(head_output) values = NAME(output_at)(a->v_cache.data, a->v_cache.code, index, (float)a->v_scale,
                                                      a->v_scales.data, scale_index, page_size);
    x += qo_heads * dim * width_of(is_wide);
    NAME(rotate_heads)(is_wide, &keys, x, a->k_norm.data, a->k_norm.size[0], eps, cos, half, kv_heads, dim, is_mixed,
                       wide);
    x += kv_heads * dim * width_of(is_wide);
    if (values.code || (is_wide && sizeof(element) < sizeof(float)))
        NAME(rotate_heads)(is_wide, &values, x, 0, 0, 0.0f, cos, 0, value_heads, dim, 0, wide);
    else memcpy(values.at, x, value_heads * dim * sizeof(element));
}

static void NAME(append_tokens)(const void *job, int64_t begin, int64_t end) {
    const rope_append_args *a = job;
    float *wide = scratch(a->q_out.size[2]);
    for (int64_t token = begin; token < end; token++)
        NAME(append_token)(a, token, a->rows.data[token], a->positions.data[token], wide);
}

KERNEL(rope_append) {
    int64_t tokens = live_of(a->live.data, a->q_out.size[0]), size = a->qkv.size[1];
    parallel(threads, NAME(append_tokens), a, tokens, items_of(PARALLEL_WORK, size));
}
