/* The end of a step with several queries a row; see settle_drafts.py. */
#include "native.h"

#ifdef ELEMENT_F32
KERNEL(settle_drafts) {
    (void)threads;
    int64_t length = a->ring_drafts.size[0], ring_rows = a->ring_drafts.size[2], most = a->drafts.size[1];
    int64_t first = ((*a->step_index.data - a->queries) % length + length) % length;
    int64_t live = live_of(a->live_rows.data, least_of(a->finished.size[0], ring_rows));
    int32_t *entry = a->ring_drafts.data + first * ring_rows * DRAFT_COLUMNS, still = 0;
    for (int64_t row = 0; row < live; row++) {
        int64_t found = 0;
        int32_t *limit = a->draft_limit.data + row;
        if (a->finished.data[row] == HELD) a->finished.data[row] = 0;
        int ended = a->finished.data[row] != 0;
        if (!ended) {
            int64_t verified = entry[VERIFIED * ring_rows + row], accepted = entry[ACCEPTED * ring_rows + row];
            still++;
            if (a->adapts && verified > 0 && *limit > 0) {
                int64_t half = (accepted + *limit + 1) / 2, lower = least_of(half > 2 ? half : 2, most);
                *limit = (int32_t)(accepted >= verified ? least_of(2 * (int64_t)*limit, most) : lower);
            }
            int64_t room = (int64_t)a->last_position.data[row] - 1 - a->pre_step_seqlens.data[row];
            found = least_of(least_of(a->num_drafts.data[row], *limit), room);
            if (found < 0) found = 0;
        }
        a->num_drafts.data[row] = entry[FOUND * ring_rows + row] = (int32_t)found;
        entry[MATCHED * ring_rows + row] = ended ? 0 : a->match_lengths.data[row];
    }
    *a->running.data = still;
    *a->step_entries.data = (int32_t)a->queries;
}
#endif
