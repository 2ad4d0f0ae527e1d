/* The products of experts with their rows, over weights in blocks of few bits; see quantised_expert_linear.py.
 *
 * A task is one panel of an expert that has pairs, or with a gate two of them, which stand side by side. Sums are those
 * of quantised_linear.c, so that a row has the same bits with few others and with many where it must; what is done with
 * them is in expert_linear.c. Both come before this file in the unit.
 */
#include "linear/integer_products.h"
#include "linear/quantised_tiles.h"
#include "native_blocks.h"

#ifndef GRAPHDECODE_QUANTISED_EXPERT_LINEAR
#define GRAPHDECODE_QUANTISED_EXPERT_LINEAR
#define GATHERED_PANELS 8 /* a thread's share at least where rows are many: gathering them costs as much as one */

/* How many pairs of one expert are multiplied together: their rows stay in the second cache. */
static inline int64_t pairs_together(int64_t in) {
    return items_of(TILED_BYTES, in * 2 * TILE_ROWS) * TILE_ROWS + FEW_ROWS;
}
#endif

struct NAME(few_bit_experts) {
    const struct block_weight *weight;
    const quantised_expert_linear_args *a;
};

/* Rows of pairs, brought together in a thread's memory, with the sums of their spans. */
struct NAME(pair_rows) {
    struct span_job of;
    const quantised_input *x; /* [rows][in], or as few_rows() or pack_tiles() have them */
    int in_digits;
#if WITH_DIGITS
    struct integer_rows digits;
#endif
};

static struct NAME(pair_rows) NAME(rows_of_pairs)(const struct NAME(few_bit_experts) *job, int64_t expert,
                                                  const int32_t *pairs, int64_t count) {
    const quantised_expert_linear_args *a = job->a;
    int64_t in = a->x.size[1], span = job->weight->span, spans = (in + span - 1) / span;
    int64_t whole = count + TILE_ROWS; /* whole tiles read as many rows' totals, and hold as many rows */
    const int32_t *columns = a->columns.data ? a->columns.data + expert * in : 0;
    float *at = scratch(whole * (spans + 2 * in + LANES) + in + 4 * LANES);
    float *totals = carved(&at, whole * spans);
    quantised_input *rows = (quantised_input *)carved(&at, count * in);
    element *ordered = (element *)carved(&at, in);
    struct NAME(pair_rows) found = {{job->weight, count, spans, totals}, rows, 0};
#if WITH_DIGITS
    found.in_digits = count <= CHECKED_ROWS && NAME(takes_integers)(job->weight, count, a->batch_invariant);
    if (found.in_digits) found.digits = integer_rows_at(at, count, in, spans);
#endif
    for (int64_t r = 0; r < count; r++) {
        const element *row = (const element *)a->x.data + pairs[r] / a->slots * a->x.stride[0];
        if (columns) {
            for (int64_t i = 0; i < in; i++) ordered[i] = row[columns[i]];
            row = ordered;
        }
        if (job->weight->mins.at) NAME(row_totals)(totals + r * spans, row, span, in);
#if WITH_DIGITS
        if (found.in_digits) found.in_digits = NAME(row_in_integers)(&found.digits, r, row, job->weight, count);
#endif
        if (sizeof(quantised_input) == sizeof(element)) memcpy(rows + r * in, row, in * sizeof *row);
        else
            for (int64_t i = 0; i < in; i += LANES) store_f32((float *)rows + r * in + i, load(row + i));
    }
    if (found.in_digits) return found;
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
    if (has_tiles && count > FEW_ROWS) {
        pack_tiles((uint16_t *)at, rows, in, count, job->weight->blocks, 0, (count + TILE_ROWS - 1) / TILE_ROWS);
        found.x = (const uint16_t *)at;
    } else if (has_tiles) found.x = few_rows((uint16_t *)at, rows, in, &found.of);
#endif
    return found;
}

/* Some pairs of one expert, over its tasks `first` to `last`. */
static void NAME(multiply_few_bits)(const struct NAME(few_bit_experts) *job, int64_t expert, const int32_t *pairs,
                                    int64_t count, int64_t first, int64_t last) {
    struct expert_outputs to = EXPERT_OUTPUTS(job->a);
    struct NAME(pair_rows) rows = NAME(rows_of_pairs)(job, expert, pairs, count);
    int64_t tasks = (to.width + PANEL - 1) / PANEL, size = (count + TILE_ROWS) * PANEL, in = job->a->x.size[1];
    int64_t begin = (expert * tasks + first) * to.halves, end = (expert * tasks + last) * to.halves;
    float *sums = lasting(2 * size);
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
    const struct block_weight *weight = job->weight;
    _Alignas(64) uint16_t ring[RING * BLOCK_SIZE];
    struct tile_shapes before = tiles_begun();
    int is_few = has_tiles && !rows.in_digits && count <= FEW_ROWS, is_many = has_tiles && count > FEW_ROWS;
    if (is_few) begin_few_rows(&rows.of, ring, begin * weight->blocks, end * weight->blocks);
    if (is_many) set_tile_shapes(TILE_ROWS, TILE_ROWS, least_of(weight->span, TILE_IN));
#endif
    for (int64_t panel = begin; panel < end; panel++) {
        int64_t half = (panel - begin) % to.halves;
        float *own = sums + half * size;
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
        if (is_many) many_rows_of_panel(own, &rows.of, rows.x, 0, (count + TILE_ROWS - 1) / TILE_ROWS, panel);
        else if (is_few) few_rows_of_panel(own, &rows.of, rows.x, in, ring, panel, end * weight->blocks);
        else
#endif
#if WITH_DIGITS
            if (rows.in_digits) integers_of_panel(own, &rows.of, &rows.digits, 0, count, panel);
        else
#endif
            NAME(rows_of_panel)(own, &rows.of, rows.x, in, panel);
        if (half + 1 == to.halves)
            NAME(write_pairs)(&to, sums, sums + size, pairs, count, expert, panel / to.halves - expert * tasks);
    }
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
    tiles_ended(before);
#endif
}

static void NAME(few_bit_tasks)(const void *given, int64_t begin, int64_t end) {
    const struct NAME(few_bit_experts) *job = given;
    const int32_t *offsets = job->a->offsets.data, *order = job->a->order.data;
    int64_t panels = (job->a->out.size[1] + PANEL - 1) / PANEL, together = pairs_together(job->a->x.size[1]), before = 0;
    for (int64_t expert = 0; before < end; expert++) { /* whose tasks they are: experts without a pair have none */
        if (offsets[expert] == offsets[expert + 1]) continue;
        int64_t first = begin > before ? begin - before : 0, last = least_of(end - before, panels);
        for (int64_t at = offsets[expert]; first < last && at < offsets[expert + 1]; at += together)
            NAME(multiply_few_bits)(job, expert, order + at, least_of(together, offsets[expert + 1] - at), first, last);
        before += panels;
    }
}

KERNEL(quantised_expert_linear) {
    int64_t experts = a->offsets.size[0] - 1, panels = (a->out.size[1] + PANEL - 1) / PANEL, busy = 0;
    const int32_t *offsets = a->offsets.data;
    for (int64_t expert = 0; expert < experts; expert++) busy += offsets[expert] < offsets[expert + 1];
    int64_t pairs = offsets[experts], work = pairs * a->x.size[1] * a->out.size[1] * (a->gate == GATE_NONE ? 1 : 2);
    struct block_weight weight = BLOCK_WEIGHT(a);
    if (busy == 0) return;
    read_weight(&weight, a->table.data);
    struct NAME(few_bit_experts) job = {&weight, a};
    int64_t least = items_of(SHARED_WORK * busy * panels, work);
    if (pairs > busy * FEW_ROWS && least < GATHERED_PANELS) least = GATHERED_PANELS;
    parallel(threads, NAME(few_bit_tasks), &job, busy * panels, least);
}
