/* Low-rank adapters of a product; see add_adapters.py for the formulas and the shapes. */
#include "native.h"

#define ADAPTER_ROWS 4    /* of `down`, that are multiplied with a token at once */
#define ADAPTER_VECTORS 4 /* of outputs, that are summed up at once */
#define WHOLE_PARTS 3     /* of tokens, for each thread, from which on a thread does all that one needs */

/* The slot of a token's adapter, and its rank: 0 where it has none. */
static int64_t NAME(adapter_of)(const AdapterTokens *tokens, int64_t most, int64_t token, int64_t *rank) {
    const int32_t slot = tokens->adapters.data[tokens->rows.data[token]];
    *rank = slot < 0 || slot >= tokens->ranks.size[0] ? 0 : least_of(tokens->ranks.data[slot], most);
    return slot;
}

static int NAME(has_adapters)(const AdapterTokens *tokens, int64_t most, int64_t live) {
    int64_t rank = 0;
    for (int64_t token = 0; token < live && rank <= 0; token++) NAME(adapter_of)(tokens, most, token, &rank);
    return rank > 0;
}

INLINE void NAME(down_rows)(const int count, float *to, const element *x, const element *rows, int64_t width) {
    vec sums[ADAPTER_ROWS];
    int64_t i = 0;
#pragma GCC unroll 4
    for (int r = 0; r < count; r++) sums[r] = splat(0.0f);
    for (; i + LANES <= width; i += LANES) {
        const vec values = load(x + i);
#pragma GCC unroll 4
        for (int r = 0; r < count; r++) sums[r] += values * load(rows + r * width + i);
    }
    for (int r = 0; r < count; r++) {
        float total = 0.0f;
        for (int lane = 0; lane < LANES; lane++) total += sums[r][lane];
        for (int64_t j = i; j < width; j++) total += widen(x[j]) * widen(rows[r * width + j]);
        to[r] = total;
    }
}

/* Items are tokens, times the parts, times the groups of rows of a part. */
static void NAME(down_items)(const void *job, int64_t begin, int64_t end) {
    const add_adapters_args *a = job;
    const int64_t parts = a->down.size[1], most = a->down.size[2], width = a->down.size[3];
    const int64_t groups = (most + ADAPTER_ROWS - 1) / ADAPTER_ROWS;
    for (int64_t item = begin; item < end; item++) {
        const int64_t token = item / (parts * groups), part = item / groups % parts, first = item % groups * ADAPTER_ROWS;
        int64_t rank, slot = NAME(adapter_of)(&a->tokens, most, token, &rank), count = least_of(ADAPTER_ROWS, rank - first);
        if (count <= 0) continue;
        const element *x = (const element *)a->x.data + token * a->x.stride[0];
        const element *rows = (const element *)a->down.data + ((slot * parts + part) * most + first) * width;
        float *to = a->inner.data + (token * parts + part) * most + first;
        if (count == ADAPTER_ROWS) NAME(down_rows)(ADAPTER_ROWS, to, x, rows, width);
        else
            for (int64_t r = 0; r < count; r++) NAME(down_rows)(1, to + r, x, rows + r * width, width);
    }
}

/* Add to outputs from `at` on, whole vectors of one part. */
INLINE void NAME(up_vectors)(const int is_wide, const int vectors, char *out, int64_t at, const float *inner,
                             const element *up, int64_t rank, int64_t width) {
    vec sums[ADAPTER_VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++) sums[i] = load_at(is_wide, out, at + i * LANES);
    for (int64_t r = 0; r < rank; r++)
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) sums[i] += inner[r] * load(up + r * width + at + i * LANES);
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++) store_at(is_wide, out, at + i * LANES, sums[i]);
}

/* Add to some outputs of one part. */
INLINE void NAME(up_span)(const int is_wide, char *out, int64_t begin, int64_t end, const float *inner, const element *up,
                          int64_t rank, int64_t width) {
    int64_t at = begin;
    for (; at + ADAPTER_VECTORS * LANES <= end; at += ADAPTER_VECTORS * LANES)
        NAME(up_vectors)(is_wide, ADAPTER_VECTORS, out, at, inner, up, rank, width);
    for (; at + LANES <= end; at += LANES) NAME(up_vectors)(is_wide, 1, out, at, inner, up, rank, width);
    for (; at < end; at++) {
        float total = widen_at(is_wide, out, at);
        for (int64_t r = 0; r < rank; r++) total += inner[r] * widen(up[r * width + at]);
        narrow_at(is_wide, out, at, total);
    }
}

/* Items are tokens times the parts. */
static void NAME(up_items)(const void *job, int64_t begin, int64_t end) {
    const add_adapters_args *a = job;
    const int64_t parts = a->down.size[1], most = a->down.size[2], width = a->up.size[2], is_wide = IS_WIDE(a->out);
    for (int64_t item = begin; item < end; item++) {
        const int64_t token = item / parts, part = item % parts;
        int64_t rank, slot = NAME(adapter_of)(&a->tokens, most, token, &rank);
        if (rank <= 0) continue;
        char *out = (char *)a->out.data + token * a->out.stride[0] * width_of(is_wide);
        const float *inner = a->inner.data + (token * parts + part) * most;
        const element *up = (const element *)a->up.data + slot * most * width;
        BY_WIDTH(is_wide, NAME(up_span), out, part ? a->ends.data[part - 1] : 0, a->ends.data[part], inner, up, rank, width);
    }
}

/* Items are tokens times the parts. */
static void NAME(part_items)(const void *job, int64_t begin, int64_t end) {
    const int64_t most = ((const add_adapters_args *)job)->down.size[2];
    const int64_t groups = (most + ADAPTER_ROWS - 1) / ADAPTER_ROWS;
    for (int64_t item = begin; item < end; item++) {
        NAME(down_items)(job, item * groups, (item + 1) * groups);
        NAME(up_items)(job, item, item + 1);
    }
}

KERNEL(add_adapters) {
    const int64_t live = live_of(a->live.data, a->out.size[0]), parts = a->down.size[1], most = a->down.size[2];
    const int64_t groups = (most + ADAPTER_ROWS - 1) / ADAPTER_ROWS;
    const int64_t work = most * (a->down.size[3] + a->up.size[2] / parts);
    if (!NAME(has_adapters)(&a->tokens, most, live)) return;
    if (live * parts >= WHOLE_PARTS * threads) {
        parallel(threads, NAME(part_items), a, live * parts, items_of(PARALLEL_WORK, work));
        return;
    }
    parallel(threads, NAME(down_items), a, live * parts * groups, items_of(PARALLEL_WORK, ADAPTER_ROWS * a->down.size[3]));
    parallel(threads, NAME(up_items), a, live * parts, items_of(PARALLEL_WORK, most * a->up.size[2] / parts));
}

/* Items are tokens; a token's row of the table, scaled, takes the place of the sums of a product. */
static void NAME(embedding_items)(const void *job, int64_t begin, int64_t end) {
    const add_embedding_adapters_args *a = job;
    const int64_t vocab = a->table.size[1], most = a->table.size[2], width = a->up.size[2], is_wide = IS_WIDE(a->out);
    float inner[most];
    for (int64_t token = begin; token < end; token++) {
        int64_t rank, slot = NAME(adapter_of)(&a->tokens, most, token, &rank), id = a->ids.data[token];
        if (rank <= 0) continue;
        if (id < 0 || id >= vocab) id = 0;
        const element *row = (const element *)a->table.data + (slot * vocab + id) * most;
        for (int64_t r = 0; r < rank; r++) inner[r] = (float)a->scale * widen(row[r]);
        char *out = (char *)a->out.data + token * a->out.stride[0] * width_of(is_wide);
        const element *up = (const element *)a->up.data + slot * most * width;
        BY_WIDTH(is_wide, NAME(up_span), out, 0, width, inner, up, rank, width);
    }
}

KERNEL(add_embedding_adapters) {
    const int64_t live = live_of(a->live.data, a->out.size[0]), most = a->table.size[2];
    if (!NAME(has_adapters)(&a->tokens, most, live)) return;
    parallel(threads, NAME(embedding_items), a, live, items_of(PARALLEL_WORK, most * a->up.size[2]));
}
