/* The next token of each row; see sample.py for what rows may ask for, token_filters.py for the integer weights, and race.py
 * for the draw.
 *
 * A row's logits are widened into memory of their own and processed there. Thresholds are found by radix selection: the
 * distances of the logits from the largest, as ordered integers, are counted by their high bits, then by the next ones
 * among those that share them, so that the vocabulary is never sorted.
 */
#include "native.h"

#ifndef GRAPHDECODE_SAMPLE
#define GRAPHDECODE_SAMPLE
#define WEIGHT_SCALE 68719476736.0f /* 2^36 */
#define FRACTION_BITS 24
#define RANGES 5 /* ranges of values, by distance from the largest: 1, 2, 4, 8, more */
#define FIRST_SHIFT 21
#define RADIX_BITS 11
#define BUCKETS (1 << RADIX_BITS)
#define CALLS (NOISE_IDS / 4) /* of Philox, for the ids of one block of noise */

/* Half as many values as in other vectors: 64-bit integers take twice the room. */
#define HALF (LANES / 2)
typedef float half_vec __attribute__((vector_size(4 * HALF)));
typedef int32_t half_ivec __attribute__((vector_size(4 * HALF)));
typedef int64_t wide_ivec __attribute__((vector_size(8 * HALF)));

/* One row at work; `padded` is `vocab` rounded up to whole blocks of noise, and what is behind `vocab` is masked. Logits
 * below `lowest` and weights below `least` are not kept. */
struct line {
    float *logits, *weights;
    int32_t *ids;
    int64_t vocab, padded;
    float largest, lowest, least;
};

/* The halves of the words' products with a constant. */
INLINE void multiply_words(uvec *high, uvec *low, uvec words, uint32_t by) {
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t product = (uint64_t)words[lane] * by;
        (*high)[lane] = (uint32_t)(product >> 32), (*low)[lane] = (uint32_t)product;
    }
}

/* The words of a block's ids; see philox.py. */
static void write_noise(uint32_t *words, uint64_t seed, uint32_t position, int64_t block) {
    for (int call = 0; call < CALLS; call += LANES) {
        uvec zeros = {0}, c[4] = {zeros + position, (uvec)lane_numbers() + (uint32_t)(block * CALLS + call), zeros, zeros};
        uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
        for (int round = 0; round < PHILOX_ROUNDS; round++) {
            uvec even[2], odd[2];
            multiply_words(even, even + 1, c[0], 0xD2511F53);
            multiply_words(odd, odd + 1, c[2], 0xCD9E8D57);
            c[0] = odd[0] ^ c[1] ^ key[0], c[1] = odd[1], c[2] = even[0] ^ c[3] ^ key[1], c[3] = even[1];
            key[0] += 0x9E3779B9, key[1] += 0xBB67AE85;
        }
        for (int word = 0; word < 4; word++) store_words(words + word * CALLS + call, c[word]);
    }
}

/* floor(total * bits / 2^24), without overflow */
static int64_t fraction_of(int64_t total, int64_t bits) {
    int64_t mask = ((int64_t)1 << FRACTION_BITS) - 1;
    return (total >> FRACTION_BITS) * bits + (((total & mask) * bits) >> FRACTION_BITS);
}

/* Integers with the order of the floats; zeros are equal. */
static inline int32_t ordered_key(float value) {
    int32_t bits;
    value += 0.0f;
    memcpy(&bits, &value, sizeof bits);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

static inline float value_of_key(int32_t key) {
    int32_t bits = key < 0 ? key ^ 0x7fffffff : key;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void penalise(const sample_args *a, int64_t row, float *logits) {
    const int32_t *counts = a->token_counts.data + row * a->token_counts.stride[0];
    float repetition = a->repetition_penalty.data[row], presence = a->presence_penalty.data[row];
    float frequency = a->frequency_penalty.data[row];
    for (int64_t i = 0; i < a->logits.size[1]; i++) {
        if (counts[i] == 0) continue;
        float generated = (float)(counts[i] & COUNT_MASK);
        float value = logits[i] > 0 ? logits[i] / repetition : logits[i] * repetition;
        logits[i] = value - (presence * (generated > 0) + frequency * generated);
    }
}

static void mask_tokens(const sample_args *a, int64_t row, float *logits) {
    const int32_t *words = a->token_mask.data + row * a->token_mask.size[1];
    for (int64_t i = 0; i < a->logits.size[1]; i++)
        if (!((uint32_t)words[i / MASK_BITS] >> (i % MASK_BITS) & 1)) logits[i] = -INFINITY;
}

/* Forbid the last token of each word whose others are the last that were generated; see `advance`. */
static void mask_bad_words(const sample_args *a, int64_t row, float *logits) {
    const int32_t *recent = a->recent_tokens.data + row * BAD_WORD_LENGTH;
    int64_t words = a->bad_words.size[1], position = (int64_t)a->positions.data[row] + 1;
    for (int64_t n = 0; n < words; n++) {
        const int32_t *word = a->bad_words.data + (row * words + n) * BAD_WORD_LENGTH;
        int32_t last = word[BAD_WORD_LENGTH - 1];
        int matches = 1;
        if (last < 0) break;
        for (int64_t i = 0; i < BAD_WORD_LENGTH - 1 && matches; i++)
            matches = word[i] < 0 || word[i] == recent[(position + 1 + i) % BAD_WORD_LENGTH];
        if (matches && last < a->logits.size[1]) logits[last] = -INFINITY;
    }
}

static void process_line(const sample_args *a, int64_t row, float *logits) {
    int32_t flags = a->sampling_flags.data[row];
    int64_t vocab = a->logits.size[1], biases = a->bias_ids.size[1], stops = a->stop_ids.size[1];
    const int32_t *bias_ids = a->bias_ids.data + row * biases, *stop_ids = a->stop_ids.data + row * stops;
    if (flags & FLAG_BIAS)
        for (int64_t i = 0; i < biases && bias_ids[i] >= 0; i++)
            if (bias_ids[i] < vocab) logits[bias_ids[i]] += a->bias_values.data[row * biases + i];
    if ((flags & FLAG_PENALTIES) && a->token_counts.data) penalise(a, row, logits);
    if ((flags & FLAG_STOP_MASK) && (int64_t)a->positions.data[row] + 1 < a->min_position.data[row])
        for (int64_t i = 0; i < stops && stop_ids[i] != -1; i++) {
            int32_t masked = stop_ids[i] >= 0 ? stop_ids[i] : -2 - stop_ids[i]; /* see masked_only */
            if (masked < vocab) logits[masked] = -INFINITY;
        }
    if (flags & FLAG_TOKEN_MASK) mask_tokens(a, row, logits);
    if ((flags & FLAG_BAD_WORDS) && a->recent_tokens.data) mask_bad_words(a, row, logits);
}

/* Divide by the temperature. */
static void scale_line(struct line *line, float temperature) {
    line->largest /= temperature;
    for (int64_t i = line->vocab; i < line->padded; i++) line->logits[i] = -INFINITY;
    for (int64_t i = 0; i < line->padded; i += LANES) store_f32(line->logits + i, load_f32(line->logits + i) / temperature);
}

static inline vec line_weights(const struct line *line, vec logits) { return exp_lanes(logits - line->largest) * WEIGHT_SCALE; }

static inline int64_t kept_weight(const struct line *line, int64_t i) {
    return line->logits[i] >= line->lowest ? (int64_t)line->weights[i] : 0;
}

static inline half_vec load_half(const float *at) {
    half_vec v;
    memcpy(&v, at, sizeof v);
    return v;
}

static int64_t sum_wide(wide_ivec sum) {
    int64_t total = 0;
    for (int lane = 0; lane < HALF; lane++) total += sum[lane];
    return total;
}

static int64_t kept_sum(const struct line *line) {
    wide_ivec sum = {0};
    for (int64_t i = 0; i < line->padded; i += HALF) {
        half_ivec kept = load_half(line->logits + i) >= line->lowest;
        half_vec weights = (half_vec)(kept & (half_ivec)load_half(line->weights + i));
        sum += __builtin_convertvector(weights, wide_ivec);
    }
    return sum_wide(sum);
}

/* Find the range of the threshold, and write its ids; what is above is subtracted from `needed`. */
static int64_t narrowed(const struct line *line, int64_t *needed, int by_weight) {
    float borders[RANGES];
    wide_ivec sums[RANGES - 1] = {{0}};
    for (int n = 0; n < RANGES - 1; n++) borders[n] = line->largest - (float)(1 << n);
    borders[RANGES - 1] = -INFINITY;
    for (int64_t i = 0; i < line->padded; i += HALF) {
        half_vec logits = load_half(line->logits + i);
        half_ivec kept = logits >= line->lowest;
        half_vec measures = by_weight ? load_half(line->weights + i) : (half_vec){0} + 1.0f;
        wide_ivec measure = __builtin_convertvector((half_vec)(kept & (half_ivec)measures), wide_ivec);
        for (int n = 0; n < RANGES - 1; n++)
            sums[n] += measure & __builtin_convertvector(logits >= borders[n], wide_ivec);
    }
    int range = 0;
    int64_t above = 0, count = 0;
    for (; range < RANGES - 1; range++) {
        int64_t reached = sum_wide(sums[range]);
        if (reached >= *needed) break;
        above = reached;
    }
    *needed -= above;
    for (int64_t i = 0; i < line->vocab; i++) {
        float value = line->logits[i];
        line->ids[count] = (int32_t)i;
        count += value >= borders[range] && (range == 0 || value < borders[range - 1]);
    }
    return count;
}

/* The largest logit such that kept logits >= it measure `needed`, in weight or ids. */
static float threshold(const struct line *line, int64_t needed, int by_weight) {
    uint32_t top = (uint32_t)ordered_key(line->largest), distance = 0;
    int64_t count = narrowed(line, &needed, by_weight);
    for (int shift = FIRST_SHIFT; shift >= 0; shift -= RADIX_BITS - (shift < RADIX_BITS)) {
        int64_t sums[BUCKETS] = {0}, left = 0;
        uint32_t bucket = 0;
        for (int64_t n = 0; n < count; n++) {
            uint32_t away = top - (uint32_t)ordered_key(line->logits[line->ids[n]]);
            sums[(away >> shift) % BUCKETS] += by_weight ? kept_weight(line, line->ids[n]) : 1;
        }
        while (bucket < BUCKETS - 1 && sums[bucket] < needed) needed -= sums[bucket++];
        distance |= bucket << shift;
        for (int64_t n = 0; n < count; n++) {
            uint32_t away = top - (uint32_t)ordered_key(line->logits[line->ids[n]]);
            line->ids[left] = line->ids[n];
            left += away >> shift == distance >> shift;
        }
        count = left;
    }
    return value_of_key((int32_t)(top - distance));
}

/* When a token arrives of this distance from the largest logit. */
static double arrival(uint32_t word, double distance) { return -log1p(-(word + 0.5) * 0x1p-32) / exp(distance); }

/* The kept token that arrives first. Tokens that cannot, by a bound of float32 with room for its error, take no logarithm,
 * and blocks of such by their logits alone no noise. */
static int64_t first_to_arrive(const struct line *line, uint64_t seed, uint32_t position, int64_t leader) {
    uint32_t words[NOISE_IDS];
    write_noise(words, seed, position, leader / NOISE_IDS);
    double earliest = arrival(words[leader % NOISE_IDS], 0), largest = line->largest;
    float lightest = logf(line->least / WEIGHT_SCALE); /* -inf: all are kept */
    for (int64_t begin = 0; begin < line->padded; begin += NOISE_IDS) {
        float farthest = fmaxf(lightest, (float)log(0x1p-33 / earliest)) - 1e-3f, reach = (float)(earliest * 0x1p31) * 1.00001f;
        ivec near = {0};
        for (int64_t i = begin; i < begin + NOISE_IDS; i += LANES) {
            vec logits = load_f32(line->logits + i);
            near |= (ivec)(logits >= line->lowest) & (ivec)(logits - line->largest >= farthest);
        }
        if (!any_lane(near)) continue;
        write_noise(words, seed, position, begin / NOISE_IDS);
        for (int64_t i = begin; i < begin + NOISE_IDS; i += LANES) {
            vec logits = load_f32(line->logits + i), weights = line_weights(line, logits);
            vec shares = __builtin_convertvector((ivec)(load_words(words + i - begin) >> 1), vec);
            ivec kept = (ivec)(logits >= line->lowest) & (ivec)(weights >= line->least);
            kept &= (ivec)(shares <= weights * (reach / WEIGHT_SCALE));
            if (!any_lane(kept)) continue;
            for (int lane = 0; lane < LANES; lane++) {
                if (!kept[lane]) continue;
                double time = arrival(words[i + lane - begin], (double)logits[lane] - largest);
                if (time < earliest || (time == earliest && i + lane < leader)) earliest = time, leader = i + lane;
            }
        }
    }
    return leader;
}

static int64_t draw_token(const sample_args *a, int64_t row, struct line *line, int64_t leader) {
    float temperature = a->temperature.data[row];
    if (!isfinite(line->largest / temperature)) return TOO_COLD;
    scale_line(line, temperature);
    int64_t k = a->top_k.data[row], by_count = k > 0 && k < line->vocab;
    float top_p = a->top_p.data[row], min_p = a->min_p.data[row];
    if (by_count) line->lowest = threshold(line, k, 0);
    if (top_p < 1.0f) {
        for (int64_t i = 0; i < line->padded; i += LANES)
            store_f32(line->weights + i, line_weights(line, load_f32(line->logits + i)));
        int64_t needed = fraction_of(kept_sum(line), (int64_t)(top_p * (float)(1 << FRACTION_BITS)));
        line->lowest = threshold(line, needed > 1 ? needed : 1, 1);
    }
    if (by_count || top_p < 1.0f || min_p > 0.0f) line->least = 1.0f;
    if (min_p > 0.0f) line->least = fmaxf(1.0f, truncf(min_p * WEIGHT_SCALE));
    uint32_t position = (uint32_t)a->positions.data[row] + 1;
    return first_to_arrive(line, (uint64_t)a->seed.data[row], position, leader);
}

/* The id, or the code of no choice for its logit, the largest or a NaN. */
static inline int64_t choice(int64_t id, float largest) {
    return isfinite(largest) ? id : largest < 0 ? WITHOUT_FINITE : WITHOUT_NUMBERS;
}
#endif

/* The first index of the largest value, or of the first NaN. */
static int64_t NAME(argmax)(const element *x, int64_t count) {
    vec largest = splat(-INFINITY); /* per lane, with the index of its vector */
    ivec indices = {0}, is_nan = {0};
    int64_t best_id = 0, i = 0;
    for (; i + LANES <= count; i += LANES) {
        vec v = load(x + i);
        ivec beats = v > largest;
        largest = (vec)((beats & (ivec)v) | (~beats & (ivec)largest));
        indices = (beats & (int32_t)i) | (~beats & indices);
        is_nan |= v != v;
    }
    float best = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) {
        if (is_nan[lane]) i = 0; /* look at each */
        if (largest[lane] > best || (largest[lane] == best && indices[lane] + lane < best_id))
            best = largest[lane], best_id = indices[lane] + lane;
    }
    for (; i < count; i++) {
        float value = widen(x[i]);
        if (value != value) return i;
        if (value > best) best = value, best_id = i;
    }
    return best_id;
}

#ifdef SHARED_ELSEWHERE /* a processed line is in floats, whatever the logits were */
static int64_t (*choose_token)(const sample_args *a, int64_t row, struct line *line);
SHARED(choose_token)
#else
int64_t choose_token(const sample_args *a, int64_t row, struct line *line) {
    process_line(a, row, line->logits);
    int64_t best = argmax_f32(line->logits, line->vocab);
    line->largest = line->logits[best];
    best = choice(best, line->largest);
    return best >= 0 && (a->sampling_flags.data[row] & FLAG_SAMPLE) ? draw_token(a, row, line, best) : best;
}
#endif

static void NAME(sample_rows)(const void *job, int64_t begin, int64_t end) {
    const sample_args *a = job;
    int64_t vocab = a->logits.size[1], padded = (vocab + NOISE_IDS - 1) / NOISE_IDS * NOISE_IDS;
    for (int64_t row = begin; row < end; row++) {
        const element *logits = (const element *)a->logits.data + row * a->logits.stride[0];
        if (!(a->sampling_flags.data[row] & ~FLAG_LOGPROBS)) {
            int64_t best = NAME(argmax)(logits, vocab);
            a->sampled.data[row] = choice(best, widen(logits[best]));
            continue;
        }
        float *memory = scratch(3 * padded);
        struct line line = {memory, memory + padded, (int32_t *)(memory + 2 * padded), vocab, padded, 0, -INFINITY, 0};
        int64_t i = 0;
        for (; i + LANES <= vocab; i += LANES) store_f32(memory + i, load(logits + i));
        for (; i < vocab; i++) memory[i] = widen(logits[i]);
        a->sampled.data[row] = choose_token(a, row, &line);
    }
}

KERNEL(sample) {
    int64_t rows = a->logits.size[0], live = live_of(a->live_rows.data, rows);
    for (int64_t row = live; row < rows; row++) a->sampled.data[row] = DEAD_TOKEN;
    parallel(threads, NAME(sample_rows), a, live, items_of(PARALLEL_WORK, a->logits.size[1]));
}
