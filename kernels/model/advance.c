/* A batch takes its sampled tokens, and is ready for the next step; see advance.py. */
#include "native.h"

KERNEL(advance) {
    (void)threads;
    int64_t ring_rows = a->ring_tokens.size[1], rows = least_of(a->tokens.size[0], ring_rows);
    int64_t live = live_of(a->live_rows.data, rows), stops = a->stop_ids.size[1], tops = a->top_ids.size[1];
    int64_t step = *a->step_index.data, entry = (step > 0 ? step % a->ring_tokens.size[0] : 0) * ring_rows;
    int32_t running = 0;
    for (int64_t row = 0; row < ring_rows; row++) a->ring_tokens.data[entry + row] = -1;
    for (int64_t row = 0; row < live; row++) {
        if (a->finished.data[row]) continue;
        int64_t token = a->sampled.data[row], slot = entry + row;
        int32_t position = (int32_t)least_of((int64_t)a->pre_step_seqlens.data[row] + 1, INT32_MAX);
        int32_t flags = a->sampling_flags.data[row], ends = token < 0 || position >= a->last_position.data[row];
        a->ring_tokens.data[slot] = token;
        if (a->token_counts.data && (flags & FLAG_PENALTIES) && token >= 0 && token < a->token_counts.size[1])
            a->token_counts.data[row * a->token_counts.stride[0] + token]++;
        if (a->ring_logprob.data && a->sampled_logprob.data && (flags & FLAG_LOGPROBS)) {
            a->ring_logprob.data[slot] = a->sampled_logprob.data[row];
            a->ring_rank.data[slot] = a->sampled_rank.data[row];
            int64_t requested = a->num_logprobs.data[row];
            size_t count = requested > 0 ? (size_t)least_of(requested, tops) : 0;
            memcpy(a->ring_top_logprobs.data + slot * tops, a->top_logprobs.data + row * tops, count * sizeof(float));
            memcpy(a->ring_top_ids.data + slot * tops, a->top_ids.data + row * tops, count * sizeof(int32_t));
        }
        if (a->recent_tokens.data && (flags & FLAG_BAD_WORDS))
            a->recent_tokens.data[row * BAD_WORD_LENGTH + position % BAD_WORD_LENGTH] = (int32_t)token;
        for (int64_t i = row * stops; i < (row + 1) * stops && !ends && a->stop_ids.data[i] >= 0; i++)
            ends = a->stop_ids.data[i] == token && position >= a->min_position.data[row];
        if (ends) {
            a->finished.data[row] = 1;
        } else {
            a->tokens.data[row] = token, a->pre_step_seqlens.data[row] = position;
            running++;
        }
    }
    *a->running.data = running;
    ++*a->step_index.data;
}
