/* Follow each row's automaton by the token that the row sampled; see follow_automata.py. */
#include "native.h"

KERNEL(follow_automata) {
    (void)threads;
    int64_t live = live_of(a->live_rows.data, a->sampled.size[0]), vocab = a->automaton_classes.size[1];
    int64_t classes = a->automaton_next.size[1], words = a->automaton_masks.size[1], stops = a->stop_ids.size[1];
    for (int64_t row = 0; row < live; row++) {
        int64_t state = a->automaton_state.data[row], token = a->sampled.data[row];
        if (state < 0 || a->finished.data[row] || token < 0 || token >= vocab) continue;
        int32_t class = a->automaton_classes.data[a->automaton.data[row] * vocab + token];
        int32_t line = a->automaton_next.data[state * classes + class];
        if (line < 0 || a->automaton_ends.data[line] & COMPLETES) {
            a->finished.data[row] = 1;
            --*a->running.data;
            continue;
        }
        uint32_t *mask = (uint32_t *)a->next_mask.data + row * words;
        a->automaton_state.data[row] = line;
        memcpy(mask, a->automaton_masks.data + line * words, (size_t)words * sizeof *mask);
        if (!(a->automaton_ends.data[line] & ACCEPTS)) continue;
        const int32_t *stop = a->stop_ids.data + row * stops;
        for (int64_t i = 0; i < stops && stop[i] >= 0; i++)
            if (stop[i] / MASK_BITS < words) mask[stop[i] / MASK_BITS] |= (uint32_t)1 << stop[i] % MASK_BITS;
    }
}
