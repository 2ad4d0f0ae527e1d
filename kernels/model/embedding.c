/* Token embedding; see embedding.py. Dead tokens, and ids that no row has, read row 0. */
#include "native.h"

/* out, tokens, weight, live, number of tokens, hidden, stride of weight, vocabulary */
void NAME(embedding)(const arg *args) {
    element *out = args[0].p;
    const int64_t *tokens = args[1].p;
    const element *weight = args[2].p;
    int64_t live = *(const int32_t *)args[3].p, count = args[4].i, hidden = args[5].i;
    for (int64_t i = 0; i < count; i++) {
        int64_t token = i < live && tokens[i] >= 0 && tokens[i] < args[7].i ? tokens[i] : 0;
        memcpy(out + i * hidden, weight + token * args[6].i, hidden * sizeof(element));
    }
}
