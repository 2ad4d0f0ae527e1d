/* The lengths that a decode step attends over; see attention_plan.py. Nothing is split on a CPU. */
#include "native.h"

KERNEL(attention_plan) {
    (void)threads;
    int64_t rows = least_of(a->pre_step_seqlens.size[0], a->kv_lens.size[0]), live = live_of(a->live_rows.data, rows);
    for (int64_t row = 0; row < rows; row++) {
        int64_t length = row < live ? (int64_t)a->pre_step_seqlens.data[row] + 1 : 0;
        a->kv_lens.data[row] = (int32_t)least_of(length, INT32_MAX);
    }
}
