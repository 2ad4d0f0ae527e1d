/* Token embedding; see embedding.py. Dead tokens, and ids that no row has, read row 0. */
#include "native.h"

INLINE void NAME(embed)(const int is_wide, void *out, const element *row, int64_t hidden, float scale) {
    int64_t i = 0;
    if (scale == 1.0f && width_of(is_wide) == sizeof *row) {
        memcpy(out, row, hidden * sizeof *row);
        return;
    }
    for (; i + LANES <= hidden; i += LANES) store_at(is_wide, out, i, load(row + i) * scale);
    for (; i < hidden; i++) narrow_at(is_wide, out, i, widen(row[i]) * scale);
}

KERNEL(embedding) {
    (void)threads;
    int64_t live = *a->live.data, hidden = a->weight.size[1], is_wide = IS_WIDE(a->out);
    for (int64_t i = 0; i < a->tokens.size[0]; i++) {
        int64_t given = i < live ? a->tokens.data[i] : 0, token = given >= 0 && given < a->weight.size[0] ? given : 0;
        const element *row = (const element *)a->weight.data + token * a->weight.stride[0];
        char *out = (char *)a->out.data + i * hidden * width_of(is_wide);
        BY_WIDTH(is_wide, NAME(embed), out, row, hidden, (float)a->scale);
    }
}
