/* Log-probabilities of the sampled token and of the likeliest ones; see logprobs.py. */
#include "native.h"

static void NAME(logprob_rows)(const void *job, int64_t begin, int64_t end) {
    const arg *args = job;
    float *sampled_logprob = args[0].p, *top_logprobs = args[1].p;
    int32_t *top_ids = args[2].p;
    const int64_t *sampled = args[4].p;
    const int32_t *flags = args[6].p;
    int64_t wanted = args[7].i, tops = args[8].i, vocab = args[9].i, live = *(const int32_t *)args[5].p;
    for (int64_t row = begin; row < end && row < live; row++) {
        if (!(flags[row] & wanted)) continue;
        const element *logits = (const element *)args[3].p + row * args[10].i;
        float *values = top_logprobs + row * tops, largest = -INFINITY;
        int32_t *ids = top_ids + row * tops;
        for (int64_t i = 0; i < tops; i++) values[i] = -INFINITY, ids[i] = -1;
        /* the likeliest so far, in order; what equals one of them comes behind it */
        for (int64_t i = 0; i < vocab; i++) {
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
                int64_t place = tops - 1;
                for (; place > 0 && value > values[place - 1]; place--)
                    values[place] = values[place - 1], ids[place] = ids[place - 1];
                values[place] = value, ids[place] = (int32_t)i;
            }
            i--;
        }
        largest = values[0];
        vec sums = splat(0.0f);
        float rest = 0.0f;
        int64_t i = 0;
        for (; i + LANES <= vocab; i += LANES) sums += exp_lanes(load(logits + i) - largest);
        for (; i < vocab; i++) rest += expf(widen(logits[i]) - largest);
        float total = largest + logf(sum_lanes(sums) + rest);
        sampled_logprob[row] = widen(logits[sampled[row]]) - total;
        for (int64_t place = 0; place < tops; place++) values[place] -= total;
    }
}

/* sampled_logprob, top_logprobs, top_ids, logits, sampled, live_rows, sampling_flags, flag of rows that want them,
 * likeliest ones, vocabulary, stride of logits, rows */
void NAME(token_logprobs)(const arg *args) {
    parallel(NAME(logprob_rows), args, args[11].i, items_of(PARALLEL_WORK, args[9].i));
}
