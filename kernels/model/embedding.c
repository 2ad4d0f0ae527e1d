/* Token embedding; see embedding.py. Dead tokens, and ids that no row has, read row 0. */
#include "native.h"

KERNEL(embedding) {
    (void)threads;
    int64_t live = *a->live.data, hidden = a->weight.size[1];
    for (int64_t i = 0; i < a->tokens.size[0]; i++) {
        int64_t given = i < live ? a->tokens.data[i] : 0, token = given >= 0 && given < a->weight.size[0] ? given : 0;
        const element *row = (const element *)a->weight.data + token * a->weight.stride[0];
        element *out = (element *)a->out.data + i * hidden;
        if (a->scale == 1.0) memcpy(out, row, hidden * sizeof(element));
        else for (int64_t j = 0; j < hidden; j++) out[j] = narrow(widen(row[j]) * (float)a->scale);
    }
}
