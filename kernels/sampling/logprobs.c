/* Log-probabilities of the sampled token and of the likeliest ones, and its rank; see logprobs.py. */
#include "native.h"

/* The number of tokens before this one: more likely ones, and equal ones with lower ids. */
static int32_t NAME(count_before)(const element *logits, int64_t vocab, int64_t token) {
    float chosen = widen(logits[token]);
    ivec counts = {0};
    int64_t i = 0, before = 0;
    for (; i + LANES <= vocab; i += LANES) counts -= (ivec)(load(logits + i) > chosen);
    for (; i < vocab; i++) before += widen(logits[i]) > chosen;
    for (int lane = 0; lane < LANES; lane++) before += counts[lane];
    for (i = 0; i < token; i++) before += widen(logits[i]) == chosen;
    return (int32_t)before;
}

static int64_t NAME(argmax)(const element *x, int64_t count); /* of sample.c */

static void NAME(logprob_rows)(const void *job, int64_t begin, int64_t end) {
    const token_logprobs_args *a = job;
    int64_t width = a->top_ids.size[1], vocab = a->logits.size[1];
    for (int64_t row = begin; row < end; row++) {
        if (!(a->sampling_flags.data[row] & FLAG_LOGPROBS)) continue;
        const element *logits = (const element *)a->logits.data + row * a->logits.stride[0];
        int64_t requested = a->num_logprobs.data[row], tops = requested > 0 ? least_of(requested, width) : 0;
        float *values = a->top_logprobs.data + row * width;
        int32_t *ids = a->top_ids.data + row * width;
        int64_t sampled = a->sampled.data[row];
        for (int64_t i = 0; i < tops; i++) values[i] = -INFINITY, ids[i] = -1;
        /* the most likely so far, in order; ties by id */
        for (int64_t i = 0; tops && i < vocab; i++) {
            if (i + LANES <= vocab) {
                ivec beats = load(logits + i) > values[tops - 1];
                int64_t any = 0;
                for (int lane = 0; lane < LANES; lane++) any |= beats[lane];
                if (!any) {
                    i += LANES - 1;
                    continue;
                }
            }
            for (int64_t end_of_vector = i + LANES; i < vocab && i < end_of_vector; i++) {
                float value = widen(logits[i]);
                if (!(value > values[tops - 1])) continue;
                int64_t rank = tops - 1;
                for (; rank > 0 && value > values[rank - 1]; rank--)
                    values[rank] = values[rank - 1], ids[rank] = ids[rank - 1];
                values[rank] = value, ids[rank] = (int32_t)i;
            }
            i--;
        }
        float largest = tops ? values[0] : widen(logits[NAME(argmax)(logits, vocab)]);
        vec sums = splat(0.0f);
        float tail = 0.0f;
        int64_t i = 0;
        for (; i + LANES <= vocab; i += LANES) sums += exp_lanes(load(logits + i) - largest);
        for (; i < vocab; i++) tail += expf(widen(logits[i]) - largest);
        float total = largest + logf(sum_lanes(sums) + tail);
        int is_token = sampled >= 0 && sampled < vocab;
        a->sampled_logprob.data[row] = is_token ? widen(logits[sampled]) - total : -INFINITY;
        a->sampled_rank.data[row] = is_token ? 1 + NAME(count_before)(logits, vocab, sampled) : 0;
        for (int64_t rank = 0; rank < tops; rank++) values[rank] -= total;
    }
}

KERNEL(token_logprobs) {
    int64_t live = live_of(a->live_rows.data, a->logits.size[0]);
    parallel(threads, NAME(logprob_rows), a, live, items_of(PARALLEL_WORK, a->logits.size[1]));
}
