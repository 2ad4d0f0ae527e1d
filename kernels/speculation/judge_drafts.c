/* Accept drafts while they are what was sampled; see judge_drafts.py. */
#include "native.h"

#ifdef ELEMENT_F32
KERNEL(judge_drafts) {
    (void)threads;
    int64_t length = a->ring_tokens.size[0], ring_rows = a->ring_tokens.size[1], most = a->drafts.size[1];
    int64_t width = a->history.size[1], newest = *a->step_index.data - 1;
    int64_t first = ((newest - a->index) % length + length) % length;
    int64_t live = live_of(a->live_rows.data, least_of(a->finished.size[0], ring_rows));
    const int64_t *tokens = a->ring_tokens.data + (newest % length + length) % length * ring_rows;
    int32_t *entry = a->ring_drafts.data + first * ring_rows * DRAFT_COLUMNS, active = 0;
    for (int64_t row = 0; row < live; row++) {
        int64_t token = tokens[row], found = least_of(a->num_drafts.data[row], most);
        int64_t verified = least_of(found, a->queries - 1);
        int32_t *accepted = entry + ACCEPTED * ring_rows + row;
        if (a->index == 0) {
            entry[VERIFIED * ring_rows + row] = token != -1 ? (int32_t)verified : 0;
            *accepted = 0;
        }
        if (token == -1) continue;
        int is_same = a->index < found && (a->index == 0 || a->index < verified) &&
                      a->drafts.data[row * most + a->index] == token;
        *accepted += is_same;
        if (a->finished.data[row]) continue;
        int64_t position = a->pre_step_seqlens.data[row];
        if (position >= 0 && position < width) a->history.data[row * width + position] = (int32_t)token;
        if (is_same && a->index < verified) active = (int32_t)row + 1;
        else a->finished.data[row] = HELD;
    }
    *a->active_rows.data = active;
}
#endif
