/* From rows with drafts to queries; see spread_queries.py. */
#include "native.h"

#ifdef ELEMENT_F32
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
            else for (int64_t i = 0; i < pages; i++) table[i] = (int32_t)a->trash_page;
        }
    }
}
#endif
