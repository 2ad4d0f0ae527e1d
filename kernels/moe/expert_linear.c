/* The products of experts with their rows, over weights in panels; see expert_linear.py for the layouts.
 *
 * A task is one panel of an expert that has pairs, or with a gate two of them, which stand side by side. Tiles and sums
 * are those of native_linear.c, and activations those of act_mul.c, which both come before this file in the unit.
 */
#include "native.h"

#ifndef GRAPHDECODE_EXPERT_LINEAR
#define GRAPHDECODE_EXPERT_LINEAR
#define PAIRS_TOGETHER 64 /* whose rows are gathered at a time */

/* Make an activated product of the sums of gate and up, in place of the gate's. */
static void gate_sums(vec *gates, const vec *ups, const expert_linear_args *a) {
    float limit = (float)a->limit;
    for (int v = 0; v < VECTORS; v++) {
        vec gate = gates[v], up = ups[v];
        if (a->gate != GATE_SWIGLU_CLAMPED) {
            gates[v] = activate(gate, a->gate - GATE_SILU + ACTIVATION_SILU) * up;
            continue;
        }
        for (int lane = 0; lane < LANES; lane++) {
            gate[lane] = gate[lane] > limit ? limit : gate[lane];
            up[lane] = up[lane] > limit ? limit : up[lane] < -limit ? -limit : up[lane];
        }
        gates[v] = gate / (1.0f + exp_lanes(gate * -(float)a->alpha)) * (up + 1.0f);
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
    input *rows = (input *)scratch(count * padded);
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

/* Some pairs of one expert, over its tasks `first` to `last`. */
static void NAME(multiply_pairs)(const expert_linear_args *a, int64_t expert, const int32_t *pairs, int64_t count,
                                 int64_t first, int64_t last) {
    int64_t in = a->x.size[1], width = a->out.size[1], stride = 0, size = (in + STEP - 1) / STEP * STEP * PANEL;
    int64_t halves = a->gate == GATE_NONE ? 1 : 2, panels = (width + PANEL - 1) / PANEL;
    const input *x = NAME(gathered)(a, pairs, count, &stride);
    const element *weight = (const element *)a->weight.data + expert * panels * halves * size;
    const element *bias = a->bias.data ? (const element *)a->bias.data + expert * width * halves : 0;
    for (int64_t panel = first; panel < last; panel++) {
        int64_t begin = panel * PANEL, held = least_of(PANEL, width - begin);
        const element *own = weight + panel * halves * size;
        for (int64_t row = 0; row < count; row += ROWS) {
            panel_sums sums[2][MOST_ROWS];
            int64_t here = least_of(ROWS, count - row);
            for (int64_t half = 0; half < halves; half++) {
                FOR_COUNT(NAME(tile), here, sums[half], x + row * stride, stride, own + half * size, in)
                for (int64_t r = 0; bias && r < here; r++)
                    NAME(add_bias)(sums[half][r], bias + half * width + begin, held);
            }
            for (int64_t r = 0; r < here; r++) {
                if (halves == 2) gate_sums(sums[0][r], sums[1][r], a);
                float values[PANEL];
                memcpy(values, sums[0][r], sizeof values);
                element *out = (element *)a->out.data + pairs[row + r] * width + begin;
                for (int64_t j = 0; j < held; j++) out[j] = narrow(values[j]);
            }
        }
    }
}

static void NAME(expert_tasks)(const void *job, int64_t begin, int64_t end) {
    const expert_linear_args *a = job;
    const int32_t *offsets = a->offsets.data;
    int64_t panels = (a->out.size[1] + PANEL - 1) / PANEL, before = 0;
    for (int64_t expert = 0; before < end; expert++) { /* whose tasks they are: experts without a pair have none */
        if (offsets[expert] == offsets[expert + 1]) continue;
        int64_t first = begin > before ? begin - before : 0, last = least_of(end - before, panels);
        for (int64_t at = offsets[expert]; first < last && at < offsets[expert + 1]; at += PAIRS_TOGETHER) {
            int64_t count = least_of(PAIRS_TOGETHER, offsets[expert + 1] - at);
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
