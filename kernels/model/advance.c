/* A batch takes its sampled tokens, and is ready for the next step; see advance.py. */
#include "native.h"

#ifndef ELEMENT_BF16
/* the fields of AdvanceState, sampled, the fields of LogprobOutputs, live_rows, sampling_flags, stop_ids, min_position,
 * last_position, flags of penalties and of logprobs, length and rows of the ring, stride of counts, stops, tops */
void advance(const arg *args) {
    int64_t *tokens = args[0].p, *step_index = args[3].p, *ring_tokens = args[5].p;
    int32_t *seqlens = args[1].p, *finished = args[2].p, *counts = args[6].p;
    float *ring_logprob = args[7].p, *ring_top_logprobs = args[8].p;
    int32_t *ring_top_ids = args[9].p;
    const int64_t *sampled = args[10].p;
    const float *logprob = args[11].p, *top_logprobs = args[12].p;
    const int32_t *top_ids = args[13].p, *flags = args[15].p, *stop_ids = args[16].p;
    const int32_t *min_position = args[17].p, *last_position = args[18].p;
    int64_t live = *(const int32_t *)args[14].p, rows = args[22].i, stops = args[24].i, tops = args[25].i;
    int64_t entry = *step_index % args[21].i * rows;
    int32_t running = 0;
    for (int64_t row = 0; row < rows; row++) ring_tokens[entry + row] = -1;
    for (int64_t row = 0; row < live; row++) {
        if (finished[row]) continue;
        int64_t token = sampled[row], place = entry + row;
        int32_t position = seqlens[row] + 1, ends = position >= last_position[row];
        ring_tokens[place] = token;
        if (counts && (flags[row] & args[19].i)) counts[row * args[23].i + token]++;
        if (ring_logprob && logprob && (flags[row] & args[20].i)) {
            ring_logprob[place] = logprob[row];
            memcpy(ring_top_logprobs + place * tops, top_logprobs + row * tops, tops * sizeof(float));
            memcpy(ring_top_ids + place * tops, top_ids + row * tops, tops * sizeof(int32_t));
        }
        for (int64_t i = row * stops; i < (row + 1) * stops && !ends; i++)
            ends = stop_ids[i] == token && position >= min_position[row];
        if (ends) {
            finished[row] = 1;
        } else {
            tokens[row] = token, seqlens[row] = position;
            running++;
        }
    }
    *(int32_t *)args[4].p = running;
    ++*step_index;
}
#endif
