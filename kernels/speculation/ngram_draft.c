/* Prompt lookup: earlier occurrences of a row's last tokens; see ngram_draft.py. */
#include "native.h"

/* The latest position before `end` whose token equals the last one; -1: none. */
static int64_t previous_occurrence(const int32_t *line, int64_t end, int32_t token) {
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
        int64_t last = least_of(a->positions.data[row], width - 1), best = 0, match = -1;
        int64_t occurrence = last > 0 ? previous_occurrence(line, last, line[last]) : -1;
        for (; occurrence >= 0 && best < a->ngram_max; occurrence = previous_occurrence(line, occurrence, line[last])) {
            int64_t length = 1, longest = least_of(a->ngram_max, occurrence + 1);
            while (length < longest && line[occurrence - length] == line[last - length]) length++;
            if (length > best) best = length, match = occurrence;
        }
        int has_match = best >= a->ngram_min && best > 0;
        a->num_drafts.data[row] = has_match ? (int32_t)most : 0;
        a->match_lengths.data[row] = has_match ? (int32_t)best : 0;
        for (int64_t i = 0; has_match && i < most; i++)
            a->drafts.data[row * most + i] = line[match + 1 + i % (last - match)];
    }
}
