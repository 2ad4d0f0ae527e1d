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
typedef float factor;
#endif
#if IN_PAIRS || LANES == 16
#define UNIT LOG2_OF_E /* of the exponents of powers */
#define power_of exp2_lanes
#define power_to exp2f
#else
#define UNIT 1.0f
#define power_of exp_lanes
#define power_to expf
#endif
/* Weights of logits beside `reference`. What a power's exponent leaves behind whole ones is small only if it was rounded before
 * it is taken apart. */
INLINE vec weights_of(vec logits, vec reference, float unit) {
    vec exponent = (logits - reference) * unit;
#if LANES == 16
    __asm__("" : "+v"(exponent));
#endif
    return power_of(exponent);
}

#define KEY_ROWS 32 /* keys whose logits become weights together */
#define OF_WORD ((int64_t)(4 / sizeof(factor)))  /* factors in a word */
#define OF_VECTOR (OF_WORD * LANES)              /* and in a vector */
#define MOST_SUM 256.0f /* of KEY_ROWS weights, before powers refer to a greater logit */

/* Features of a head, in pairs up to whole KEY_ROWS: what is behind the last are zeros. */
static int64_t width_of_head(int64_t dim) { return IN_PAIRS ? (dim + KEY_ROWS - 1) / KEY_ROWS * KEY_ROWS : dim; }

/* Queries of one key head, and what is known of their results so far; `width` is that of the head. */
struct query_lanes {
    factor *q;              /* [count / QUERY_LANES][width / OF_WORD][QUERY_LANES][OF_WORD] */
    float *sums;            /* [count / QUERY_LANES][width][QUERY_LANES] */
    float *largest, *total; /* of the logits, as they are kept, about, and of their powers */
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

/* Words of two features of 16 bits from the `i`th on, of which there are `dim`, and behind them zeros. */
INLINE uvec pairs_at(const element *at, int64_t i, int64_t dim) {
    uvec words = {0};
    if (i + 2 * LANES <= dim) return load_words(at + i);
    if (i < dim) memcpy(&words, at + i, sizeof words / 2); /* dim is of whole vectors of floats */
    return words;
}

/* OF_VECTOR features, likewise. */
INLINE uvec features_at(const element *at, int64_t i, int64_t dim) {
#if IN_PAIRS
    return pairs_at(at, i, dim);
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
INLINE uvec visible_features(const int64_t code, const void *entries, const int64_t *offsets, int64_t j, int64_t begin,
                          int64_t count, int64_t i, int64_t dim) {
    if (j < begin || j >= count || i >= dim) return (uvec){0};
    const uint8_t *codes = (const uint8_t *)entries + offsets[j] + i;
    if (!code) return features_at((const element *)entries + offsets[j], i, dim);
#if IN_PAIRS
    uint8_t rest[2 * LANES] = {0};
    return bf16_of_codes(code, i + OF_VECTOR <= dim ? codes : memcpy(rest, codes, dim - i));
#else
    return (uvec)load_codes(code, codes);
#endif
}

/* Bring one head's keys and values together, up to whole KEY_ROWS; pairs of features are in the order of `in_order`. */
INLINE void gather(const int64_t code, const struct block_room *room, const void *keys, const void *values,
                   const int64_t *offsets, int64_t begin, int64_t count, int64_t dim, int64_t width) {
    for (int64_t j = 0; j < count; j += KEY_ROWS) {
        for (int64_t k = j; k < j + KEY_ROWS; k++)
            for (int64_t i = 0; i < width; i += OF_VECTOR)
                store_words(room->keys + k * width + i, visible_features(code, keys, offsets, k, begin, count, i, dim));
        for (int64_t k = j; k < j + KEY_ROWS; k += OF_VECTOR)
            for (int64_t i = 0; i < width; i += OF_VECTOR) {
                uvec words[OF_WORD][LANES];
                for (int64_t n = 0; n < LANES; n++) {
#if IN_PAIRS
                    uvec even = visible_features(code, values, offsets, k + 2 * n, begin, count, i, dim);
                    uvec odd = visible_features(code, values, offsets, k + 2 * n + 1, begin, count, i, dim);
                    words[0][n] = first_pairs(even, odd), words[1][n] = next_pairs(even, odd);
#else
                    words[0][n] = visible_features(code, values, offsets, k + n, begin, count, i, dim);
#endif
                }
                for (int64_t n = 0; n < OF_WORD; n++)
                    write_turned(room->values + (i + n * LANES) * KEYS + k, KEYS / OF_WORD, words[n]);
            }
    }
}

/* Keys up to whole MOST_ROWS. */
static int64_t up_to_rows(int64_t keys) { return (keys + MOST_ROWS - 1) / MOST_ROWS * MOST_ROWS; }

/* sums[row][lane] of some rows, a multiple of MOST_ROWS, with a panel of queries or weights;
 * they go on if `accumulate`, a constant where this is used. What is behind the last query's vector may be left alone. */
INLINE void products(const int accumulate, float *sums, const factor *x, int64_t stride, const factor *panel, int64_t in,
                     int64_t rows, int64_t lanes) {
#if IN_PAIRS
#ifdef WITH_TILES
    if (has_tiles) lanes = PANEL;
#endif
    for (int64_t row = 0; lanes > LANES && row < rows; row += KEY_ROWS)
        pair_products(accumulate, sums + row * PANEL, x + row * stride, stride, panel, in, least_of(rows - row, KEY_ROWS));
    for (int64_t row = 0; lanes <= LANES && row < rows; row += MOST_ROWS)
        few_pair_products(MOST_ROWS, 1, accumulate, sums + row * PANEL, x + row * stride, stride, panel, in);
#else
    const int begin = accumulate ? AS_THEY_ARE : FRESH;
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

/* The logits of a panel of queries, from the `from`th on, with KEY_ROWS keys, or with those of them among the block's first
 * `visible`. */
NOINLINE void lane_logits(float *logits, const struct query_lanes *queries, const struct block_room *room, int64_t from,
                        int64_t part, int64_t visible) {
    int64_t width = queries->width, rows = least_of(up_to_rows(visible) - part * KEY_ROWS, KEY_ROWS);
    products(0, logits, room->keys + part * KEY_ROWS * width, width, queries->q + from * width, width, rows,
             queries->count - from);
}

/* Change the logits of LANES queries, from the `from`th on, with KEY_ROWS keys of a block of `count` that begins at `first`,
 * where they are changed; -inf is what a query does not see. */
static void mask_lanes(float *logits, const struct query_lanes *queries, const struct block_room *room, int64_t from,
                       int64_t part, int64_t first, int64_t count) {
    ivec ends, begins;
    for (int64_t lane = 0; lane < LANES; lane++) {
        int64_t last = queries->position + (from + lane) / queries->group - first;
        int64_t window = window_at(queries->logits, last + first);
        ends[lane] = (int32_t)least_of(last, count - 1);
        begins[lane] = window >= 0 && last > window ? (int32_t)least_of(last - window, KEYS) : 0;
    }
    struct logits of = queries->logits;
    for (int64_t n = 0; n < KEY_ROWS; n++) {
        int32_t key = (int32_t)(part * KEY_ROWS + n);
        ivec visible = (ends >= key) & (begins <= key);
        vec v = load_f32(logits + n * QUERY_LANES);
        if (room->key_scales) v *= room->key_scales[key];
        if (are_changed(of)) v = logits_from(v, of);
        store_f32(logits + n * QUERY_LANES, (vec)((visible & (ivec)v) | (~visible & (ivec)splat(-INFINITY))));
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

/* Store them; return the sums of what is stored. */
INLINE vec store_weights(factor *at, vec even, vec odd) {
#if IN_PAIRS
    uvec both = ((uvec)even + 0x8000) >> 16 | (((uvec)odd + 0x8000) & 0xffff0000);
    store_words(at, both);
    return (vec)(both << 16) + (vec)(both & 0xffff0000);
#else
    store_f32(at, even), store_f32(at + QUERY_LANES, odd);
    return even + odd;
#endif
}

/* Let lanes' powers refer to `reference` instead of what they did: so do `weights`, of `keys` keys, which have become small,
 * and what was summed before. */
static void refer_to(vec reference, float unit, factor *weights, int64_t keys, float *sums, float *largest, vec *total,
                     int64_t width) {
    vec shrink = weights_of(load_f32(largest), reference, unit), even, odd;
    for (int64_t i = 0; i < width; i++) store_f32(sums + i * QUERY_LANES, load_f32(sums + i * QUERY_LANES) * shrink);
    for (int64_t k = 0; k < keys; k += 2) {
        load_weights(weights + k * QUERY_LANES, &even, &odd);
        store_weights(weights + k * QUERY_LANES, even * shrink, odd * shrink);
    }
    store_f32(largest, reference);
    *total *= shrink;
}

/* Turn the logits of LANES queries with KEY_ROWS keys into weights; return their sums. */
INLINE vec weigh_rows(factor *weights, const float *logits, const float *value_scales, float unit, vec reference) {
    vec sum = splat(0.0f);
#pragma GCC unroll 2
    for (int64_t n = 0; n < KEY_ROWS; n += 2) {
        vec even = weights_of(load_f32(logits + n * QUERY_LANES), reference, unit);
        vec odd = weights_of(load_f32(logits + (n + 1) * QUERY_LANES), reference, unit);
        factor *at = weights + n * QUERY_LANES;
        if (!value_scales) {
            sum += store_weights(at, even, odd); /* what is rounded off cancels out */
        } else {
            sum += even + odd;
            store_weights(at, even * value_scales[n], odd * value_scales[n + 1]);
        }
    }
    return sum;
}

/* Do so with a part of the keys, behind those of parts before. Powers refer to about the largest logit so far, each lane's
 * own: to one that none is far above, as the sums tell. */
INLINE void weigh_lanes(factor *weights, int64_t part, const float *logits, const float *value_scales, float unit,
                        float *sums, float *largest, float *total, int64_t width) {
    factor *to = weights + part * KEY_ROWS * QUERY_LANES;
    vec reference = load_f32(largest), before = load_f32(total);
    if (value_scales) value_scales += part * KEY_ROWS;
    vec sum = weigh_rows(to, logits, value_scales, unit, reference);
    ivec more = sum > MOST_SUM;
    if (any_lane(more)) {
        vec top = greatest_in_lanes(logits);
        reference = (vec)((more & (ivec)top) | (~more & (ivec)reference));
        refer_to(reference, unit, weights, part * KEY_ROWS, sums, largest, &before, width);
        sum = weigh_rows(to, logits, value_scales, unit, reference);
    }
    store_f32(total, before + sum);
}

/* Whether all of a panel's queries see all of a part of the keys, whose logits stay products. */
static int are_plain(const struct query_lanes *queries, const struct block_room *room, int64_t from, int64_t part,
                     int64_t first, int64_t count) {
    int64_t last = least_of(from + QUERY_LANES, queries->count) - 1, behind = (part + 1) * KEY_ROWS;
    int64_t lowest = queries->position + from / queries->group - first;
    int64_t highest = queries->position + last / queries->group - first;
    int64_t window = window_at(queries->logits, highest + first);
    return lowest >= behind - 1 && count >= behind && (window < 0 || highest <= window) && !room->key_scales &&
           !are_changed(queries->logits);
}

/* Weigh a part of the keys for the `half`th LANES queries of a panel, if there are such. */
static void weigh_part(const struct query_lanes *queries, const struct block_room *room, factor *weights, float *logits,
                       int64_t from, int64_t half, int64_t part, int64_t first, int64_t count) {
    int64_t width = queries->width;
    float *sums = queries->sums + from * width + half, *largest = queries->largest + from + half;
    float *total = queries->total + from + half, unit = unit_of(queries->logits, UNIT);
    if (from + half >= queries->count) return;
    logits += half, weights += OF_WORD * half;
    if (!are_plain(queries, room, from, part, first, count))
        mask_lanes(logits, queries, room, from + half, part, first, count);
    if (room->value_scales) weigh_lanes(weights, part, logits, room->value_scales, unit, sums, largest, total, width);
    else weigh_lanes(weights, part, logits, 0, unit, sums, largest, total, width);
}

#if IN_PAIRS && !defined(WITH_SQUARES)
#define FEATURES_AT_ONCE 16
/* Multiply the next ROWS_OF_PANEL keys with a panel of queries, and weigh those before, whose logits they replace:
 * instructions of both alternate, for weights take other units than products. Either may be left out, by a constant. */
INLINE void weigh_ahead(const int multiplies, const int weighs, float *logits, const factor *keys, const factor *panel,
                        int64_t width, factor *weights, float unit, const vec *references, vec *added) {
    panel_sums sums[ROWS_OF_PANEL] = {0};
    const float *at = logits;
    for (int64_t i = 0, due = 0; i < width; i += FEATURES_AT_ONCE) {
        if (multiplies)
#pragma GCC unroll 8
            for (int k = 0; k < FEATURES_AT_ONCE; k += 2)
                bf16_step(ROWS_OF_PANEL, VECTORS, sums, keys + i + k, width, panel + (i + k) * PANEL);
        due += FEATURES_AT_ONCE * ROWS_OF_PANEL / 2;
        for (; weighs && due >= width; due -= width, at += 2 * PANEL, weights += 2 * PANEL)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) {
                vec even = weights_of(load_f32(at + v * LANES), references[v], unit);
                vec odd = weights_of(load_f32(at + PANEL + v * LANES), references[v], unit);
                added[v] += store_weights(weights + 2 * v * LANES, even, odd);
            }
    }
    if (!multiplies) return;
#pragma GCC unroll 8
    for (int r = 0; r < ROWS_OF_PANEL; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) store_f32(logits + r * PANEL + v * LANES, sums[r][v]);
}

/* Weigh parts of the keys from `part` on for a panel while all of its queries see all of them; return the part behind them:
 * `part` itself if powers have to refer to a greater logit. The weights are those of `weigh_part`. */
NOINLINE int64_t weigh_at_once(const struct query_lanes *queries, const struct block_room *room, factor *weights, int64_t from,
                            int64_t part, int64_t first, int64_t count) {
    int64_t width = queries->width, groups = KEY_ROWS / ROWS_OF_PANEL, behind = part;
    const factor *keys = room->keys + part * KEY_ROWS * width, *panel = queries->q + from * width;
    float unit = unit_of(queries->logits, UNIT);
    vec references[VECTORS], totals[VECTORS], added[VECTORS] = {0};
    ivec more = {0};
    for (int v = 0; v < VECTORS; v++) {
        references[v] = load_f32(queries->largest + from + v * LANES), totals[v] = load_f32(queries->total + from + v * LANES);
        more |= references[v] <= LEAST_LOGIT;
    }
    while (are_plain(queries, room, from, behind, first, count)) behind++;
    if (behind == part || any_lane(more) || queries->count - from <= LANES) return part;
    weights += part * KEY_ROWS * PANEL;
    weigh_ahead(1, 0, room->logits, keys, panel, width, weights, unit, references, added);
    for (int64_t group = 1; group <= (behind - part) * groups; group++, weights += ROWS_OF_PANEL * PANEL) {
        keys += ROWS_OF_PANEL * width;
        if (group < (behind - part) * groups)
            weigh_ahead(1, 1, room->logits, keys, panel, width, weights, unit, references, added);
        else weigh_ahead(0, 1, room->logits, keys, panel, width, weights, unit, references, added);
        for (int v = 0; group % groups == 0 && v < VECTORS; v++) {
            more |= added[v] > MOST_SUM;
            totals[v] += added[v], added[v] = splat(0.0f);
        }
    }
    if (any_lane(more)) return part;
    for (int v = 0; v < VECTORS; v++) store_f32(queries->total + from + v * LANES, totals[v]);
    return behind;
}
#endif

/* How many of `count` keys that begin at `first` some of a panel of queries see. */
static int64_t visible_keys(const struct query_lanes *queries, int64_t from, int64_t first, int64_t count) {
    int64_t highest = queries->position + (least_of(from + QUERY_LANES, queries->count) - 1) / queries->group - first;
    return highest < 0 ? 0 : least_of(highest + 1, count);
}

static int64_t parts_of_keys(int64_t keys) { return (keys + KEY_ROWS - 1) / KEY_ROWS; }

/* Add features `begin` to `end` of the values to the sums of a panel of queries, once `weights` are made of `keys`. */
NOINLINE void add_values(const struct query_lanes *queries, const struct block_room *room, const factor *weights, int64_t from,
                       int64_t keys, int64_t begin, int64_t end) {
    products(1, queries->sums + from * queries->width + begin * QUERY_LANES, room->values + begin * KEYS, KEYS, weights,
             keys, end - begin, queries->count - from);
}

/* Let many queries attend to `count` keys that begin at `first`, which are in `room` with their values; some of `next` is
 * prefetched with each panel. While tiles are multiplied for the next part of the keys and for the values of the queries
 * before, weights are made of the part before. */
static void attend_block(const struct query_lanes *queries, const struct block_room *room, int64_t first, int64_t count,
                         struct prefetches *next) {
    int64_t from = 0, step = 0, parts_before = 0, groups = queries->width / KEY_ROWS;
    while (from < queries->count && !visible_keys(queries, from, first, count)) from += QUERY_LANES; /* all of it comes later */
    int64_t share = bytes_of(next) / ((queries->count - from) / QUERY_LANES + 1) + 1;
#ifdef WITH_TILES
    if (IN_PAIRS && has_tiles) {
        factor *before = room->weights;
        if (from < queries->count) lane_logits(room->logits, queries, room, from, 0, KEYS);
        for (; from < queries->count; from += PANEL) {
            int64_t parts = parts_of_keys(visible_keys(queries, from, first, count));
            factor *weights = room->weights + from / PANEL % 2 * KEYS * PANEL;
            for (int64_t part = 0; part < parts; part++, step++) {
                float *logits = room->logits + step % 2 * KEY_ROWS * PANEL;
                float *ahead = room->logits + (step + 1) % 2 * KEY_ROWS * PANEL;
                if (part + 1 < parts) lane_logits(ahead, queries, room, from, part + 1, KEYS);
                else if (from + PANEL < queries->count) lane_logits(ahead, queries, room, from + PANEL, 0, KEYS);
                weigh_part(queries, room, weights, logits, from, 0, part, first, count);
                if (parts_before)
                    add_values(queries, room, before, from - PANEL, parts_before * KEY_ROWS, groups * part / parts * KEY_ROWS,
                               groups * (part + 1) / parts * KEY_ROWS);
                weigh_part(queries, room, weights, logits, from, LANES, part, first, count);
            }
            prefetch(next, share);
            parts_before = parts, before = weights;
        }
        if (parts_before) add_values(queries, room, before, from - PANEL, parts_before * KEY_ROWS, 0, queries->width);
        return;
    }
#endif
    (void)step, (void)parts_before, (void)groups;
    for (; from < queries->count; from += QUERY_LANES) {
        int64_t visible = visible_keys(queries, from, first, count), parts = parts_of_keys(visible);
        for (int64_t part = 0; part < parts; part++) {
#if IN_PAIRS && !defined(WITH_SQUARES)
            part = weigh_at_once(queries, room, room->weights, from, part, first, count);
            if (part == parts) break;
#endif
            lane_logits(room->logits, queries, room, from, part, visible);
            for (int64_t half = 0; half < QUERY_LANES; half += LANES)
                weigh_part(queries, room, room->weights, room->logits, from, half, part, first, count);
        }
        add_values(queries, room, room->weights, from, up_to_rows(visible), 0, queries->width);
        prefetch(next, share);
    }
}

/* Pack queries, whose heads of one token are contiguous, into panels; `sinks` are those of their heads, if any. Lanes
 * behind the last are zeros. */
static void pack_queries(const struct query_lanes *to, const element *q, int64_t heads, const float *sinks) {
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
        to->largest[r] = sinks ? sink_logit(sinks[r % group], to->logits) : LEAST_LOGIT;
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
