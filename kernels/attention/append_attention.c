/* Append and attention of a decode step in one: rope_append.c and decode_attention.c, one after the other; see
 * append_attention.py. The rotated queries are in `out`: a head's are read before its result is written. */
#include "attention_pages.h"
#include "native.h"

static void NAME(append_token)(const rope_append_args *a, int64_t token, int64_t row, int64_t position, float *wide);
static void NAME(decode_attention_of)(const decode_attention_args *a, int64_t threads);

struct NAME(appending) {
    const append_attention_args *a;
    rope_append_args rope;
};

static void NAME(append_rows)(const void *job, int64_t begin, int64_t end) {
    const struct NAME(appending) *args = job;
    const int32_t *lengths = args->a->kv_lens.data;
    float *wide = scratch(args->a->out.size[2]);
    for (int64_t row = begin; row < end; row++)
        if (lengths[row] > 0) NAME(append_token)(&args->rope, row, row, (int64_t)lengths[row] - 1, wide);
}

KERNEL(append_attention) {
    int64_t rows = least_of(a->out.size[0], a->kv_lens.size[0]);
    struct NAME(appending) job = {.a = a, .rope = {.rope = a->rope, .scales = a->scales}};
    job.rope.k_scale = a->k_scale, job.rope.v_scale = a->v_scale;
    HAND_OVER(job.rope.q_out, a->out), HAND_OVER(job.rope.k_cache, a->k_cache), HAND_OVER(job.rope.v_cache, a->v_cache);
    HAND_OVER(job.rope.qkv, a->qkv), HAND_OVER(job.rope.page_table, a->page_table);
    parallel(threads, NAME(append_rows), &job, rows, items_of(PARALLEL_WORK, a->qkv.size[1]));
    decode_attention_args decode = {.q_len = 1, .max_items = a->max_items, .options = a->options, .v_scale = a->v_scale,
                                    .work = a->work, .scales = a->scales};
    decode.options.sm_scale *= a->k_scale;
    HAND_OVER(decode.out, a->out), HAND_OVER(decode.q, a->out), HAND_OVER(decode.k_cache, a->k_cache);
    HAND_OVER(decode.v_cache, a->v_cache), HAND_OVER(decode.table, a->page_table);
    NAME(decode_attention_of)(&decode, threads);
}
