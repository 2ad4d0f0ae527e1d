/* The products of experts with their rows, over weights in panels, whole or of few bits; see expert_linear.py.
 *
 * A task is one panel of an expert that has pairs, or with a gate two of them, which stand side by side. Tiles and sums
 * are those of linear.c and quantized_linear.c, so that a row has the same bits with few others and with many where it
 * must, and activations those of act_mul.c, which come before this file in the unit.
 */
#include "native.h"
#include "linear/integer_products.h"
#include "linear/quantized_tiles.h"
#include "native_blocks.h"

#ifndef GRAPHDECODE_EXPERT_LINEAR
#define GRAPHDECODE_EXPERT_LINEAR
#define PAIRS_TOGETHER 64 /* whose rows are gathered at a time */

/* Where the products of all pairs go, and what is done with their sums before. */
struct expert_outputs {
    void *out;
    int is_wide; /* floats */
    const void *bias; /* [experts][halves * width], or none */
    int64_t width, halves, gate;
    float alpha, limit;
};

#define EXPERT_OUTPUTS(a)                                                               \
    {(a)->out.data, IS_WIDE((a)->out), (a)->bias.data, (a)->out.size[1], (a)->gate == GATE_NONE ? 1 : 2, (a)->gate, \
     (float)(a)->alpha, (float)(a)->limit}

/* Make an activated product of the sums of gate and up, in place of the gate's. */
static void gate_sums(vec *gates, const vec *ups, const struct expert_outputs *to) {
    float limit = to->limit;
    for (int v = 0; v < VECTORS; v++) {
        vec gate = gates[v], up = ups[v];
        if (to->gate != GATE_SWIGLU_CLAMPED) {
            gates[v] = activate(gate, to->gate - GATE_SILU + ACTIVATION_SILU) * up;
            continue;
        }
        for (int lane = 0; lane < LANES; lane++) {
            gate[lane] = gate[lane] > limit ? limit : gate[lane];
            up[lane] = up[lane] > limit ? limit : up[lane] < -limit ? -limit : up[lane];
        }
        gates[v] = gate / (1.0f + exp_lanes(gate * -to->alpha)) * (up + 1.0f);
    }
}
#endif

/* Return the rows of some pairs in the type that tiles take, padded with zeros to whole steps: one that is so already is
 * where it is, others are brought together in this thread's memory. */
static const input *NAME(gathered)(const expert_linear_args *a, const int32_t *pairs, int64_t count, int64_t *stride) {
    int64_t in = a->x.size[1], padded = (in + STEP - 1) / STEP * STEP;
    const element *x = a->x.data;
    if (count == 1 && sizeof(input) == sizeof(element) && padded == in)
        return (const input *)(x + pairs[0] / a->slots * a->x.stride[0]);
    input *rows = (input *)scratch((count + TILE_ROWS) * padded); /* whole tiles read as many rows */
    for (int64_t r = 0; r < count; r++) {
        const element *row = x + pairs[r] / a->slots * a->x.stride[0];
        input *out = rows + r * padded;
        if (sizeof(input) == sizeof(element)) {
            memcpy(out, row, in * sizeof *out);
        } else {
            int64_t i = 0;
            for (; i + LANES <= in; i += LANES) store_f32((float *)out + i, load(row + i));
            for (; i < in; i++) out[i] = widen(row[i]);
        }
        for (int64_t i = in; i < padded; i++) out[i] = 0;
    }
    *stride = padded;
    return rows;
}

/* Add the bias of some outputs to a row's sums of one panel. */
static void NAME(add_bias)(vec *sums, const element *bias, int64_t width) {
    float values[PANEL];
    memcpy(values, sums, sizeof values);
    for (int64_t j = 0; j < width; j++) values[j] += widen(bias[j]);
    memcpy(sums, values, sizeof values);
}

INLINE void NAME(write_values)(const int is_wide, void *out, int64_t place, const vec *values, int64_t count) {
    char *at = (char *)out + place * width_of(is_wide);
    float held[PANEL];
    char *to = count == PANEL ? at : (char *)held;
    for (int64_t v = 0; v < VECTORS; v++) store_at(is_wide, to, v * LANES, values[v]);
    if (to != at) memcpy(at, to, count * width_of(is_wide));
}

/* Write some pairs' sums with one panel of an expert, [count][PANEL], or gated those with two of them. */
static void NAME(write_pairs)(const struct expert_outputs *to, const float *sums, const float *ups, const int32_t *pairs,
                              int64_t count, int64_t expert, int64_t panel) {
    int64_t width = to->width, begin = panel * PANEL, held = least_of(PANEL, width - begin);
    const element *bias = to->bias ? (const element *)to->bias + expert * width * to->halves + begin : 0;
    for (int64_t r = 0; r < count; r++) {
        vec found[2][VECTORS];
        memcpy(found[0], sums + r * PANEL, sizeof found[0]);
        if (bias) NAME(add_bias)(found[0], bias, held);
        if (to->halves == 2) {
            memcpy(found[1], ups + r * PANEL, sizeof found[1]);
            if (bias) NAME(add_bias)(found[1], bias + width, held);
            gate_sums(found[0], found[1], to);
        }
        BY_WIDTH(to->is_wide, NAME(write_values), to->out, pairs[r] * width + begin, found[0], held);
    }
}

/* Some pairs of one expert, over its tasks `first` to `last`. */
static void NAME(multiply_pairs)(const expert_linear_args *a, int64_t expert, const int32_t *pairs, int64_t count,
                                 int64_t first, int64_t last) {
    struct expert_outputs to = EXPERT_OUTPUTS(a);
    int64_t in = a->x.size[1], stride = 0, size = (in + STEP - 1) / STEP * STEP * PANEL;
    int64_t panels = (to.width + PANEL - 1) / PANEL;
    const input *x = NAME(gathered)(a, pairs, count, &stride);
    const element *weight = (const element *)a->weight.data + expert * panels * to.halves * size;
    for (int64_t panel = first; panel < last; panel++) {
        const element *own = weight + panel * to.halves * size;
        for (int64_t row = 0; row < count; row += ROWS) {
            panel_sums sums[2][MOST_ROWS];
            int64_t here = least_of(ROWS, count - row);
            for (int64_t half = 0; half < to.halves; half++)
                FOR_COUNT(NAME(tile), here, sums[half], x + row * stride, stride, own + half * size, in)
            NAME(write_pairs)(&to, (float *)sums[0], (float *)sums[1], pairs + row, here, expert, panel);
        }
    }
}

#if defined(ELEMENT_BF16) && defined(WITH_TILES)
/* The same in matrix tiles, which a row's sums have in one order, too, however many rows there are. */
static void tiled_pairs(const expert_linear_args *a, int64_t expert, const int32_t *pairs, int64_t count, int64_t first,
                        int64_t last) {
    struct expert_outputs to = EXPERT_OUTPUTS(a);
    int64_t in = a->x.size[1], stride = in, panels = (to.width + PANEL - 1) / PANEL, room = (count + TILE_ROWS) * PANEL;
    const uint16_t *x = gathered_bf16(a, pairs, count, &stride);
    const uint16_t *own = (const uint16_t *)a->weight.data + (expert * panels + first) * to.halves * in * PANEL;
    float *sums = lasting(2 * room);
    struct tile_shapes before = tiles_begun();
    set_tile_rows(least_of(count, TILE_ROWS), count > TILE_ROWS ? TILE_ROWS : 0);
    for (int64_t panel = first; panel < last; panel++) {
        for (int64_t half = 0; half < to.halves; half++, own += in * PANEL)
            for (int64_t row = 0; row < count; row += 2 * TILE_ROWS) {
                float *at = sums + half * room + row * PANEL;
                tiles_product(at, x + row * stride, stride, own, in, count - row);
            }
        write_pairs_bf16(&to, sums, sums + room, pairs, count, expert, panel);
    }
    tiles_ended(before);
}
#endif

static void NAME(expert_tasks)(const void *job, int64_t begin, int64_t end) {
    const expert_linear_args *a = job;
    const int32_t *offsets = a->offsets.data;
    int64_t panels = (a->out.size[1] + PANEL - 1) / PANEL, before = 0, together = PAIRS_TOGETHER;
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
    int in_tiles = has_tiles && a->x.size[1] % TILE_IN == 0;
    if (in_tiles) together = rows_together(a->x.size[1]);
#endif
    for (int64_t expert = 0; before < end; expert++) { /* whose tasks they are: experts without a pair have none */
        if (offsets[expert] == offsets[expert + 1]) continue;
        int64_t first = begin > before ? begin - before : 0, last = least_of(end - before, panels);
        for (int64_t at = offsets[expert]; first < last && at < offsets[expert + 1]; at += together) {
            int64_t count = least_of(together, offsets[expert + 1] - at);
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
            if (in_tiles) {
                tiled_pairs(a, expert, a->order.data + at, count, first, last);
                continue;
            }
#endif
            NAME(multiply_pairs)(a, expert, a->order.data + at, count, first, last);
        }
        before += panels;
    }
}

KERNEL(expert_linear) {
    int64_t experts = a->offsets.size[0] - 1, panels = (a->out.size[1] + PANEL - 1) / PANEL, tasks = 0;
    for (int64_t expert = 0; expert < experts; expert++)
        if (a->offsets.data[expert] < a->offsets.data[expert + 1]) tasks += panels;
    int64_t work = a->offsets.data[experts] * a->x.size[1] * a->out.size[1] * (a->gate == GATE_NONE ? 1 : 2);
    if (tasks > 0) parallel(threads, NAME(expert_tasks), a, tasks, items_of(SHARED_WORK * tasks, work));
}

#ifndef GRAPHDECODE_QUANTIZED_EXPERT_LINEAR
#define GRAPHDECODE_QUANTIZED_EXPERT_LINEAR
#define GATHERED_PANELS 8 /* a thread's share at least where rows are many: gathering them costs as much as one */

/* How many pairs of one expert are multiplied together: their rows stay in the second cache. */
static inline int64_t pairs_together(int64_t in) {
    return items_of(TILED_BYTES, in * 2 * TILE_ROWS) * TILE_ROWS + FEW_ROWS;
}
#endif

struct NAME(few_bit_experts) {
    const struct block_weight *weight;
    const quantized_expert_linear_args *a;
};

/* Rows of pairs, brought together in a thread's memory, with the sums of their spans. */
struct NAME(pair_rows) {
    struct span_job of;
    const quantized_input *x; /* [rows][in], or as few_rows() or pack_tiles() have them */
    int in_digits;
#if WITH_DIGITS
    struct integer_rows digits;
#endif
};

static struct NAME(pair_rows) NAME(rows_of_pairs)(const struct NAME(few_bit_experts) *job, int64_t expert,
                                                  const int32_t *pairs, int64_t count) {
    const quantized_expert_linear_args *a = job->a;
    int64_t in = a->x.size[1], span = job->weight->span, spans = (in + span - 1) / span;
    int64_t whole = count + TILE_ROWS; /* whole tiles read as many rows' totals, and hold as many rows */
    const int32_t *columns = a->columns.data ? a->columns.data + expert * in : 0;
    float *at = scratch(whole * (spans + 2 * in + LANES) + in + 4 * LANES);
    float *totals = carved(&at, whole * spans);
    quantized_input *rows = (quantized_input *)carved(&at, count * in);
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
        if (sizeof(quantized_input) == sizeof(element)) memcpy(rows + r * in, row, in * sizeof *row);
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

KERNEL(quantized_expert_linear) {
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
