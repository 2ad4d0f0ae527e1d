/* Quantized weights in blocks: from codes to bf16 or float; see quantized_linear.py for the layouts.
 *
 * A table says which integer, of at most 8 bits, a code means, so that bf16 holds it exactly. Scales and least values are
 * numbers of their own, which a product applies to the sums of a group.
 */
#pragma once

#include "native_products.h"
#define HALF_PANEL 16 /* adjacent output features of a word row */
#define BLOCK_SIZE (QUANTIZED_BLOCK * PANEL)
#define CHUNK_BLOCKS 8 /* blocks unpacked together, which stay in the L1 cache */
#define CHUNK (CHUNK_BLOCKS * QUANTIZED_BLOCK)
#define LEAST_GROUP 16
#define MOST_GROUPS (CHUNK / LEAST_GROUP) /* of a chunk */
#define TABLE 64
#define ROW_WORDS 32 /* of 16 bits, with the codes of all output features of a panel */
#define NUMBERS_AHEAD 1024 /* bytes of scales or minima: prefetched ones of the next chunk */
#define BYTES_AHEAD 8192 /* of codes, prefetched row by row: many at a time delay other loads */

/* The scales, or the least values, of all panels: for each panel and group one for each output feature. With factors
 * they are int8, to be multiplied with those, of which each serves some neighbouring groups. */
struct block_numbers {
    const void *at, *factors;
    int64_t groups, factor_groups, dtype;
    uint32_t spans_of_group, groups_of_factor;
};

struct block_weight {
    const uint16_t *panels;
    int64_t blocks; /* of a panel */
    int bits;
    int is_e4m3;   /* codes of 8 bits are float8 */
    int is_linear; /* a code's value is itself minus `zero` */
    int zero;
    int64_t span; /* input features that are summed before scaling */
    struct block_numbers scales, mins;
    float floats[TABLE];
    uint16_t pairs[TABLE]; /* bf16 */
};

static inline vec load_number(const void *at, int64_t index, int64_t dtype) {
    if (dtype == SCALE_DTYPE_FLOAT32) return load_f32((const float *)at + index);
    if (dtype == SCALE_DTYPE_BFLOAT16) return load_bf16((const uint16_t *)at + index);
    return load_f16((const uint16_t *)at + index);
}

/* A vector of a panel's numbers for a span of input features. */
INLINE vec number_of(const struct block_numbers *numbers, int64_t panel, int64_t span, int64_t vector) {
    int64_t group = (uint32_t)span / numbers->spans_of_group;
    int64_t index = (panel * numbers->groups + group) * PANEL + vector * LANES;
    if (!numbers->factors) return load_number(numbers->at, index, numbers->dtype);
    int64_t factor = panel * numbers->factor_groups + (uint32_t)group / numbers->groups_of_factor;
    return load_i8((const int8_t *)numbers->at + index) *
           load_number(numbers->factors, factor * PANEL + vector * LANES, numbers->dtype);
}

/* The numbers of some spans of a panel, one behind another. */
static void numbers_of_spans(vec (*out)[VECTORS], const struct block_numbers *numbers, int64_t panel, int64_t span,
                             int64_t count) {
    int64_t group = (uint32_t)span / numbers->spans_of_group, of_factor = numbers->groups_of_factor;
    int64_t left = (group + 1) * numbers->spans_of_group - span; /* of the group; likewise the factor's groups */
    int64_t factor = numbers->factors ? (uint32_t)group / numbers->groups_of_factor : 0;
    int64_t groups_left = (factor + 1) * of_factor - group;
    int64_t index = (panel * numbers->groups + group) * PANEL;
    const int64_t bytes = numbers->factors ? 1 : numbers->dtype == SCALE_DTYPE_FLOAT32 ? 4 : 2;
    vec factors[VECTORS];
    for (int64_t i = 0, is_new = 1; i < count; i++) {
        for (int v = 0; numbers->factors && is_new && v < VECTORS; v++)
            factors[v] = load_number(numbers->factors, (panel * numbers->factor_groups + factor) * PANEL + v * LANES,
                                     numbers->dtype);
        is_new = 0;
        __builtin_prefetch((const char *)numbers->at + index * bytes + NUMBERS_AHEAD, 0, 3);
        for (int v = 0; v < VECTORS; v++)
            if (numbers->factors) out[i][v] = load_i8((const int8_t *)numbers->at + index + v * LANES) * factors[v];
            else out[i][v] = load_number(numbers->at, index + v * LANES, numbers->dtype);
        if (--left > 0) continue;
        left = numbers->spans_of_group, index += PANEL;
        if (--groups_left == 0) groups_left = of_factor, factor++, is_new = 1;
    }
}

static inline int low_bits(int bits) { return bits == 8 ? 8 : bits >= 4 ? 4 : 2; }

INLINE void ask_ahead(const uint16_t *row) { __builtin_prefetch((const char *)row + BYTES_AHEAD, 0, 2); }

/* The codes' words of a block, in place of a pair of input features and half of the panel: their low and, shifted up to
 * where these end, their high bits; above them is what there is. `bits` and `k` are constants where this is used. */
INLINE uvec codes_at(const int bits, const uint16_t *at, const int k, const int lane, const int odd) {
    const int low = low_bits(bits), high = bits - low, behind = 2 * low * ROW_WORDS;
    const int bit = k * low % 16 + 16 * odd;
    uvec codes = load_words(at + k * low / 16 * ROW_WORDS + 2 * lane) >> bit & ((1 << low) - 1);
    if (high > 0) {
        const int above = k * high % 16 + 16 * odd;
        codes |= (load_words(at + behind + k * high / 16 * ROW_WORDS + 2 * lane) >> above & ((1 << high) - 1)) << low;
    }
    return codes;
}

/* float8 with four bits of exponent: those of a float's, moved; without one the fraction's eighths of 2^-6. */
static inline vec e4m3(uvec codes) {
    uvec normal = ((codes & 127) << 20) + ((uint32_t)(127 - 7) << 23);
    uvec small = (uvec)(__builtin_convertvector((ivec)(codes & 7), vec) * 0x1p-9f);
    uvec has_exponent = (uvec)((codes & 120) != 0);
    return (vec)((normal & has_exponent) | (small & ~has_exponent) | (codes & 128) << 24);
}

INLINE vec meant(const int bits, const struct block_weight *weight, uvec codes) {
    vec values;
    if (bits == 8 && weight->is_e4m3) return e4m3(codes & 255);
    if (bits == 8) return __builtin_convertvector((ivec)(codes << 24) >> 24, vec);
    if (weight->is_linear) return __builtin_convertvector((ivec)codes - weight->zero, vec);
#ifndef __clang__ /* which shuffles by constants alone */
    if (bits <= 4 && LANES == 16) return __builtin_shuffle(load_f32(weight->floats), (ivec)codes);
    if (bits <= 4 && LANES == 8)
        return __builtin_shuffle(load_f32(weight->floats), load_f32(weight->floats + LANES), (ivec)codes);
#endif
    for (int lane = 0; lane < LANES; lane++) values[lane] = weight->floats[codes[lane]];
    return values;
}

/* A block's weights as floats: what its codes mean, scaled, and the least value of its group, in one rounding. They are
 * written to `out`, [in][PANEL], or where that is null multiplied with the values of a row and added to its sums. A block
 * has one span's numbers, or two spans'. */
INLINE void dequantize_floats(const int bits, float *out, vec *sums, const float *x, const uint16_t *at,
                        const struct block_weight *weight, const vec (*scales)[VECTORS], const vec (*mins)[VECTORS]) {
    const int unrolled = bits == 4 || bits == 8 ? 4 : 8; /* more take long to compile, for no gain */
    for (int first = 0; first < QUANTIZED_BLOCK; first += unrolled) {
        const int64_t index = weight->span < QUANTIZED_BLOCK ? first / LEAST_GROUP : 0;
#pragma GCC unroll 8
        for (int k = first; k < first + unrolled; k++) /* a pair of input features, and half of the panel */
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 4
                for (int lane = 0; lane < HALF_PANEL; lane += LANES) {
                    const int feature = k / 2 * 2 + odd, v = (k % 2 * HALF_PANEL + lane) / LANES;
                    vec value = meant(bits, weight, codes_at(bits, at, k, lane, odd)) * scales[index][v] + mins[index][v];
                    if (out) store_f32(out + feature * PANEL + v * LANES, value);
                    else sums[v] += value * x[feature];
                }
    }
}

#define FOR_BITS(function, ...)                  \
    switch (weight->bits) {                      \
        case 2: function(2, __VA_ARGS__); break; \
        case 3: function(3, __VA_ARGS__); break; \
        case 4: function(4, __VA_ARGS__); break; \
        case 5: function(5, __VA_ARGS__); break; \
        case 6: function(6, __VA_ARGS__); break; \
        default: function(8, __VA_ARGS__);       \
    }

static void dequantize_block(float *out, const uint16_t *at, const struct block_weight *weight,
                          const vec (*scales)[VECTORS], const vec (*mins)[VECTORS]) {
    FOR_BITS(dequantize_floats, out, 0, 0, at, weight, scales, mins)
}

/* Add a block's products with the values of one row, in the same order as many rows are. */
static void add_block(float *to, const float *x, const uint16_t *at, const struct block_weight *weight,
                      const vec (*scales)[VECTORS], const vec (*mins)[VECTORS]) {
    vec sums[VECTORS];
    memcpy(sums, to, sizeof sums);
    FOR_BITS(dequantize_floats, 0, sums, x, at, weight, scales, mins)
    memcpy(to, sums, sizeof sums);
}

/* The signed byte in the lowest bits of words, or in the next, as a float: the bits are those of a float whose mantissa
 * counts 128 more, of which what is too much is taken off. */
INLINE vec signed_byte(uvec words, const int is_second) {
    const uint32_t mask = is_second ? 0xff00 : 0xff, flipped = is_second ? 0x47008000 : 0x4b000080;
    return (vec)((words & mask) ^ flipped) - (is_second ? 0x1p15f + 128.0f : 0x1p23f + 128.0f);
}

#if defined(WITH_PAIRS) && LANES == 16
/* The codes of a block of bytes as bf16, in pairs: [in / 2][PANEL][2]. */
static void unpack_byte_pairs(uint16_t *out, const uint16_t *at) {
#pragma GCC unroll 4
    for (int i = 0; i < QUANTIZED_BLOCK; i += 2, at += ROW_WORDS, out += 2 * PANEL) {
        ask_ahead(at);
        uvec even = load_words(at), odd = even >> 16;
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            uvec pairs = (uvec)signed_byte(even, half) >> 16 | (uvec)signed_byte(odd, half);
            memcpy(out + half * PANEL, &pairs, sizeof pairs);
        }
    }
}

/* The same of float8; those without an exponent stand in the table. */
static void unpack_e4m3_pairs(uint16_t *out, const uint16_t *at, const uint16_t *table) {
    const __m512i small = _mm512_loadu_si512(table), fraction = _mm512_set1_epi16(127), sign = _mm512_set1_epi16(128);
    const __m512i bias = _mm512_set1_epi16((127 - 7) << 7), exponent = _mm512_set1_epi16(120);
    for (int i = 0; i < QUANTIZED_BLOCK; i += 2, at += ROW_WORDS, out += 2 * PANEL) {
        ask_ahead(at);
        for (int half = 0; half < 2; half++) {
            __m512i codes = _mm512_srli_epi16(_mm512_loadu_si512(at), 8 * half);
            __m512i halves = _mm512_add_epi16(_mm512_slli_epi16(_mm512_and_si512(codes, fraction), 4), bias);
            halves = _mm512_mask_permutexvar_epi16(halves, _mm512_testn_epi16_mask(codes, exponent), codes, small);
            halves = _mm512_or_si512(halves, _mm512_slli_epi16(_mm512_and_si512(codes, sign), 8));
            _mm512_storeu_si512(out + half * PANEL, halves);
        }
    }
}

/* By multiplications: shifts would wait for the unit that looks up, which is busier. */
INLINE __m512i shifted(__m512i words, const int left) {
    if (left > 0) return _mm512_mullo_epi16(words, _mm512_set1_epi16((short)(1 << left)));
    return left < 0 ? _mm512_mulhi_epu16(words, _mm512_set1_epi16((short)(1 << (16 + left)))) : words;
}

/* The same of fewer bits: the table's entries, which stand there over and over, for a place of higher bits is not
 * cleared before it is looked up. */
INLINE void unpack_code_pairs(const int bits, uint16_t *out, const uint16_t *at, const struct block_weight *weight) {
    const int low = low_bits(bits), high = bits - low;
    const __m512i first = _mm512_loadu_si512(weight->pairs), second = _mm512_loadu_si512(weight->pairs + TABLE / 2);
    const __m512i mask = _mm512_set1_epi16((1 << low) - 1);
#pragma GCC unroll 32
    for (int k = 0; k < QUANTIZED_BLOCK; k++) {
        const uint16_t *row = at + k * low / 16 * ROW_WORDS;
        __m512i codes = shifted(_mm512_loadu_si512(row), -(k * low % 16));
        if (k * low % 16 == 0) ask_ahead(row);
        if (high > 0) {
            const uint16_t *behind = at + (2 * low + k * high / 16) * ROW_WORDS;
            if (k * high % 16 == 0) ask_ahead(behind);
            __m512i above = shifted(_mm512_loadu_si512(behind), low - k * high % 16);
            codes = _mm512_ternarylogic_epi32(mask, codes, above, 0xCA); /* the mask's bits of the first */
        }
        __m512i pairs = bits > 5 ? _mm512_permutex2var_epi16(first, codes, second) : _mm512_permutexvar_epi16(codes, first);
        _mm512_storeu_si512(out + k * PANEL, pairs);
    }
}

static void unpack_pairs(uint16_t *out, const uint16_t *at, const struct block_weight *weight) {
    if (weight->bits == 8 && weight->is_e4m3) unpack_e4m3_pairs(out, at, weight->pairs);
    else if (weight->bits == 8) unpack_byte_pairs(out, at);
    else FOR_BITS(unpack_code_pairs, out, at, weight)
}
#elif defined(WITH_PAIRS)
/* The entries of a table of 16 bits, which has as many as `bits` bits tell apart; it is looked up byte by byte. */
INLINE uint8x16_t looked_up_pairs(const int bits, const uint8x16_t *table, uint16x8_t codes) {
    const uint8x16_t at = (uint8x16_t)(codes * 0x0202 + 0x0100);
    if (bits <= 4) return vqtbl2q_u8((uint8x16x2_t){{table[0], table[1]}}, at);
    uint8x16_t values = vqtbl4q_u8((uint8x16x4_t){{table[0], table[1], table[2], table[3]}}, at);
    return bits == 5 ? values : vqtbx4q_u8(values, (uint8x16x4_t){{table[4], table[5], table[6], table[7]}}, at - 64);
}

/* The codes of a block as bf16, which holds what they mean, in pairs: [in / 2][PANEL][2]. */
INLINE void unpack_code_pairs(const int bits, uint16_t *out, const uint16_t *at, const struct block_weight *weight) {
    const int low = low_bits(bits), high = bits - low;
    uint8x16_t table[8];
    for (int i = 0; i < (bits <= 4 ? 2 : bits == 5 ? 4 : 8); i++) table[i] = vld1q_u8((const uint8_t *)weight->pairs + 16 * i);
    for (int lane = 0; lane < HALF_PANEL; lane += LANES)
#pragma GCC unroll 32
        for (int k = 0; k < QUANTIZED_BLOCK; k++) { /* a pair of input features, and half of the panel */
            const uint16_t *row = at + k * low / 16 * ROW_WORDS + 2 * lane;
            const uint16_t *behind = at + (2 * low + k * high / 16) * ROW_WORDS + 2 * lane;
            if (lane == 0 && k * low % 16 == 0) ask_ahead(row);
            if (bits == 8) {
                uvec even = (uvec)meant(bits, weight, codes_at(bits, at, k, lane, 0));
                uvec odd = (uvec)meant(bits, weight, codes_at(bits, at, k, lane, 1));
                store_words(out + k * PANEL + 2 * lane, even >> 16 | (odd & 0xffff0000));
                continue;
            }
            uint16x8_t codes = vld1q_u16(row) >> (k * low % 16) & (uint16_t)((1 << low) - 1);
            if (high > 0) codes |= (vld1q_u16(behind) >> (k * high % 16) & (uint16_t)((1 << high) - 1)) << low;
            vst1q_u8((uint8_t *)(out + k * PANEL + 2 * lane), looked_up_pairs(bits, table, codes));
        }
}

static void unpack_pairs(uint16_t *out, const uint16_t *at, const struct block_weight *weight) {
    FOR_BITS(unpack_code_pairs, out, at, weight)
}
#endif

/* Input features that are summed before scaling: the most that divide a group, or fill a chunk. */
static int64_t span_of(int64_t features, int64_t groups) {
    int64_t group = features / groups, span = CHUNK;
    while (groups > 1 && group % span != 0) span /= 2;
    return span;
}

/* Set which groups share numbers, and the values of codes. */
static void read_weight(struct block_weight *weight, const int8_t *table) {
    int64_t features = weight->blocks * QUANTIZED_BLOCK, groups = weight->scales.groups;
    weight->span = span_of(features, groups);
    struct block_numbers *numbers[] = {&weight->scales, &weight->mins};
    for (int i = 0; i < 2; i++) {
        numbers[i]->spans_of_group = groups > 1 ? (uint32_t)(features / groups / weight->span) : UINT32_MAX;
        if (numbers[i]->factors) numbers[i]->groups_of_factor = (uint32_t)(groups / numbers[i]->factor_groups);
    }
    weight->is_linear = weight->bits < 8;
    for (int code = 0; weight->is_e4m3 && code < TABLE; code++)
        weight->pairs[code] = bf16_of_float((float)(code % 8) * 0x1p-9f);
    if (weight->bits == 8) return;
    int codes = 1 << weight->bits;
    weight->zero = -table[0];
    for (int code = 0; code < TABLE; code++) {
        int value = table[code % codes];
        weight->floats[code] = (float)value;
        weight->pairs[code] = bf16_of_float((float)value);
        if (value != code % codes - weight->zero) weight->is_linear = 0;
    }
}

/* The weight that an operation was given; see `QuantizedPanels`. */
#define BLOCK_WEIGHT(a)                                                                                              \
    {.panels = (a)->panels.data,                                                                                     \
     .blocks = (a)->panels.size[1],                                                                                  \
     .bits = (int)((a)->panels.size[2] * 16 / BLOCK_SIZE),                                                           \
     .is_e4m3 = (a)->code == CODE_E4M3,                                                                              \
     .scales = {(a)->scales.data, (a)->factors.data, (a)->scales.size[1], (a)->factors.size[1], (a)->scale_dtype},   \
     .mins = {(a)->mins.data, (a)->min_factors.data, (a)->mins.size[1], (a)->min_factors.size[1], (a)->scale_dtype}}
