/* Attention of many queries, each of which is a lane, to blocks of one head's keys and values.
 *
 * What comes out of pages are rows, of keys, and of values turned; queries and weights are panels of QUERY_LANES. Nothing is
 * added up across lanes. Where the processor multiplies bf16, in pairs or tiles (native_products.h), rows and panels are
 * bf16, and a panel has pairs; else they are floats.
 */
#ifndef GRAPHDECODE_ATTENTION_LANES_H
#define GRAPHDECODE_ATTENTION_LANES_H

#include "attention_pages.h"

#if defined(ELEMENT_BF16) && defined(WITH_PAIRS)
#define IN_PAIRS 1
#define QUERY_LANES PANEL
#define UNIT LOG2_OF_E /* of logits, and of their powers */
#define power_of exp2_lanes
typedef uint16_t factor;
#else
#define IN_PAIRS 0
#if LANES == 4 && !defined(__SSE2__) /* 32 registers */
#define QUERY_LANES (4 * LANES)
#else
#define QUERY_LANES (2 * LANES)
#endif
#define ROWS_OF_SUMS (LANES == 16 ? 8 : 6) /* that stay in registers, of QUERY_LANES lanes */
#define ROWS_OF_LANE 8                     /* the same, of LANES */
#define UNIT 1.0f
#define power_of exp_lanes
typedef float factor;
#endif
#define KEY_ROWS 32 /* keys whose logits become weights together */
#define OF_WORD ((int64_t)(4 / sizeof(factor)))  /* factors in a word */
#define OF_VECTOR (OF_WORD * LANES)              /* and in a vector */
#define SLACK 8.0f /* by how much a logit may be above what powers refer to before sums are scaled anew */

/* Features of a head, in pairs up to whole KEY_ROWS: what is behind the last are zeros. */
static int64_t width_of_head(int64_t dim) { return IN_PAIRS ? (dim + KEY_ROWS - 1) / KEY_ROWS * KEY_ROWS : dim; }

/* Queries of one key head, and what is known of their results so far; `width` is that of the head. */
struct query_lanes {
    factor *q;              /* [count / QUERY_LANES][width / OF_WORD][QUERY_LANES][OF_WORD] */
    float *sums;            /* [count / QUERY_LANES][width][QUERY_LANES] */
    float *largest, *total; /* of the logits times UNIT, about, and of their powers */
    int64_t count, dim, width;
    int64_t position, group; /* of the first query's token; queries of one token */
    struct logits logits;
};

/* Room for a block: of KEYS keys, [key][width], their values, [width][KEYS], and scales where they have any; and for what
 * becomes of a panel of queries: logits of KEY_ROWS keys, [key][QUERY_LANES], and weights, [key / OF_WORD][QUERY_LANES]
 * [OF_WORD], of each twice, for tiles multiply meanwhile. */
struct block_room {
    factor *keys, *values, *weights;
    float *logits, *key_scales, *value_scales;
};

static int64_t block_room_floats(int64_t width) {
    return (2 * KEYS * (width + QUERY_LANES)) / OF_WORD + 2 * KEY_ROWS * QUERY_LANES + 2 * KEYS + 6 * LANES;
}

static struct block_room block_room_at(float **at, int64_t width, int has_scales) {
    struct block_room room = {0};
    room.keys = (factor *)carved(at, KEYS * width / OF_WORD), room.values = (factor *)carved(at, KEYS * width / OF_WORD);
    room.weights = (factor *)carved(at, 2 * KEYS * QUERY_LANES / OF_WORD);
    room.logits = carved(at, 2 * KEY_ROWS * QUERY_LANES);
    if (has_scales) {
        room.key_scales = carved(at, KEYS), room.value_scales = carved(at, KEYS);
        memset(room.key_scales, 0, 2 * KEYS * sizeof *room.key_scales);
    }
    return room;
}

/* OF_VECTOR features from the `i`th on, of which there are `dim`, and behind them zeros. */
INLINE uvec features_at(const element *at, int64_t i, int64_t dim) {
#if IN_PAIRS
    uvec words = {0};
    if (i + OF_VECTOR <= dim) return load_words(at + i);
    if (i < dim) memcpy(&words, at + i, sizeof words / 2); /* dim is of whole vectors of floats */
    return words;
#else
    (void)dim;
    return (uvec)load(at + i);
#endif
}

/* Add products of so many features. */
INLINE vec add_factors(vec sums, uvec a, uvec b) {
#if IN_PAIRS
    return dot_pairs(sums, a, b);
#else
    return sums + (vec)a * (vec)b;
#endif
}

/* As `features_at`, of the `j`th entry of a block; zeros before `begin`, which nobody sees, and from `count` on. `code` is a
 * constant where this is used. */
INLINE uvec seen_features(const int64_t code, const void *entries, const int64_t *places, int64_t j, int64_t begin,
                          int64_t count, int64_t i, int64_t dim) {
    if (j < begin || j >= count || i >= dim) return (uvec){0};
    const uint8_t *codes = (const uint8_t *)entries + places[j] + i;
    if (!code) return features_at((const element *)entries + places[j], i, dim);
#if IN_PAIRS
    uint8_t rest[2 * LANES] = {0};
    return bf16_of_codes(code, i + OF_VECTOR <= dim ? codes : memcpy(rest, codes, dim - i));
#else
    return (uvec)load_codes(code, codes);
#endif
}

/* Bring one head's keys and values together, up to whole KEY_ROWS; pairs of features are in the order of `in_order`. */
INLINE void gather(const int64_t code, const struct block_room *room, const void *keys, const void *values,
                   const int64_t *places, int64_t begin, int64_t count, int64_t dim, int64_t width) {
    for (int64_t j = 0; j < count; j += KEY_ROWS) {
        for (int64_t k = j; k < j + KEY_ROWS; k++)
            for (int64_t i = 0; i < width; i += OF_VECTOR)
                store_words(room->keys + k * width + i, seen_features(code, keys, places, k, begin, count, i, dim));
        for (int64_t k = j; k < j + KEY_ROWS; k += OF_VECTOR)
            for (int64_t i = 0; i < width; i += OF_VECTOR) {
                uvec words[OF_WORD][LANES];
                for (int64_t n = 0; n < LANES; n++) {
#if IN_PAIRS
                    uvec even = seen_features(code, values, places, k + 2 * n, begin, count, i, dim);
                    uvec odd = seen_features(code, values, places, k + 2 * n + 1, begin, count, i, dim);
                    words[0][n] = first_pairs(even, odd), words[1][n] = next_pairs(even, odd);
#else
                    words[0][n] = seen_features(code, values, places, k + n, begin, count, i, dim);
#endif
                }
                for (int64_t n = 0; n < OF_WORD; n++)
                    write_turned(room->values + (i + n * LANES) * KEYS + k, KEYS / OF_WORD, words[n]);
            }
    }
}

/* sums[row][lane] of some rows, a multiple of KEY_ROWS in pairs, else of LANES, with a panel of queries or weights;
 * they go on if `goes_on`, a constant where this is used. What is behind the last query's vector may be left alone. */
INLINE void products(const int goes_on, float *sums, const factor *x, int64_t stride, const factor *panel, int64_t in,
                     int64_t rows, int64_t lanes) {
#if IN_PAIRS
#ifdef WITH_TILES
    if (has_tiles) lanes = PANEL;
#endif
    for (int64_t row = 0; lanes > LANES && row < rows; row += KEY_ROWS)
        pair_products(goes_on, sums + row * PANEL, x + row * stride, stride, panel, in, KEY_ROWS);
    for (int64_t row = 0; lanes <= LANES && row < rows; row += MOST_ROWS)
        few_pair_products(MOST_ROWS, 1, goes_on, sums + row * PANEL, x + row * stride, stride, panel, in);
#else
    const int begin = goes_on ? AS_THEY_ARE : FRESH;
    if (lanes > QUERY_LANES - LANES) {
        int64_t row = 0;
        for (; row + ROWS_OF_SUMS <= rows; row += ROWS_OF_SUMS)
            add_lanes(ROWS_OF_SUMS, QUERY_LANES / LANES, begin, sums + row * QUERY_LANES, 0, x + row * stride, stride, 1,
                      panel, in, QUERY_LANES);
        for (; row < rows; row += 2)
            add_lanes(2, QUERY_LANES / LANES, begin, sums + row * QUERY_LANES, 0, x + row * stride, stride, 1, panel, in,
                      QUERY_LANES);
        return;
    }
    for (int64_t lane = 0; lane < lanes; lane += LANES)
        for (int64_t row = 0; row < rows; row += ROWS_OF_LANE)
            add_lanes(ROWS_OF_LANE, 1, begin, sums + row * QUERY_LANES + lane, 0, x + row * stride, stride, 1, panel + lane,
                      in, QUERY_LANES);
#endif
}

/* The logits of a panel of queries, from the `from`th on, with KEY_ROWS keys. */
APART void lane_logits(float *logits, const struct query_lanes *queries, const struct block_room *room, int64_t from,
                        int64_t part) {
    int64_t width = queries->width;
    products(0, logits, room->keys + part * KEY_ROWS * width, width, queries->q + from * width, width, KEY_ROWS,
             queries->count - from);
}

/* Scale the logits of LANES queries, from the `from`th on, with KEY_ROWS keys of a block of `count` that begins at `first`;
 * -inf is what a query does not see. */
static void mask_lanes(float *logits, const struct query_lanes *queries, const struct block_room *room, int64_t from,
                       int64_t part, int64_t first, int64_t count) {
    ivec ends, begins;
    for (int64_t lane = 0; lane < LANES; lane++) {
        int64_t own = queries->position + (from + lane) / queries->group - first;
        int64_t window = window_at(queries->logits, own + first);
        ends[lane] = (int32_t)least_of(own, count - 1);
        begins[lane] = window >= 0 && own > window ? (int32_t)least_of(own - window, KEYS) : 0;
    }
    struct logits of = queries->logits;
    for (int64_t n = 0; n < KEY_ROWS; n++) {
        int32_t key = (int32_t)(part * KEY_ROWS + n);
        ivec seen = (ends >= key) & (begins <= key);
        vec v = load_f32(logits + n * QUERY_LANES);
        if (room->key_scales) v *= room->key_scales[key];
        v = logits_from(v, of, UNIT);
        store_f32(logits + n * QUERY_LANES, (vec)((seen & (ivec)v) | (~seen & (ivec)splat(-INFINITY))));
    }
}

/* The greatest of KEY_ROWS logits in each lane: few instructions wait for one another. */
INLINE vec greatest_in_lanes(const float *logits) {
    vec most[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) most[i] = load_f32(logits + i * QUERY_LANES);
#pragma GCC unroll 8
    for (int n = 4; n < KEY_ROWS; n++) most[n % 4] = greater_of(most[n % 4], load_f32(logits + n * QUERY_LANES));
    return greater_of(greater_of(most[0], most[1]), greater_of(most[2], most[3]));
}

/* Two neighbouring keys' weights of LANES queries, rounded where they are pairs. */
INLINE void load_weights(const factor *at, vec *even, vec *odd) {
#if IN_PAIRS
    uvec both = load_words(at);
    *even = (vec)(both << 16), *odd = (vec)(both & 0xffff0000);
#else
    *even = load_f32(at), *odd = load_f32(at + QUERY_LANES);
#endif
}

INLINE void store_weights(factor *at, vec *even, vec *odd) {
#if IN_PAIRS
    uvec low = ((uvec)*even + 0x8000) & 0xffff0000, high = ((uvec)*odd + 0x8000) & 0xffff0000;
    store_words(at, low >> 16 | high);
    *even = (vec)low, *odd = (vec)high;
#else
    store_f32(at, *even), store_f32(at + QUERY_LANES, *odd);
#endif
}

/* Let lanes' powers refer to `reference` instead of what they did: so do `weights`, of `keys` keys, which have become small,
 * and what was summed before. */
static void refer_to(vec reference, factor *weights, int64_t keys, float *sums, float *largest, vec *total, int64_t width) {
    vec shrink = power_of(load_f32(largest) - reference), even, odd;
    for (int64_t i = 0; i < width; i++) store_f32(sums + i * QUERY_LANES, load_f32(sums + i * QUERY_LANES) * shrink);
    for (int64_t k = 0; k < keys; k += 2) {
        load_weights(weights + k * QUERY_LANES, &even, &odd);
        even *= shrink, odd *= shrink;
        store_weights(weights + k * QUERY_LANES, &even, &odd);
    }
    store_f32(largest, reference);
    *total *= shrink;
}

/* Turn the logits of LANES queries with a part of the keys, once multiplied with `scale`, into weights, behind those of
 * parts before. Powers refer to about the largest logit so far: to one that none is SLACK above, each lane's own. */
INLINE void weigh_lanes(factor *weights, int64_t part, const float *logits, const float *value_scales, float scale,
                        float *sums, float *largest, float *total, int64_t width) {
    vec top = greatest_in_lanes(logits) * scale, reference = load_f32(largest), sum = load_f32(total);
    ivec more = top > reference + SLACK;
    if (any_lane(more)) {
        reference = (vec)((more & (ivec)top) | (~more & (ivec)reference));
        refer_to(reference, weights, part * KEY_ROWS, sums, largest, &sum, width);
    }
    factor *to = weights + part * KEY_ROWS * QUERY_LANES;
    for (int64_t n = 0; n < KEY_ROWS; n += 2) {
        vec even = power_of(load_f32(logits + n * QUERY_LANES) * scale - reference);
        vec odd = power_of(load_f32(logits + (n + 1) * QUERY_LANES) * scale - reference);
        if (value_scales) {
            sum += even + odd;
            even *= value_scales[part * KEY_ROWS + n], odd *= value_scales[part * KEY_ROWS + n + 1];
        }
        store_weights(to + n * QUERY_LANES, &even, &odd);
        if (!value_scales) sum += even + odd; /* what is rounded off cancels out */
    }
    store_f32(total, sum);
}

/* Weigh a part of the keys for the `half`th LANES queries of a panel, if there are such. */
static void weigh_part(const struct query_lanes *queries, const struct block_room *room, factor *weights, float *logits,
                       int64_t from, int64_t half, int64_t part, int64_t first, int64_t count) {
    int64_t width = queries->width, last = least_of(from + QUERY_LANES, queries->count) - 1, behind = (part + 1) * KEY_ROWS;
    int64_t lowest = queries->position + from / queries->group - first;
    int64_t highest = queries->position + last / queries->group - first;
    int64_t window = window_at(queries->logits, highest + first);
    int sees_all = lowest >= behind - 1 && count >= behind && (window < 0 || highest <= window);
    float *sums = queries->sums + from * width + half, *largest = queries->largest + from + half;
    float *total = queries->total + from + half, scale = 1.0f;
    if (from + half > last) return;
    logits += half, weights += OF_WORD * half;
    if (!sees_all || room->key_scales || are_changed(queries->logits))
        mask_lanes(logits, queries, room, from + half, part, first, count);
    else scale = queries->logits.scale * UNIT;
    if (room->value_scales) weigh_lanes(weights, part, logits, room->value_scales, scale, sums, largest, total, width);
    else weigh_lanes(weights, part, logits, 0, scale, sums, largest, total, width);
}

/* How many parts of `count` keys that begin at `first` are seen by some of a panel of queries. */
static int64_t seen_parts(const struct query_lanes *queries, int64_t from, int64_t first, int64_t count) {
    int64_t highest = queries->position + (least_of(from + QUERY_LANES, queries->count) - 1) / queries->group - first;
    return highest < 0 ? 0 : (least_of(highest + 1, count) + KEY_ROWS - 1) / KEY_ROWS;
}

/* Add features `begin` to `end` of the values to the sums of a panel of queries, once `weights` are made of `parts`. */
APART void add_values(const struct query_lanes *queries, const struct block_room *room, const factor *weights, int64_t from,
                       int64_t parts, int64_t begin, int64_t end) {
    products(1, queries->sums + from * queries->width + begin * QUERY_LANES, room->values + begin * KEYS, KEYS, weights,
             parts * KEY_ROWS, end - begin, queries->count - from);
}

/* Let many queries attend to `count` keys that begin at `first`, which are in `room` with their values; some of `next` is
 * asked for with each panel. While tiles are multiplied for the next part of the keys and for the values of the queries
 * before, weights are made of the part before. */
static void attend_block(const struct query_lanes *queries, const struct block_room *room, int64_t first, int64_t count,
                         struct coming *next) {
    int64_t from = 0, step = 0, parts_before = 0, groups = queries->width / KEY_ROWS;
    while (from < queries->count && !seen_parts(queries, from, first, count)) from += QUERY_LANES; /* all of it comes later */
    int64_t share = bytes_of(next) / ((queries->count - from) / QUERY_LANES + 1) + 1;
#ifdef WITH_TILES
    if (IN_PAIRS && has_tiles) {
        factor *before = room->weights;
        if (from < queries->count) lane_logits(room->logits, queries, room, from, 0);
        for (; from < queries->count; from += PANEL) {
            int64_t parts = seen_parts(queries, from, first, count);
            factor *weights = room->weights + from / PANEL % 2 * KEYS * PANEL;
            for (int64_t part = 0; part < parts; part++, step++) {
                float *logits = room->logits + step % 2 * KEY_ROWS * PANEL;
                float *ahead = room->logits + (step + 1) % 2 * KEY_ROWS * PANEL;
                if (part + 1 < parts) lane_logits(ahead, queries, room, from, part + 1);
                else if (from + PANEL < queries->count) lane_logits(ahead, queries, room, from + PANEL, 0);
                weigh_part(queries, room, weights, logits, from, 0, part, first, count);
                if (parts_before)
                    add_values(queries, room, before, from - PANEL, parts_before, groups * part / parts * KEY_ROWS,
                               groups * (part + 1) / parts * KEY_ROWS);
                weigh_part(queries, room, weights, logits, from, LANES, part, first, count);
            }
            ask_for(next, share);
            parts_before = parts, before = weights;
        }
        if (parts_before) add_values(queries, room, before, from - PANEL, parts_before, 0, queries->width);
        return;
    }
#endif
    (void)step, (void)parts_before, (void)groups;
    for (; from < queries->count; from += QUERY_LANES) {
        int64_t parts = seen_parts(queries, from, first, count);
        for (int64_t part = 0; part < parts; part++) {
            lane_logits(room->logits, queries, room, from, part);
            for (int64_t half = 0; half < QUERY_LANES; half += LANES)
                weigh_part(queries, room, room->weights, room->logits, from, half, part, first, count);
        }
        add_values(queries, room, room->weights, from, parts, 0, queries->width);
        ask_for(next, share);
    }
}

/* Put queries, whose heads of one token stand side by side, into panels; `sinks` are those of their heads, if any. Lanes
 * behind the last are zeros. */
static void bring_queries(const struct query_lanes *to, const element *q, int64_t heads, const float *sinks) {
    int64_t count = to->count, width = to->width, group = to->group;
    int64_t padded = (count + QUERY_LANES - 1) / QUERY_LANES * QUERY_LANES;
    for (int64_t from = 0; from < padded; from += LANES)
        for (int64_t i = 0; i < width; i += OF_VECTOR) {
            uvec words[LANES];
            for (int64_t k = 0; k < LANES; k++) {
                int64_t r = from + k, at = (r / group * heads + r % group) * to->dim;
                words[k] = r < count ? features_at(q + at, i, to->dim) : (uvec){0};
            }
            float *panel = (float *)(to->q + from / QUERY_LANES * QUERY_LANES * width);
            write_turned(panel + i / OF_WORD * QUERY_LANES + from % QUERY_LANES, QUERY_LANES, words);
        }
    memset(to->sums, 0, padded * width * sizeof *to->sums);
    for (int64_t r = 0; r < padded; r++) {
        to->largest[r] = sinks ? sinks[r % group] * UNIT : LEAST_LOGIT;
        to->total[r] = sinks ? 1.0f : 0.0f; /* e^(sink - sink), as if it were a key */
    }
}

/* Write the results as rows of `out`, without the first `skipped` features, a multiple of OF_VECTOR; `scale` is that of the
 * values. */
static void write_results(element *out, const struct query_lanes *queries, int64_t heads, int64_t skipped, float scale) {
    int64_t width = queries->width, group = queries->group;
    float rows[LANES * OF_VECTOR];
    for (int64_t from = 0; from < queries->count; from += LANES) {
        const float *sums = queries->sums + from / QUERY_LANES * QUERY_LANES * width + from % QUERY_LANES;
        vec total = load_f32(queries->total + from);
        vec whole = (vec)((total > 0.0f) & (ivec)(scale / total));
        for (int64_t i = skipped; i < width; i += OF_VECTOR) {
            for (int64_t part = 0; part < OF_VECTOR; part += LANES) {
                uvec words[LANES];
                for (int64_t k = 0; k < LANES; k++) words[k] = (uvec)(load_f32(sums + (i + part + k) * QUERY_LANES) * whole);
                write_turned(rows + part, OF_VECTOR, words);
            }
            for (int64_t r = from; r < least_of(from + LANES, queries->count); r++) {
                float *row = rows + (r - from) * OF_VECTOR;
                element *to = out + (r / group * heads + r % group) * (queries->dim - skipped) + i - skipped;
#if IN_PAIRS
                in_order(row);
#endif
                for (int64_t part = 0; part < least_of(OF_VECTOR, queries->dim - i); part += LANES)
                    store(to + part, load_f32(row + part));
            }
        }
    }
}
#endif
