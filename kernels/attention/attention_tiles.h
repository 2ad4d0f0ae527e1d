/* Attention in matrix tiles of bf16 (native_tiles.h): of few queries with keys as they stand in their pages, and of many
 * queries with keys and values that are brought together first.
 *
 * Of many queries, each has a lane of its own: logits are [key][query], weights and sums likewise, so that maxima and
 * totals need no step across lanes, and the tiles that multiply weights take them as they are written.
 */
#ifndef GRAPHDECODE_ATTENTION_TILES_H
#define GRAPHDECODE_ATTENTION_TILES_H

#include "attention_pairs.h"

#ifdef WITH_TILES
#define SLACK 8.0f /* by how much, as a power of 2, a weight may be above 1 before sums are scaled anew */

/* Put `count` queries, PANEL at most, as tiles take a panel of them, [feature / 2][query][2]; missing ones are zeros. Rows
 * of `heads` heads hold `group` of them each. */
static void panel_of_queries(uint16_t *to, const uint16_t *q, int64_t from, int64_t count, int64_t heads, int64_t group,
                             int64_t dim) {
    for (int64_t half = 0; half < PANEL; half += LANES)
        for (int64_t i = 0; i < dim; i += TILE_IN) {
            uvec words[LANES];
            for (int64_t k = 0; k < LANES; k++) {
                int64_t r = from + half + k;
                words[k] = half + k < count ? load_words(q + (r / group * heads + r % group) * dim + i) : (uvec){0};
            }
            write_turned((uint32_t *)to + i / 2 * PANEL + half, PANEL, words);
        }
}

/* Bring one head's keys together, [key][feature], and its values turned, [feature][KEYS], their features in the order of
 * `gather_values`, up to the end of the last panel. */
INLINE void gather_turned(const int64_t code, const struct pair_room *room, const void *keys, const void *values,
                          const int64_t *places, int64_t begin, int64_t count, int64_t dim) {
    for (int64_t j = 0; j < count; j += PANEL) {
        for (int64_t k = j; k < j + PANEL; k++)
            for (int64_t i = 0; i < dim; i += PANEL)
                store_words(room->keys + k * dim + i, seen_values(code, keys, places, k, begin, count, i));
        for (int64_t i = 0; i < dim; i += PANEL) {
            uvec low[LANES], high[LANES];
            for (int64_t n = 0; n < LANES; n++) {
                uvec even = seen_values(code, values, places, j + 2 * n, begin, count, i);
                uvec odd = seen_values(code, values, places, j + 2 * n + 1, begin, count, i);
                low[n] = first_pairs(even, odd), high[n] = next_pairs(even, odd);
            }
            write_turned(room->values + i * KEYS + j, KEYS / 2, low);
            write_turned(room->values + (i + LANES) * KEYS + j, KEYS / 2, high);
        }
    }
}

/* The logits of PANEL queries, from the `from`th on, with the `panel`th PANEL keys. */
static void turned_logits(float *logits, const struct pair_queries *queries, const struct pair_room *room, int64_t from,
                          int64_t panel) {
    int64_t dim = queries->dim;
    tile_product(2, 0, logits, room->keys + panel * PANEL * dim, dim, queries->q + from * dim, dim);
}

/* Scale the logits of LANES queries, from the `from`th on, with PANEL keys of a block of `count` that begins at `first`;
 * -inf is what a query does not see. */
static void mask_panel(float *logits, const struct pair_queries *queries, const struct pair_room *room, int64_t from,
                       int64_t panel, int64_t first, int64_t count) {
    int32_t last[LANES], begin[LANES];
    for (int64_t lane = 0; lane < LANES; lane++) {
        int64_t own = queries->position + (from + lane) / queries->group - first;
        int64_t window = window_at(queries->logits, own + first);
        last[lane] = (int32_t)least_of(own, count - 1);
        begin[lane] = window >= 0 && own > window ? (int32_t)least_of(own - window, KEYS) : 0;
    }
    __m512i ends = _mm512_loadu_si512(last), begins = _mm512_loadu_si512(begin);
    struct logits of = queries->logits;
    for (int64_t n = 0; n < PANEL; n++) {
        __m512i key = _mm512_set1_epi32((int32_t)(panel * PANEL + n));
        __mmask16 seen = _mm512_cmple_epi32_mask(key, ends) & _mm512_cmpge_epi32_mask(key, begins);
        vec v = load_f32(logits + n * PANEL);
        if (room->key_scales) v *= room->key_scales[panel * PANEL + n];
        v = logits_from(v, of, LOG2_OF_E);
        _mm512_storeu_ps(logits + n * PANEL, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, (__m512)v));
    }
}

/* The greatest of PANEL logits in each lane: few instructions wait for one another. */
INLINE __m512 greatest_in_lanes(const float *logits) {
    __m512 most[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) most[i] = _mm512_loadu_ps(logits + i * PANEL);
#pragma GCC unroll 8
    for (int n = 4; n < PANEL; n++) most[n % 4] = _mm512_max_ps(most[n % 4], _mm512_loadu_ps(logits + n * PANEL));
    return _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
}

/* Let lanes' powers of 2 refer to `reference` instead of what they did: so do `weights`, of `keys` keys, which have become
 * small, and what was summed before. */
static void refer_to(vec reference, uint16_t *weights, int64_t keys, float *sums, float *largest, vec *total, int64_t dim) {
    vec shrink = exp2_lanes(load_f32(largest) - reference);
    for (int64_t i = 0; i < dim; i++) store_f32(sums + i * PANEL, load_f32(sums + i * PANEL) * shrink);
    for (int64_t k = 0; k < keys; k += 2) {
        uvec both = (uvec)load_f32((float *)(weights + k * PANEL));
        uvec even = (uvec)((vec)(both << 16) * shrink) + 0x8000, odd = (uvec)((vec)(both & 0xffff0000) * shrink) + 0x8000;
        store_f32((float *)(weights + k * PANEL), (vec)(even >> 16 | (odd & 0xffff0000)));
    }
    store_f32(largest, reference);
    *total *= shrink;
}

/* Turn the logits of LANES queries with a panel of keys, once multiplied with `factor`, into weights, which stand as
 * [key / 2][query][2] behind those of panels before. Powers refer to about the largest logit so far: to one that
 * none is SLACK above, each lane's own. */
INLINE void weigh_lanes(uint16_t *weights, int64_t panel, const float *logits, const float *value_scales, float factor,
                        float *sums, float *largest, float *total, int64_t dim) {
    vec top = (vec)greatest_in_lanes(logits) * factor, reference = load_f32(largest), sum = load_f32(total);
    __mmask16 more = _mm512_cmp_ps_mask((__m512)top, (__m512)(reference + SLACK), _CMP_GT_OQ);
    if (more) {
        reference = (vec)_mm512_mask_mov_ps((__m512)reference, more, (__m512)top);
        refer_to(reference, weights, panel * PANEL, sums, largest, &sum, dim);
    }
    uint16_t *to = weights + panel * PANEL * PANEL;
    for (int64_t n = 0; n < PANEL; n += 2) {
        vec even = exp2_lanes(load_f32(logits + n * PANEL) * factor - reference);
        vec odd = exp2_lanes(load_f32(logits + (n + 1) * PANEL) * factor - reference);
        if (value_scales) {
            sum += even + odd;
            even *= value_scales[panel * PANEL + n], odd *= value_scales[panel * PANEL + n + 1];
        }
        uvec low = ((uvec)even + 0x8000) & 0xffff0000, high = ((uvec)odd + 0x8000) & 0xffff0000;
        if (!value_scales) sum += (vec)low + (vec)high; /* what is rounded off cancels out */
        store_f32((float *)(to + n * PANEL), (vec)(low >> 16 | high));
    }
    store_f32(total, sum);
}

static void weigh_half(const struct pair_queries *queries, const struct pair_room *room, uint16_t *weights, float *logits,
                       int64_t from, int64_t half, int64_t panel, int64_t first, int64_t count) {
    int64_t dim = queries->dim, last = least_of(from + PANEL, queries->count) - 1, behind = (panel + 1) * PANEL;
    int64_t lowest = queries->position + from / queries->group - first;
    int64_t highest = queries->position + last / queries->group - first;
    int64_t window = window_at(queries->logits, highest + first);
    int sees_all = lowest >= behind - 1 && count >= behind && (window < 0 || highest <= window);
    float *sums = queries->sums + from * dim + half, *largest = queries->largest + from + half;
    float *total = queries->total + from + half, factor = 1.0f;
    logits += half, weights += 2 * half;
    if (!sees_all || room->key_scales || are_changed(queries->logits))
        mask_panel(logits, queries, room, from + half, panel, first, count);
    else factor = queries->logits.scale * LOG2_OF_E;
    if (room->value_scales) weigh_lanes(weights, panel, logits, room->value_scales, factor, sums, largest, total, dim);
    else weigh_lanes(weights, panel, logits, 0, factor, sums, largest, total, dim);
}

/* How many panels of `count` keys that begin at `first` are seen by some of PANEL queries. */
static int64_t seen_panels(const struct pair_queries *queries, int64_t from, int64_t first, int64_t count) {
    int64_t highest = queries->position + (least_of(from + PANEL, queries->count) - 1) / queries->group - first;
    return highest < 0 ? 0 : (least_of(highest + 1, count) + PANEL - 1) / PANEL;
}

/* Add some parts of the values, PANEL features each, to the sums of PANEL queries, once `weights` are made of their panels. */
static void add_turned_values(const struct pair_queries *queries, const struct pair_room *room, int64_t from, int64_t panels,
                              int64_t begin, int64_t end) {
    const uint16_t *weights = room->weights + from / PANEL % 2 * KEYS * PANEL;
    for (int64_t i = begin * PANEL; i < end * PANEL; i += PANEL)
        tile_product(2, 1, queries->sums + from * queries->dim + i * PANEL, room->values + i * KEYS, KEYS, weights,
                     panels * PANEL);
}

/* Let many queries attend to `count` keys that begin at `first`, which are in `room` with their values. While tiles are
 * multiplied for the next panel of keys and for the values of the queries before, weights are made of the panel before. */
static void attend_turned(const struct pair_queries *queries, const struct pair_room *room, int64_t first, int64_t count) {
    int64_t from = 0, step = 0, panels_before = 0, parts = queries->dim / PANEL;
    while (from < queries->count && !seen_panels(queries, from, first, count)) from += PANEL; /* all of it comes later */
    if (from < queries->count) turned_logits(room->logits, queries, room, from, 0);
    for (; from < queries->count; from += PANEL) {
        int64_t panels = seen_panels(queries, from, first, count);
        uint16_t *weights = room->weights + from / PANEL % 2 * KEYS * PANEL;
        for (int64_t panel = 0; panel < panels; panel++, step++) {
            float *logits = room->logits + step % 2 * PANEL * PANEL, *next = room->logits + (step + 1) % 2 * PANEL * PANEL;
            if (panel + 1 < panels) turned_logits(next, queries, room, from, panel + 1);
            else if (from + PANEL < queries->count) turned_logits(next, queries, room, from + PANEL, 0);
            weigh_half(queries, room, weights, logits, from, 0, panel, first, count);
            if (panels_before)
                add_turned_values(queries, room, from - PANEL, panels_before, parts * panel / panels,
                                  parts * (panel + 1) / panels);
            weigh_half(queries, room, weights, logits, from, LANES, panel, first, count);
        }
        panels_before = panels;
    }
    if (panels_before) add_turned_values(queries, room, from - PANEL, panels_before, 0, parts);
}

/* Write the results of PANEL queries, or of `count`, as rows of `out`; `scale` is that of the values. */
static void write_turned_sums(uint16_t *out, const struct pair_queries *queries, int64_t from, int64_t heads, float scale) {
    int64_t dim = queries->dim, group = queries->group;
    float rows[LANES * PANEL];
    for (int64_t half = 0; half < PANEL && from + half < queries->count; half += LANES) {
        vec total = load_f32(queries->total + from + half);
        __mmask16 seen = _mm512_cmp_ps_mask((__m512)total, _mm512_setzero_ps(), _CMP_GT_OQ);
        vec whole = (vec)_mm512_maskz_div_ps(seen, _mm512_set1_ps(scale), (__m512)total);
        for (int64_t i = 0; i < dim; i += PANEL) {
            for (int64_t part = 0; part < PANEL; part += LANES) {
                uvec words[LANES];
                for (int64_t k = 0; k < LANES; k++)
                    words[k] = (uvec)(load_f32(queries->sums + from * dim + (i + part + k) * PANEL + half) * whole);
                write_turned(rows + part, PANEL, words);
            }
            for (int64_t r = from + half; r < least_of(from + half + LANES, queries->count); r++) {
                float *row = rows + (r - from - half) * PANEL;
                uint16_t *to = out + (r / group * heads + r % group) * dim + i;
                in_order(row);
                store_bf16(to, load_f32(row));
                store_bf16(to + LANES, load_f32(row + LANES));
            }
        }
    }
}
#endif
#endif
