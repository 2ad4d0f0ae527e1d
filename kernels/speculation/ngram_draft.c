/* Prompt lookup: earlier occurrences of a row's last tokens; see ngram_draft.py. */
#include "native.h"

/* The latest position before `end` whose token equals the last one; -1: none. */
static int64_t place_before(const int32_t *line, int64_t end, int32_t token) {
    for (; end >= LANES; end -= LANES) {
        ivec same;
        int32_t any = 0;
        memcpy(&same, line + end - LANES, sizeof same);
        same = same == token;
        for (int lane = 0; lane < LANES; lane++) any |= same[lane];
        if (!any) continue;
        for (int64_t i = LANES - 1; i >= 0; i--)
            if (same[i]) return end - LANES + i;
    }
    while (end-- > 0)
        if (line[end] == token) return end;
    return -1;
}

KERNEL(ngram_draft) {
    (void)threads;
    int64_t rows = a->drafts.size[0], most = a->drafts.size[1], width = a->history.size[1];
    int64_t live = live_of(a->live_rows.data, rows);
    for (int64_t row = 0; row < live; row++) {
        const int32_t *line = a->history.data + row * width;
        int64_t last = least_of(a->positions.data[row], width - 1), best = 0, found = -1;
        int64_t place = last > 0 ? place_before(line, last, line[last]) : -1;
        for (; place >= 0 && best < a->ngram_max; place = place_before(line, place, line[last])) {
            int64_t length = 1, longest = least_of(a->ngram_max, place + 1);
            while (length < longest && line[place - length] == line[last - length]) length++;
            if (length > best) best = length, found = place;
        }
        int is_found = best >= a->ngram_min && best > 0;
        a->num_drafts.data[row] = is_found ? (int32_t)most : 0;
        a->match_lengths.data[row] = is_found ? (int32_t)best : 0;
        for (int64_t i = 0; is_found && i < most; i++)
            a->drafts.data[row * most + i] = line[found + 1 + i % (last - found)];
    }
}
