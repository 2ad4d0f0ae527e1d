/* The products of experts with their rows, over weights in panels, plain or quantized; see expert_linear.py.
 *
 * A task is one panel of an expert with pairs, or with a gate two adjacent ones. Tiles and sums are those of linear.c and
 * quantized_linear.c, so that a row has the same bits with few and many others if required. These come before this file in
 * the unit.
 */
#include "native.h"
#include "linear/integer_products.h"
#include "linear/quantized_tiles.h"
#include "model/activations.h"
#include "native_blocks.h"

#define PAIRS_TOGETHER 64 /* pairs whose rows are gathered at a time */

/* The output of all pairs' products, with bias and gate. */
struct expert_outputs {
    void *out;
    int is_wide; /* floats */
    const void *bias; /* [experts][halves * width], or null */
    const float *added; /* [pairs][halves * width], or null */
    int64_t width, halves, gate;
    float alpha, limit;
};

#define EXPERT_OUTPUTS(a)                                                               \
    {(a)->out.data, IS_WIDE((a)->out), (a)->bias.data, (a)->added.data, (a)->out.size[1], \
     (a)->gate == GATE_NONE ? 1 : 2, (a)->gate, (float)(a)->alpha, (float)(a)->limit}

/* Replace the gate's sums by `activation(gate) * up`. */
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

/* Whether rows of `in` features are multiplied in matrix tiles. */
static int tiled_features(int64_t in) {
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
    return has_tiles && in % TILE_IN == 0;
#endif
    return (void)in, 0;
}

/* Return the rows of some pairs in the tiles' type, padded with zeros to whole steps: in place if possible, else gathered in
 * this thread's memory. */
static const input *gathered(const expert_linear_args *a, const int32_t *pairs, int64_t count, int64_t *stride) {
    int64_t in = a->x.size[1], padded = (in + STEP - 1) / STEP * STEP;
    const element *x = a->x.data;
    if (count == 1 && sizeof(input) == sizeof(element) && padded == in)
        return (const input *)(x + pairs[0] / a->slots * a->x.stride[0]);
    input *rows = (input *)scratch((count + TILE_ROWS) * padded); /* rounded up to whole tiles */
    for (int64_t r = 0; r < count; r++) {
        const element *row = x + pairs[r] / a->slots * a->x.stride[0];
        input *out = rows + r * padded;
        if (sizeof(input) == sizeof(element)) memcpy(out, row, in * sizeof *out);
        else widen_row((float *)out, row, in, in);
        for (int64_t i = in; i < padded; i++) out[i] = 0;
    }
    *stride = padded;
    return rows;
}

/* Add values to a row's sums of one panel: elements of a bias, or floats. */
INLINE void add_numbers(const int is_wide, vec *sums, const void *added, int64_t offset, int64_t width) {
    float values[PANEL];
    memcpy(values, sums, sizeof values);
    for (int64_t j = 0; j < width; j++) values[j] += widen_at(is_wide, added, offset + j);
    memcpy(sums, values, sizeof values);
}

/* Add what stands beside some pair's sums of one panel. */
static void add_beside(vec *sums, const struct expert_outputs *to, int64_t expert, int64_t pair, int64_t offset,
                       int64_t width) {
    int64_t all = to->width * to->halves;
    if (to->bias) add_numbers(0, sums, to->bias, expert * all + offset, width);
    if (to->added) add_numbers(1, sums, to->added, pair * all + offset, width);
}

INLINE void write_values(const int is_wide, void *out, int64_t offset, const vec *values, int64_t count) {
    char *at = (char *)out + offset * width_of(is_wide);
    float tail[PANEL];
    char *to = count == PANEL ? at : (char *)tail;
    for (int64_t v = 0; v < VECTORS; v++) store_at(is_wide, to, v * LANES, values[v]);
    if (to != at) memcpy(at, to, count * width_of(is_wide));
}

/* Write some pairs' sums with one panel of an expert, [count][PANEL], or with two if gated. */
static void write_pairs(const struct expert_outputs *to, const float *sums, const float *ups, const int32_t *pairs,
                        int64_t count, int64_t expert, int64_t panel) {
    int64_t width = to->width, begin = panel * PANEL, columns = least_of(PANEL, width - begin);
    for (int64_t r = 0; r < count; r++) {
        vec gate_up[2][VECTORS];
        memcpy(gate_up[0], sums + r * PANEL, sizeof gate_up[0]);
        add_beside(gate_up[0], to, expert, pairs[r], begin, columns);
        if (to->halves == 2) {
            memcpy(gate_up[1], ups + r * PANEL, sizeof gate_up[1]);
            add_beside(gate_up[1], to, expert, pairs[r], width + begin, columns);
            gate_sums(gate_up[0], gate_up[1], to);
        }
        BY_WIDTH(to->is_wide, write_values, to->out, pairs[r] * width + begin, gate_up[0], columns);
    }
}

/* Multiply some pairs of one expert, over its tasks `first` to `last`. A row's sums have the same order for any number of
 * rows. */
static void multiply_pairs(const void *arg, int64_t expert, const int32_t *pairs, int64_t count, int64_t first,
                           int64_t last) {
    const expert_linear_args *a = arg;
    struct expert_outputs to = EXPERT_OUTPUTS(a);
    int64_t in = a->x.size[1], stride = in, size = (in + STEP - 1) / STEP * STEP * PANEL;
    int64_t room = (count + TILE_ROWS) * PANEL, panels = (to.width + PANEL - 1) / PANEL;
    int is_tiled = tiled_features(in);
    const input *x = gathered(a, pairs, count, &stride);
    const element *panel_weight = (const element *)a->weight.data + (expert * panels + first) * to.halves * size;
    float *sums = lasting(2 * room);
    struct tile_shapes before = {0};
    if (is_tiled) before = tiles_begun(), set_tile_rows(least_of(count, TILE_ROWS), count > TILE_ROWS ? TILE_ROWS : 0);
    for (int64_t panel = first; panel < last; panel++) {
        for (int64_t half = 0; half < to.halves; half++, panel_weight += size)
            for (int64_t row = 0, chunk_rows; row < count; row += chunk_rows) {
                chunk_rows = is_tiled ? 2 * TILE_ROWS : part_of(count - row, ROWS);
                float *at = sums + half * room + row * PANEL;
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
                if (is_tiled) {
                    tiles_product(at, x + row * stride, stride, panel_weight, in, count - row);
                    continue;
                }
#endif
                FOR_COUNT(one_panel, chunk_rows, (panel_sums *)at, x + row * stride, stride, panel_weight, in,
                          lines_ahead((const char *)panel_weight, size * sizeof *panel_weight, STEP * PANEL * sizeof *panel_weight,
                                      row, count, chunk_rows, ROWS))
            }
        write_pairs(&to, sums, sums + room, pairs, count, expert, panel);
    }
    if (is_tiled) tiles_ended(before);
}

/* A product's pairs by expert, at most `together` at a time, and the function that multiplies some of one expert over its
 * panels `first` to `last`. */
struct expert_work {
    const void *a; /* the operator's arguments */
    const Routed *routed;
    void (*multiply)(const void *job, int64_t expert, const int32_t *pairs, int64_t count, int64_t first, int64_t last);
    int64_t panels, together;
};

static void expert_tasks(const void *arg, int64_t begin, int64_t end) {
    const struct expert_work *work = arg;
    const int32_t *offsets = work->routed->offsets.data, *order = work->routed->order.data;
    int64_t before = 0;
    for (int64_t expert = 0; before < end; expert++) { /* experts without pairs have no tasks */
        if (offsets[expert] == offsets[expert + 1]) continue;
        int64_t first = begin > before ? begin - before : 0, last = least_of(end - before, work->panels);
        for (int64_t at = offsets[expert]; first < last && at < offsets[expert + 1]; at += work->together) {
            int64_t count = least_of(work->together, offsets[expert + 1] - at);
            work->multiply(work->a, expert, order + at, count, first, last);
        }
        before += work->panels;
    }
}

/* Experts that have pairs. */
static int64_t busy_experts(const Routed *routed) {
    int64_t busy = 0;
    for (int64_t expert = 0; expert + 1 < routed->offsets.size[0]; expert++)
        busy += routed->offsets.data[expert] < routed->offsets.data[expert + 1];
    return busy;
}

KERNEL(expert_linear) {
    int64_t experts = a->offsets.size[0] - 1, in = a->x.size[1], panels = (a->out.size[1] + PANEL - 1) / PANEL;
    int64_t tasks = busy_experts(&a->pairs) * panels;
    int64_t work = a->offsets.data[experts] * in * a->out.size[1] * (a->gate == GATE_NONE ? 1 : 2);
    int64_t together = tiled_features(in) ? rows_together(in) : PAIRS_TOGETHER;
    struct expert_work job = {a, &a->pairs, multiply_pairs, panels, together};
    if (tasks > 0) parallel(threads, expert_tasks, &job, tasks, items_of(SHARED_WORK * tasks, work));
}

#define GATHERED_PANELS 8 /* smallest share of a thread if there are many rows: gathering them costs as much as one panel */

/* Pairs of one expert that are multiplied together: their rows stay in the L2 cache. */
static inline int64_t pairs_together(int64_t in) {
    return items_of(TILED_BYTES, in * 2 * TILE_ROWS) * TILE_ROWS + FEW_ROWS;
}

struct few_bit_experts {
    const struct block_weight *weight;
    const quantized_expert_linear_args *a;
};

/* Rows of pairs, gathered in a thread's memory, with the sums of their spans. */
struct pair_rows {
    struct span_job of;
    const input *x; /* [rows][in], or as few_rows() or pack_tiles() have them */
    int in_digits;
#if WITH_DIGITS
    struct integer_rows digits;
#endif
};

static struct pair_rows rows_of_pairs(const struct few_bit_experts *job, int64_t expert, const int32_t *pairs,
                                      int64_t count) {
    const quantized_expert_linear_args *a = job->a;
    int64_t in = a->x.size[1], span = job->weight->span, spans = (in + span - 1) / span;
    int64_t whole = count + TILE_ROWS; /* rounded up: whole tiles read totals and rows */
    const int32_t *columns = a->columns.data ? a->columns.data + expert * in : 0;
    float *at = scratch(whole * (spans + 2 * in + LANES) + in + 4 * LANES);
    float *totals = carved(&at, whole * spans);
    input *rows = (input *)carved(&at, count * in);
    element *ordered = (element *)carved(&at, in);
    struct pair_rows packed = {{job->weight, count, spans, totals}, rows, 0};
#if WITH_DIGITS
    packed.in_digits = count <= CHECKED_ROWS && takes_integers(job->weight, count, a->batch_invariant);
    if (packed.in_digits) packed.digits = integer_rows_at(at, count, in, spans);
#endif
    for (int64_t r = 0; r < count; r++) {
        const element *row = (const element *)a->x.data + pairs[r] / a->slots * a->x.stride[0];
        if (columns) {
            for (int64_t i = 0; i < in; i++) ordered[i] = row[columns[i]];
            row = ordered;
        }
        if (job->weight->mins.at) row_totals(totals + r * spans, row, span, in);
#if WITH_DIGITS
        if (packed.in_digits) packed.in_digits = row_in_integers(&packed.digits, r, row, job->weight, count);
#endif
        if (sizeof(input) == sizeof(element)) memcpy(rows + r * in, row, in * sizeof *row);
        else widen_row((float *)rows + r * in, row, in, in);
    }
    if (packed.in_digits) return packed;
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
    if (has_tiles && count > FEW_ROWS) {
        pack_tiles((uint16_t *)at, rows, in, count, job->weight->blocks, 0, (count + TILE_ROWS - 1) / TILE_ROWS);
        packed.x = (const uint16_t *)at;
    } else if (has_tiles) packed.x = few_rows((uint16_t *)at, rows, in, &packed.of);
#endif
    return packed;
}

/* Some pairs of one expert, over its tasks `first` to `last`. */
static void multiply_few_bits(const void *arg, int64_t expert, const int32_t *pairs, int64_t count, int64_t first,
                              int64_t last) {
    const struct few_bit_experts *job = arg;
    struct expert_outputs to = EXPERT_OUTPUTS(job->a);
    struct pair_rows rows = rows_of_pairs(job, expert, pairs, count);
    int64_t tasks = (to.width + PANEL - 1) / PANEL, size = (count + TILE_ROWS) * PANEL, in = job->a->x.size[1];
    int64_t begin = (expert * tasks + first) * to.halves, end = (expert * tasks + last) * to.halves;
    float *sums = lasting(2 * size);
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
    const struct block_weight *weight = job->weight;
    _Alignas(64) uint16_t ring[RING * BLOCK_SIZE];
    struct tile_shapes before = tiles_begun();
    int is_few = has_tiles && !rows.in_digits && count <= FEW_ROWS, is_tiled = has_tiles && count > FEW_ROWS;
    if (is_few) begin_few_rows(&rows.of, ring, begin * weight->blocks, end * weight->blocks);
    if (is_tiled) set_tile_shapes(TILE_ROWS, TILE_ROWS, least_of(weight->span, TILE_IN));
#endif
    for (int64_t panel = begin; panel < end; panel++) {
        int64_t half = (panel - begin) % to.halves;
        float *panel_sums = sums + half * size;
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
        if (is_tiled) many_rows_of_panel(panel_sums, &rows.of, rows.x, 0, (count + TILE_ROWS - 1) / TILE_ROWS, panel);
        else if (is_few) few_rows_of_panel(panel_sums, &rows.of, rows.x, in, ring, panel, end * weight->blocks);
        else
#endif
#if WITH_DIGITS
            if (rows.in_digits) integers_of_panel(panel_sums, &rows.of, &rows.digits, 0, count, panel);
        else
#endif
            quantized_panel(panel_sums, &rows.of, rows.x, in, panel);
        if (half + 1 == to.halves)
            write_pairs(&to, sums, sums + size, pairs, count, expert, panel / to.halves - expert * tasks);
    }
#if defined(ELEMENT_BF16) && defined(WITH_TILES)
    tiles_ended(before);
#endif
}

KERNEL(quantized_expert_linear) {
    int64_t experts = a->offsets.size[0] - 1, in = a->x.size[1], panels = (a->out.size[1] + PANEL - 1) / PANEL;
    int64_t busy = busy_experts(&a->pairs), pairs = a->offsets.data[experts];
    int64_t work = pairs * in * a->out.size[1] * (a->gate == GATE_NONE ? 1 : 2);
    struct block_weight weight = BLOCK_WEIGHT(a);
    if (busy == 0) return;
    read_weight(&weight, a->table.data);
    struct few_bit_experts experts_of = {&weight, a};
    struct expert_work job = {&experts_of, &a->pairs, multiply_few_bits, panels, pairs_together(in)};
    int64_t least = items_of(SHARED_WORK * busy * panels, work);
    if (pairs > busy * FEW_ROWS && least < GATHERED_PANELS) least = GATHERED_PANELS;
    parallel(threads, expert_tasks, &job, busy * panels, least);
}
