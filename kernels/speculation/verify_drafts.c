/* Queries of rows with drafts, and their verification; see verify_drafts.py. */
#include "native.h"

KERNEL(spread_queries) {
    (void)threads;
    int64_t rows = a->tokens.size[0], pages = a->page_table.size[1], most = a->drafts.size[1];
    int64_t live = live_of(a->live_rows.data, rows);
    *a->live_queries.data = (int32_t)(live * a->queries);
    for (int64_t row = 0; row < rows; row++) {
        int64_t count = row < live && !a->finished.data[row] ? a->num_drafts.data[row] : 0;
        for (int64_t behind = 0; behind < a->queries; behind++) {
            int64_t query = row * a->queries + behind;
            int used = row < live && (behind == 0 || (behind <= count && behind <= most));
            int32_t *table = a->query_pages.data + query * pages;
            a->query_tokens.data[query] = !used ? DEAD_TOKEN
                                          : behind ? a->drafts.data[row * most + behind - 1]
                                                   : a->tokens.data[row];
            a->query_positions.data[query] = used ? a->pre_step_seqlens.data[row] + (int32_t)behind : 0;
            if (used) memcpy(table, a->page_table.data + row * pages, pages * sizeof *table);
            else for (int64_t i = 0; i < pages; i++) table[i] = (int32_t)a->null_page;
        }
    }
}

KERNEL(judge_drafts) {
    (void)threads;
    int64_t length = a->ring_tokens.size[0], ring_rows = a->ring_tokens.size[1], most = a->drafts.size[1];
    int64_t width = a->history.size[1], newest = *a->step_index.data - 1;
    int64_t first = ((newest - a->index) % length + length) % length;
    int64_t live = live_of(a->live_rows.data, least_of(a->finished.size[0], ring_rows));
    const int64_t *tokens = a->ring_tokens.data + (newest % length + length) % length * ring_rows;
    int32_t *entry = a->ring_drafts.data + first * ring_rows * DRAFT_COLUMNS, active = 0;
    for (int64_t row = 0; row < live; row++) {
        int64_t token = tokens[row], num_drafts = least_of(a->num_drafts.data[row], most);
        int64_t verified = least_of(num_drafts, a->queries - 1);
        int32_t *accepted = entry + ACCEPTED * ring_rows + row;
        if (a->index == 0) {
            entry[VERIFIED * ring_rows + row] = token != -1 ? (int32_t)verified : 0;
            *accepted = 0;
        }
        if (token == -1) continue;
        int is_same = a->index < num_drafts && (a->index == 0 || a->index < verified) &&
                      a->drafts.data[row * most + a->index] == token;
        *accepted += is_same;
        if (a->finished.data[row]) continue;
        int64_t position = a->pre_step_seqlens.data[row];
        if (position >= 0 && position < width) a->history.data[row * width + position] = (int32_t)token;
        if (is_same && a->index < verified) active = (int32_t)row + 1;
        else a->finished.data[row] = PAUSED;
    }
    *a->active_rows.data = active;
}

KERNEL(settle_drafts) {
    (void)threads;
    int64_t length = a->ring_drafts.size[0], ring_rows = a->ring_drafts.size[2], most = a->drafts.size[1];
    int64_t first = ((*a->step_index.data - a->queries) % length + length) % length;
    int64_t live = live_of(a->live_rows.data, least_of(a->finished.size[0], ring_rows));
    int32_t *entry = a->ring_drafts.data + first * ring_rows * DRAFT_COLUMNS, still = 0;
    for (int64_t row = 0; row < live; row++) {
        int64_t num_drafts = 0;
        int32_t *limit = a->draft_limit.data + row;
        if (a->finished.data[row] == PAUSED) a->finished.data[row] = 0;
        int ended = a->finished.data[row] != 0;
        if (!ended) {
            int64_t verified = entry[VERIFIED * ring_rows + row], accepted = entry[ACCEPTED * ring_rows + row];
            still++;
            if (a->adapts && verified > 0 && *limit > 0) {
                int64_t half = (accepted + *limit + 1) / 2, lower = least_of(half > 2 ? half : 2, most);
                *limit = (int32_t)(accepted >= verified ? least_of(2 * (int64_t)*limit, most) : lower);
            }
            int64_t room = (int64_t)a->last_position.data[row] - 1 - a->pre_step_seqlens.data[row];
            num_drafts = least_of(least_of(a->num_drafts.data[row], *limit), room);
            if (num_drafts < 0) num_drafts = 0;
        }
        a->num_drafts.data[row] = entry[CANDIDATES * ring_rows + row] = (int32_t)num_drafts;
        entry[MATCHED * ring_rows + row] = ended ? 0 : a->match_lengths.data[row];
    }
    *a->running.data = still;
    *a->step_entries.data = (int32_t)a->queries;
}
