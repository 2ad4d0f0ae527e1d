/* Token embedding; see embedding.py. Dead tokens and invalid ids read row 0. */
#include "native.h"
#include "native_blocks.h"

INLINE void NAME(embed)(const int is_wide, void *out, const element *row, int64_t hidden, float scale) {
    int64_t i = 0;
    if (scale == 1.0f && width_of(is_wide) == sizeof *row) {
        memcpy(out, row, hidden * sizeof *row);
        return;
    }
    for (; i + LANES <= hidden; i += LANES) store_at(is_wide, out, i, load(row + i) * scale);
    for (; i < hidden; i++) narrow_at(is_wide, out, i, widen(row[i]) * scale);
}

KERNEL(embedding) {
    (void)threads;
    int64_t live = *a->live.data, hidden = a->weight.size[1], is_wide = IS_WIDE(a->out);
    for (int64_t i = 0; i < a->tokens.size[0]; i++) {
        int64_t id = i < live ? a->tokens.data[i] : 0, token = id >= 0 && id < a->weight.size[0] ? id : 0;
        const element *row = (const element *)a->weight.data + token * a->weight.stride[0];
        char *out = (char *)a->out.data + i * hidden * width_of(is_wide);
        BY_WIDTH(is_wide, NAME(embed), out, row, hidden, (float)a->scale);
    }
}

#ifndef GRAPHDECODE_QUANTIZED_EMBEDDING
#define GRAPHDECODE_QUANTIZED_EMBEDDING
#define SHARED_TOKENS 8 /* fewest tokens of a chunk */

struct gathered_row {
    int64_t panel, column;
};

/* The code of an input feature of a block: see `codes_at`. */
static inline int code_of(const uint16_t *block, int bits, int64_t feature, int64_t column) {
    const int low = low_bits(bits), high = bits - low;
    const int64_t k = feature / 2 * 2 + column / HALF_PANEL, word = 2 * (column % HALF_PANEL) + feature % 2;
    int code = block[k * low / 16 * ROW_WORDS + word] >> k * low % 16 & ((1 << low) - 1);
    if (high > 0) {
        const uint16_t *behind = block + (2 * low + k * high / 16) * ROW_WORDS;
        code |= (behind[word] >> k * high % 16 & ((1 << high) - 1)) << low;
    }
    return code;
}

static inline float number_at(const struct block_numbers *numbers, const struct gathered_row *row, int64_t span) {
    return number_of(numbers, row->panel, span, row->column / LANES)[row->column % LANES];
}
#endif

struct NAME(embedding_job) {
    const quantized_embedding_args *a;
    const struct block_weight *weight;
};

static void NAME(gather_rows)(const void *job, int64_t begin, int64_t end) {
    const quantized_embedding_args *a = ((const struct NAME(embedding_job) *)job)->a;
    const struct block_weight *weight = ((const struct NAME(embedding_job) *)job)->weight;
    int64_t live = *a->live.data, words = weight->bits * BLOCK_SIZE / 16, hidden = a->out.size[1];
    for (int64_t i = begin; i < end; i++) {
        int64_t id = i < live ? a->tokens.data[i] : 0, token = id >= 0 && id < a->vocab_size ? id : 0;
        struct gathered_row row = {token / PANEL, token % PANEL};
        element *out = (element *)a->out.data + i * hidden;
        for (int64_t span = 0, feature = 0; feature < hidden; span++) {
            float scale = number_at(&weight->scales, &row, span);
            float least = weight->mins.at ? number_at(&weight->mins, &row, span) : 0.0f;
            for (int64_t last = least_of(feature + weight->span, hidden); feature < last; feature++) {
                const uint16_t *block = weight->panels + (row.panel * weight->blocks + feature / QUANTIZED_BLOCK) * words;
                int code = code_of(block, weight->bits, feature % QUANTIZED_BLOCK, row.column);
                float value = weight->bits == 8 ? (float)(int8_t)code : weight->floats[code];
                element rounded = narrow(value * scale + least); /* as in the plain table */
                out[feature] = a->scale == 1.0 ? rounded : narrow(widen(rounded) * (float)a->scale);
            }
        }
    }
}

KERNEL(quantized_embedding) {
    struct block_weight weight = BLOCK_WEIGHT(a);
    struct NAME(embedding_job) job = {a, &weight};
    read_weight(&weight, a->table.data);
    parallel(threads, NAME(gather_rows), &job, a->tokens.size[0], SHARED_TOKENS);
}
