/* The lengths that a decode step attends over; see attention_plan.py. Nothing is split on a CPU. */
#include "native.h"

#ifndef ELEMENT_BF16
/* kv_lens, pre_step_seqlens, live_rows, rows */
void attention_plan(const arg *args) {
    int32_t *kv_lens = args[0].p;
    const int32_t *before = args[1].p;
    int32_t live = *(const int32_t *)args[2].p;
    for (int64_t row = 0; row < args[3].i; row++) kv_lens[row] = row < live ? before[row] + 1 : 0;
}
#endif
