/* What NEON, its dot products of bytes and its bf16 do in fewer instructions than vectors of the compiler's: native.h
 * includes this. A register holds four floats, and there are 32 of them. */
#pragma once

#include <arm_neon.h>

#define load_bytes load_bytes
#define load_f16 load_f16
#define greater_of greater_of

static inline uvec load_bytes(const void *at) {
    uint32_t four;
    memcpy(&four, at, sizeof four);
    return (uvec)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}

static inline vec load_f16(const uint16_t *at) { return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at))); }

static inline void store_f16(uint16_t *at, vec v) { vst1_u16(at, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v))); }

INLINE vec greater_of(vec a, vec b) { return (vec)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }

INLINE vec lesser_of(vec a, vec b) { return (vec)vminq_f32((float32x4_t)a, (float32x4_t)b); }

static inline int any_lane(ivec lanes) { return vmaxvq_u32((uint32x4_t)lanes) != 0; }

#ifdef __ARM_FEATURE_DOTPROD
#define WITH_INTEGERS 1 /* integer_products.h: products of bytes */
#define WITH_DIGITS 1

/* To nearest, ties to even. */
static inline ivec rounded(vec values) { return (ivec)vcvtnq_s32_f32((float32x4_t)values); }

static inline int32_t sum_of(ivec values) { return vaddvq_s32((int32x4_t)values); }

static inline uint32_t largest_of(uvec values) { return vmaxvq_u32((uint32x4_t)values); }
#endif

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define WITH_PAIRS /* products of bf16 in pairs */
#define store_bf16 store_bf16

static inline void store_bf16(uint16_t *at, vec v) {
    bfloat16x4_t rounded = vcvt_bf16_f32((float32x4_t)v);
    memcpy(at, &rounded, sizeof rounded);
}

/* Add to each lane the two products of its pairs. */
INLINE vec dot_pairs(vec sums, uvec a, uvec b) {
    return (vec)vbfdotq_f32((float32x4_t)sums, (bfloat16x8_t)a, (bfloat16x8_t)b);
}

/* Add the products of 4 features of two rows and of two columns: sums are [row][column]. Each is that of two `dot_pairs`, to
 * the bit. */
#define WITH_SQUARES
INLINE vec dot_squares(vec sums, uvec rows, uvec columns) {
    return (vec)vbfmmlaq_f32((float32x4_t)sums, (bfloat16x8_t)rows, (bfloat16x8_t)columns);
}

/* Four values of bf16 of one row, and of another. */
INLINE uvec two_rows(const uint16_t *a, const uint16_t *b) { return (uvec)vcombine_u16(vld1_u16(a), vld1_u16(b)); }

INLINE uvec first_words(uvec a, uvec b) { return (uvec)vzip1q_u32((uint32x4_t)a, (uint32x4_t)b); }

INLINE uvec next_words(uvec a, uvec b) { return (uvec)vzip2q_u32((uint32x4_t)a, (uint32x4_t)b); }

/* The halves of two vectors that are first, or second. */
INLINE vec first_halves(vec a, vec b) { return (vec)vzip1q_u64((uint64x2_t)a, (uint64x2_t)b); }

INLINE vec second_halves(vec a, vec b) { return (vec)vzip2q_u64((uint64x2_t)a, (uint64x2_t)b); }

/* 2^v to 4e-6 of it, which bf16 does not see; 0 below the smallest normal float; NaN of NaN. */
static inline vec exp2_lanes(vec v) {
    ivec is_small = v < -126.0f;
    vec floor = (vec)vrndmq_f32(vminq_f32((float32x4_t)v, vdupq_n_f32(127.0f))), fraction = v - floor;
    vec sum = splat(0.01355575f);
    sum = sum * fraction + 0.05203237f;
    sum = sum * fraction + 0.24137976f;
    sum = sum * fraction + 0.69303212f;
    sum = sum * fraction + 1.0f;
    vec power = (vec)(((ivec)vcvtq_s32_f32((float32x4_t)floor) + 127) << 23);
    return (vec)(~is_small & (ivec)(sum * power));
}

/* Pairs of what stands in two rows of 16 bits: of the first columns, and of the next. */
INLINE uvec first_pairs(uvec even, uvec odd) { return (uvec)vzip1q_u16((uint16x8_t)even, (uint16x8_t)odd); }

INLINE uvec next_pairs(uvec even, uvec odd) { return (uvec)vzip2q_u16((uint16x8_t)even, (uint16x8_t)odd); }

/* Columns in pairs are in order. */
static inline void in_order(float *sums) { (void)sums; }
#endif
