/* Attention in bf16 as the processor multiplies it (native_products.h): keys and values come out of their pages into
 * panels, and queries, weights and values stay bf16; sums, maxima and the exponential are floats.
 */
#ifndef GRAPHDECODE_ATTENTION_PAIRS_H
#define GRAPHDECODE_ATTENTION_PAIRS_H

#include "native_codes.h"
#include "native_products.h"

#define LOG2_OF_E 1.44269504f
#define KEYS 128     /* that are in panels at once */
#define MOST_DIM 512 /* of a head, for pairs */
#define STREAMS 4    /* of keys, and as many of values, that are asked for at once */
#define LEAST_LOGIT -1e30f /* of a query that has seen nothing */

/* What becomes of products of queries and keys. A variant of attention that changes logits is a field of this record, and
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

/* Logits times `unit`: scale * products, or cap * tanh(scale * products / cap), where tanh(x) = 1 - 2 / (e^2x + 1). */
INLINE vec logits_from(vec products, struct logits of, float unit) {
    if (of.cap > 0.0f)
        return (of.cap - 2.0f * of.cap / (exp_lanes(products * (2.0f * of.scale / of.cap)) + 1.0f)) * unit;
    return products * (of.scale * unit);
}

/* The same of whole vectors in their place, whose queries were scaled before. */
static void change_logits(float *logits, int64_t count, struct logits of) {
    of.scale = 1.0f;
    for (int64_t j = 0; are_changed(of) && j < count; j += LANES)
        store_f32(logits + j, logits_from(load_f32(logits + j), of, 1.0f));
}

/* Where the entries of a row's tokens stand. */
struct paged {
    const int32_t *pages;
    int64_t count, size, entry; /* pages of the cache, tokens of one, elements of a token */
};

static int64_t page_of(const struct paged *row, int64_t at) {
    int64_t page = row->pages[at];
    return page < 0 || page >= row->count ? row->count - 1 : page; /* the trash page: never other memory */
}

/* Find where the entries of `count` tokens from `first` on begin. */
static void locate(int64_t *places, const struct paged *row, int64_t first, int64_t count) {
    int64_t at = first / row->size, offset = first % row->size;
    for (int64_t j = 0; j < count; at++, offset = 0) {
        int64_t begin = (page_of(row, at) * row->size + offset) * row->entry, here = least_of(row->size - offset, count - j);
        for (int64_t k = 0; k < here; k++) places[j + k] = begin + k * row->entry;
        j += here;
    }
}

/* What is asked for of the block that is next: keys and values of some heads, which stand side by side, in STREAMS parts
 * of the tokens. A processor that sees lines of a page go by fetches those behind them by itself, and does so for several
 * pages at once. It is asked for a few lines at a time, between what is done with the block that is here: a core waits
 * where it has asked for more lines than it can. */
struct coming {
    const char *keys, *values; /* of the first head */
    const int64_t *places;
    int64_t count, bytes, size; /* tokens; of all heads' keys of one, and of a value */
    int64_t token, due;         /* of each part, that is next; bytes of all of them that should have been asked for */
    int64_t at[STREAMS], byte, left; /* of each part's token that is being asked for, and how many bytes of it are left */
};

/* Go on to the next token of each part. */
static void go_on(struct coming *next, int64_t tokens) {
    for (int64_t part = 0; part < STREAMS; part++)
        next->at[part] = next->places[least_of(next->token + part * tokens, next->count - 1)] * next->size;
    next->token++, next->byte = 0, next->left = next->bytes;
}

INLINE void ask_for(struct coming *next, int64_t bytes) {
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

/* How many bytes are asked for in all. */
static inline int64_t bytes_of(const struct coming *next) {
    return (next->count + STREAMS - 1) / STREAMS * ((next->bytes + 63) / 64) * 2 * STREAMS * 64;
}

static inline void ask_for_rest(struct coming *next) { ask_for(next, bytes_of(next)); }

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

#ifdef WITH_PAIRS

/* Queries of one key head, and what is known of their results so far. */
struct pair_queries {
    const uint16_t *q;      /* [count][dim] */
    float *sums;            /* [count][dim] */
    float *largest, *total; /* of the logits times log2(e), and of their powers of 2 */
    int64_t count, dim;
    int64_t position, group; /* of the first query's token; queries of one token */
    struct logits logits;
};

/* Room for a block: of KEYS keys and values in panels, their scales where they have any, and of what becomes of
 * TOGETHER_IN_PAIRS queries; of weights there are twice as many. */
struct pair_room {
    uint16_t *keys, *values, *weights;
    float *logits, *added, *key_scales, *value_scales;
};

static int64_t pair_room_floats(int64_t dim) {
    return KEYS * dim + TOGETHER_IN_PAIRS * (KEYS + KEYS + PANEL) + 2 * KEYS + 8 * LANES;
}

static struct pair_room pair_room_at(float **at, int64_t dim, int has_scales) {
    struct pair_room room = {0};
    room.keys = (uint16_t *)carved(at, KEYS * dim / 2), room.values = (uint16_t *)carved(at, KEYS * dim / 2);
    room.weights = (uint16_t *)carved(at, TOGETHER_IN_PAIRS * KEYS);
    room.logits = carved(at, TOGETHER_IN_PAIRS * KEYS), room.added = carved(at, TOGETHER_IN_PAIRS * PANEL);
    if (has_scales) {
        room.key_scales = carved(at, KEYS), room.value_scales = carved(at, KEYS);
        memset(room.key_scales, 0, 2 * KEYS * sizeof *room.key_scales);
    }
    memset(room.weights, 0, TOGETHER_IN_PAIRS * KEYS * sizeof *room.weights);
    return room;
}

/* Run a function for each kind of cached entries, with `code` as a constant: int8, fp8 e4m3, or 0 for bf16. */
#define BY_CODE(code, function, ...)                                              \
    switch (code) {                                                               \
        case CODE_INT8: function(CODE_INT8, __VA_ARGS__); break;                  \
        case CODE_FLOAT8_E4M3FN: function(CODE_FLOAT8_E4M3FN, __VA_ARGS__); break; \
        default: function(0, __VA_ARGS__);                                        \
    }

/* 2 * LANES values, from the `i`th on, of the `j`th entry of a block as bf16; zeros before `begin`, which nobody sees, and
 * from `count` on. `code` is a constant where this is used. */
INLINE uvec seen_values(const int64_t code, const void *entries, const int64_t *places, int64_t j, int64_t begin,
                        int64_t count, int64_t i) {
    if (j < begin || j >= count) return (uvec){0};
    if (code) return bf16_of_codes(code, (const uint8_t *)entries + places[j] + i);
    return load_words((const uint16_t *)entries + places[j] + i);
}

/* Bring the keys of one head into panels, [feature / 2][key][2], up to the end of the last panel. */
INLINE void gather_keys(const int64_t code, const struct pair_room *room, const void *keys, const int64_t *places,
                        int64_t begin, int64_t count, int64_t dim) {
    for (int64_t j = 0; j < count; j += LANES)
        for (int64_t i = 0; i < dim; i += 2 * LANES) {
            uvec words[LANES];
            for (int64_t k = 0; k < LANES; k++) words[k] = seen_values(code, keys, places, j + k, begin, count, i);
            write_turned((uint32_t *)(room->keys + j / PANEL * PANEL * dim) + i / 2 * PANEL + j % PANEL, PANEL, words);
        }
    for (int64_t j = (count + LANES - 1) / LANES * LANES; j % PANEL; j += LANES) /* the rest of the last panel */
        for (int64_t i = 0; i < dim / 2; i++)
            memset((uint32_t *)(room->keys + j / PANEL * PANEL * dim) + i * PANEL + j % PANEL, 0, 4 * LANES);
}

/* The same of their values, [key / 2][feature][2]; PANEL features stand as two instructions make pairs of them: see
 * `in_order`. */
INLINE void gather_values(const int64_t code, const struct pair_room *room, const void *values, const int64_t *places,
                          int64_t begin, int64_t count, int64_t dim) {
    for (int64_t j = 0; j < (count + PANEL - 1) / PANEL * PANEL; j += 2)
        for (int64_t i = 0; i < dim; i += 2 * LANES) {
            uvec even = seen_values(code, values, places, j, begin, count, i);
            uvec odd = seen_values(code, values, places, j + 1, begin, count, i);
            uint16_t *to = room->values + i / PANEL * PANEL * KEYS + j * PANEL + i % PANEL * 2;
            store_words(to, first_pairs(even, odd));
            store_words(to + 2 * LANES, next_pairs(even, odd));
        }
}

/* Turn one query's logits, `panels` (a constant) times PANEL, into weights; return by what to multiply what was summed
 * before. It sees the keys from `begin` to `end`, of which there is at least one. */
INLINE float weights_of_panels(const int panels, uint16_t *weights, const float *logits, const struct pair_room *room,
                               int64_t begin, int64_t end, struct logits of, float *largest, float *total) {
    const ivec lanes = lane_numbers();
    vec v[KEYS / LANES], sum = splat(0.0f), most = splat(-INFINITY);
    for (int n = 0; n < panels * VECTORS; n++) {
        v[n] = load_f32(logits + n / VECTORS * TOGETHER_IN_PAIRS * PANEL + n % VECTORS * LANES);
        if (room->key_scales) v[n] *= load_f32(room->key_scales + n * LANES);
        v[n] = logits_from(v[n], of, LOG2_OF_E);
    }
    if (begin > 0 || end < panels * PANEL)
        for (int n = 0; n < panels * VECTORS; n++) {
            ivec key = lanes + n * LANES, seen = (key >= (int32_t)begin) & (key < (int32_t)end);
            v[n] = (vec)((seen & (ivec)v[n]) | (~seen & (ivec)splat(-INFINITY)));
        }
    for (int n = 0; n < panels * VECTORS; n++) most = greater_of(most, v[n]);
    float top = greatest_of(most), shrink = 1.0f;
    if (top > *largest) {
        shrink = exp2f(*largest - top);
        *largest = top;
    }
    for (int n = 0; n < panels * VECTORS; n++) {
        vec weight = exp2_lanes(v[n] - *largest);
        sum += weight;
        if (room->value_scales) weight *= load_f32(room->value_scales + n * LANES);
        store_bf16(weights + n * LANES, weight);
    }
    *total = *total * shrink + sum_lanes(sum);
    return shrink;
}

static float weights_of(int64_t panels, uint16_t *weights, const float *logits, const struct pair_room *room,
                        int64_t begin, int64_t end, struct logits of, float *largest, float *total) {
    switch (panels) {
        case 1: return weights_of_panels(1, weights, logits, room, begin, end, of, largest, total);
        case 2: return weights_of_panels(2, weights, logits, room, begin, end, of, largest, total);
        case 3: return weights_of_panels(3, weights, logits, room, begin, end, of, largest, total);
        default: return weights_of_panels(4, weights, logits, room, begin, end, of, largest, total);
    }
}
_Static_assert(KEYS == 4 * PANEL, "a block has up to four panels");

/* Let TOGETHER_IN_PAIRS queries from `from` on, or as many as there are, attend to `count` keys that begin at `first`,
 * with their logits and the values in `room`. Where there are tiles, their shapes are set. */
static void weigh_values(const struct pair_queries *queries, const struct pair_room *room, int64_t from, int64_t first,
                         int64_t count) {
    int64_t dim = queries->dim, panels = (count + PANEL - 1) / PANEL, rows = queries->count - from;
    float shrinks[TOGETHER_IN_PAIRS];
    rows = least_of(rows, TOGETHER_IN_PAIRS);
    for (int64_t r = 0; r < rows; r++) {
        int64_t own = queries->position + (from + r) / queries->group - first, seen = least_of(own + 1, count);
        int64_t window = window_at(queries->logits, own + first);
        int64_t unseen = window >= 0 && own > window ? own - window : 0;
        uint16_t *weights = room->weights + r * KEYS;
        if (unseen < seen) {
            shrinks[r] = weights_of(panels, weights, room->logits + r * PANEL, room, unseen, seen, queries->logits,
                                    queries->largest + from + r, queries->total + from + r);
        } else {
            shrinks[r] = 1.0f;
            memset(weights, 0, panels * PANEL * sizeof *weights);
        }
    }
    for (int64_t i = 0; i < dim; i += PANEL) {
        pair_products(room->added, room->weights, KEYS, room->values + i * KEYS, panels * PANEL, rows);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < PANEL; j += LANES) {
                float *sum = queries->sums + (from + r) * dim + i + j;
                store_f32(sum, load_f32(sum) * shrinks[r] + load_f32(room->added + r * PANEL + j));
            }
    }
}

/* Let many queries attend to the keys and values in `room`. */
static void attend_panels(const struct pair_queries *queries, const struct pair_room *room, int64_t first, int64_t count) {
    int64_t dim = queries->dim;
    for (int64_t from = 0; from < queries->count; from += TOGETHER_IN_PAIRS) {
        int64_t rows = least_of(queries->count - from, TOGETHER_IN_PAIRS);
        if (queries->position + (from + rows - 1) / queries->group < first) continue; /* all of the keys come later */
        for (int64_t n = 0; n < (count + PANEL - 1) / PANEL; n++)
            pair_products(room->logits + n * TOGETHER_IN_PAIRS * PANEL, queries->q + from * dim, dim,
                          room->keys + n * PANEL * dim, dim, rows);
        weigh_values(queries, room, from, first, count);
    }
}

#endif
#endif
