/* Shared by all attention: options of the logits, offsets of a row's entries, and prefetches of the next block. */
#ifndef GRAPHDECODE_ATTENTION_PAGES_H
#define GRAPHDECODE_ATTENTION_PAGES_H

#include "native_codes.h"
#include "native_products.h"

#define LOG2_OF_E 1.44269504f
#define KEYS 128     /* of a block */
#define MOST_DIM 576 /* of a head, for tiles of few queries */
#define STREAMS 4    /* of keys, and as many of values, that are prefetched at once */
#define LEAST_LOGIT -1e30f /* of a query that has seen nothing */

/* Options of the products of queries and keys. A variant of attention that changes logits is a field of this record, and
 * what `logits_from` makes of it. */
struct logits {
    float scale, cap;
    int64_t window, is_chunked;
};

static struct logits logits_of(const AttentionOptions *options) {
    return (struct logits){(float)options->sm_scale, (float)options->logits_soft_cap, options->window_left,
                           options->is_chunked};
}

/* How many keys before its own a query at a position sees; less than 0: all. */
INLINE int64_t window_at(struct logits of, int64_t position) {
    return of.is_chunked ? position % (of.window + 1) : of.window;
}

/* Whether logits are something else than a positive multiple of the products. */
INLINE int are_changed(struct logits of) { return of.cap > 0.0f || of.scale <= 0.0f; }

/* Changed logits: scale * products, or cap * tanh(scale * products / cap). */
INLINE vec logits_from(vec products, struct logits of) {
    if (of.cap <= 0.0f) return products * of.scale;
    return of.cap * tanh_lanes(products * (of.scale / of.cap));
}

/* Logits that are not changed stay products: a weight is the power of a difference of two of them, so that the largest
 * one's is 1, however much of a large logit is rounded off. `unit` is the exponent of such a power for a logit of 1, the
 * result what it is for a logit as it is kept. */
INLINE float unit_of(struct logits of, float unit) { return are_changed(of) ? unit : of.scale * unit; }

/* A sink as a logit of a key is kept. */
INLINE float sink_logit(float sink, struct logits of) { return are_changed(of) ? sink : sink / of.scale; }

/* Values that are the last channels of latent keys are read as whole keys: how many channels come before them, and where
 * the values of the first entry begin. */
#define SKIPPED(a) ((a)->q.size[2] - (a)->v_cache.size[3])
#define VALUES(a) ((const char *)(a)->v_cache.data - SKIPPED(a) * ((a)->k_cache.code ? 1 : (int64_t)sizeof(element)))

/* The pages of a row. */
struct paged {
    const int32_t *pages;
    int64_t count, size, entry; /* pages of the cache, tokens of one, elements of a token */
};
#define PAGES_OF(row, table, keys) \
    {(table).data + (row) * (table).size[1], (keys).size[0], (keys).size[1], (keys).size[2] * (keys).size[3]}

static int64_t page_of(const struct paged *row, int64_t at) {
    int64_t page = row->pages[at];
    return page < 0 || page >= row->count ? row->count - 1 : page; /* the null page: never other memory */
}

/* Find where the entries of `count` tokens from `first` on begin. */
static void locate(int64_t *offsets, const struct paged *row, int64_t first, int64_t count) {
    int64_t at = first / row->size, offset = first % row->size;
    for (int64_t j = 0; j < count; at++, offset = 0) {
        int64_t begin = (page_of(row, at) * row->size + offset) * row->entry, tokens = least_of(row->size - offset, count - j);
        for (int64_t k = 0; k < tokens; k++) offsets[j + k] = begin + k * row->entry;
        j += tokens;
    }
}

/* Prefetches of the next block: keys and values of some heads, which are contiguous, in STREAMS parts of the tokens. A
 * processor that reads lines of a page prefetches those behind them by itself, and does so for several pages at once. A few
 * lines are prefetched at a time, between the work on the current block: a core stalls with more of them than it can hold. */
struct prefetches {
    const char *keys, *values; /* of the first head */
    const int64_t *offsets;
    int64_t count, bytes, size; /* tokens; of all heads' keys of one, and of a value */
    int64_t token, due;         /* of each part, that is next; bytes of all of them that are due */
    int64_t share;              /* bytes of all parts to prefetch with a unit of work, if it is counted */
    int64_t at[STREAMS], byte, left; /* of each part's current token, and how many bytes of it are left */
};

/* Go on to the next token of each part. */
static void go_on(struct prefetches *next, int64_t tokens) {
    for (int64_t part = 0; part < STREAMS; part++)
        next->at[part] = next->offsets[least_of(next->token + part * tokens, next->count - 1)] * next->size;
    next->token++, next->byte = 0, next->left = next->bytes;
}

INLINE void prefetch(struct prefetches *next, int64_t bytes) {
    int64_t tokens = (next->count + STREAMS - 1) / STREAMS;
    for (next->due += bytes; next->due > 0; next->due -= 2 * STREAMS * 64) {
        if (next->left <= 0) {
            if (next->token >= tokens) return;
            go_on(next, tokens);
        }
        const char *keys = next->keys + next->byte, *values = next->values + next->byte;
#pragma GCC unroll 4
        for (int64_t part = 0; part < STREAMS; part++) {
            __builtin_prefetch(keys + next->at[part], 0, 2);
            __builtin_prefetch(values + next->at[part], 0, 2);
        }
        next->byte += 64, next->left -= 64;
    }
}

/* The bytes of all prefetches. */
static inline int64_t bytes_of(const struct prefetches *next) {
    return (next->count + STREAMS - 1) / STREAMS * ((next->bytes + 63) / 64) * 2 * STREAMS * 64;
}

static inline void prefetch_remaining(struct prefetches *next) { prefetch(next, bytes_of(next)); }

/* Read the scales of one head's entries, [pages][heads][tokens], of `count` tokens from `first` on; before `begin`, which
 * nobody sees, and behind the last, up to a whole panel, they are zeros. */
static void read_scales(float *to, const uint16_t *scales, const struct paged *row, int64_t heads, int64_t head,
                        int64_t first, int64_t begin, int64_t count) {
    int64_t at = first / row->size, offset = first % row->size;
    for (int64_t j = 0; j < count; at++, offset = 0) {
        const uint16_t *of_page = scales + (page_of(row, at) * heads + head) * row->size;
        for (; offset < row->size && j < count; offset++, j++) to[j] = j < begin ? 0.0f : float_of_bf16(of_page[offset]);
    }
    for (int64_t j = count; j % PANEL; j++) to[j] = 0.0f;
}

/* Run a function for each kind of cached entries, with `code` as a constant: int8, fp8 e4m3, or 0 for elements. */
#define BY_CODE(code, function, ...)                                              \
    switch (code) {                                                               \
        case CODE_INT8: function(CODE_INT8, __VA_ARGS__); break;                  \
        case CODE_FLOAT8_E4M3FN: function(CODE_FLOAT8_E4M3FN, __VA_ARGS__); break; \
        default: function(0, __VA_ARGS__);                                        \
    }

#endif
