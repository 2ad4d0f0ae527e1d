// Numbers in registers: 16-bit floats, pairs of them, and the values of weights' codes, which are exact.
//
// A pair is a register of two floats, the first in the lower half. Bit operations put a code into the mantissa of a float,
// or into its exponent and mantissa, and one multiply-add subtracts the excess; `code_words.py` derives the same for Triton.
#pragma once
#include "memory.cuh"

#ifdef __CUDACC_RTC__

// A value that is computed once, and not again where it is used.
DEVICE u32 kept(u32 value) {
  u32 held;
  asm volatile("mov.u32 %0, %1;" : "=r"(held) : "r"(value));
  return held;
}
DEVICE float kept(float value) { return __uint_as_float(kept(__float_as_uint(value))); }
DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

template <bool IS_BFLOAT>
DEVICE u16 from_float(float value) {
  u16 bits;
  if constexpr (IS_BFLOAT)
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
template <bool IS_BFLOAT>
DEVICE float to_float(u16 bits) {
  if constexpr (IS_BFLOAT) return float_of((u32)bits << 16);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
template <bool IS_BFLOAT>
DEVICE u32 pair_of(float low, float high) {
  u32 pair;
  if constexpr (IS_BFLOAT)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// a * b + c of pairs
template <bool IS_BFLOAT>
DEVICE u32 multiply_add(u32 a, u32 b, u32 c) {
  u32 pair;
  if constexpr (IS_BFLOAT)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}

#else

#include <cmath>
#include <cstring>

inline u32 kept(u32 value) { return value; }
inline float kept(float value) { return value; }
inline u32 bits_of(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float float_of(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
template <bool IS_BFLOAT>
u16 from_float(float value) {
  u16 bits;
  if (IS_BFLOAT) {
    u32 wide = bits_of(value);
    return value != value ? 0x7fff : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
  }
  _Float16 half = (_Float16)value;
  memcpy(&bits, &half, 2);
  return bits;
}
template <bool IS_BFLOAT>
float to_float(u16 bits) {
  if (IS_BFLOAT) return float_of((u32)bits << 16);
  _Float16 half;
  memcpy(&half, &bits, 2);
  return half;
}
template <bool IS_BFLOAT>
u32 pair_of(float low, float high) {
  return from_float<IS_BFLOAT>(low) | (u32)from_float<IS_BFLOAT>(high) << 16;
}
template <bool IS_BFLOAT>
u32 multiply_add(u32 a, u32 b, u32 c) {  // a sum of a product and a float of 16 bits is rounded once, by the last step
  float low = fmaf(to_float<IS_BFLOAT>(a), to_float<IS_BFLOAT>(b), to_float<IS_BFLOAT>(c));
  float high = fmaf(to_float<IS_BFLOAT>(a >> 16), to_float<IS_BFLOAT>(b >> 16), to_float<IS_BFLOAT>(c >> 16));
  return pair_of<IS_BFLOAT>(low, high);
}

#endif

template <bool IS_BFLOAT>
DEVICE float low_of(u32 pair) {
  return to_float<IS_BFLOAT>((u16)pair);
}
template <bool IS_BFLOAT>
DEVICE float high_of(u32 pair) {
  if constexpr (IS_BFLOAT) return float_of(pair & 0xffff0000u);
  return to_float<IS_BFLOAT>((u16)(pair >> 16));
}

constexpr DEVICE u32 twice(u32 bits) { return bits << 16 | bits; }

// A pair of floats +-2 ** exponent.
template <bool IS_BFLOAT>
constexpr DEVICE u32 power_pair(int exponent, bool is_negative = false) {
  return twice((u32)is_negative << 15 | (u32)(exponent + (IS_BFLOAT ? 127 : 15)) << (IS_BFLOAT ? 7 : 10));
}

constexpr DEVICE u32 shifted(u32 bits, int left) { return left >= 0 ? bits << left : bits >> -left; }

enum CodeKind { U4, S4, U5, S5, S6, S8, E4M3, E2M1 };

constexpr DEVICE int bits_of_code(CodeKind code) {
  return code == S8 || code == E4M3 ? 8 : code == S6 ? 6 : code == U5 || code == S5 ? 5 : 4;
}
// columns of a 16-bit word of codes, or of their lower four bits; and of a word of their higher bits
constexpr DEVICE int codes_per_word(CodeKind code) { return bits_of_code(code) == 8 ? 2 : 4; }
constexpr DEVICE int high_per_word(CodeKind code) {
  return bits_of_code(code) == 5 ? 16 : bits_of_code(code) == 6 ? 8 : 0;
}

// The values of the codes of one span in a register of two words. `place`: the span's, among those of the higher bits.
template <CodeKind CODE, bool IS_BFLOAT>
DEVICE u32 values_of_codes(u32 words, u32 high, int span, int place) {
  constexpr int BITS = bits_of_code(CODE), MANTISSA = IS_BFLOAT ? 7 : 10;
  constexpr u32 ONE = power_pair<IS_BFLOAT>(0);
  if constexpr (CODE == E4M3 || CODE == E2M1) {
    constexpr int OF_CODE = CODE == E4M3 ? 3 : 1, BIAS = CODE == E4M3 ? 7 : 1, AT = MANTISSA - OF_CODE;
    constexpr u32 MAGNITUDE = twice((u32)((1 << (BITS - 1)) - 1) << AT);
    u32 put = shifted(words, AT - BITS * span) & MAGNITUDE;
    put |= shifted(words, 16 - BITS - BITS * span) & 0x80008000u;
    return multiply_add<IS_BFLOAT>(put, power_pair<IS_BFLOAT>((IS_BFLOAT ? 127 : 15) - BIAS), 0x80008000u);
  } else if constexpr (CODE == S8) {
    u32 moved = words >> 8 * span;
    if constexpr (IS_BFLOAT) {  // seven bits on 128, less 128, or 256 if the sign went into the exponent
      u32 low = (moved & 0x007f007fu) | power_pair<true>(7), sign = (moved & 0x00800080u) | power_pair<true>(7);
      return multiply_add<true>(sign, power_pair<true>(0, true), low);
    }
    u32 put = (moved & 0x00ff00ffu) ^ (power_pair<false>(10) ^ 0x00800080u);  // excess 128
    return multiply_add<false>(put, ONE, 0xe480e480u);                         // -1152
  } else {
    constexpr int BASE = IS_BFLOAT ? BITS : 10, AT = MANTISSA - BASE;  // 2 ** BASE, whose lowest bit at AT counts 1
    u32 put = (shifted(words, AT - 4 * span) & twice(15u << AT)) | power_pair<IS_BFLOAT>(BASE);
    if constexpr (BITS > 4) {
      constexpr u32 WIDTH = BITS - 4;
      put |= shifted(high, AT + 4 - place * (int)WIDTH) & twice(((1u << WIDTH) - 1) << (AT + 4));
    }
    constexpr int ZERO = CODE == S4 ? 8 : CODE == S5 ? 16 : CODE == S6 ? 32 : 0;
    constexpr u32 LESS = power_pair<IS_BFLOAT>(BASE, true) | twice((u32)ZERO << AT);  // -(2 ** BASE + ZERO)
    return multiply_add<IS_BFLOAT>(put, ONE, LESS);
  }
}

// Kinds of scales' numbers, one in the words of a row.
enum NumberKind { FLOAT16, BFLOAT16, FLOAT32, EXPONENT, UNSIGNED8, SIGNED8 };

constexpr DEVICE int bytes_of_number(NumberKind kind) { return kind == FLOAT32 ? 4 : kind <= BFLOAT16 ? 2 : 1; }

template <NumberKind KIND>
DEVICE float number_at(const u32 *words, int place) {
  if constexpr (KIND == FLOAT32) return float_of(words[place]);
  if constexpr (KIND == FLOAT16) return to_float<false>((u16)(words[place / 2] >> 16 * (place % 2)));
  if constexpr (KIND == BFLOAT16) return to_float<true>((u16)(words[place / 2] >> 16 * (place % 2)));
  if constexpr (KIND == SIGNED8) return (float)((int)(words[place / 4] << (24 - 8 * (place % 4))) >> 24);
  u32 byte = words[place / 4] >> 8 * (place % 4) & 255;
  if constexpr (KIND == EXPONENT) return float_of(byte == 0 ? 1u << 22 : byte << 23);  // 2 ** -127 is subnormal
  return (float)byte;
}

// One of the sixteen 6-bit integers in three words; see `weight_tiles.py`.
DEVICE float six_bits_at(const u32 *words, int field) {
  if (field < 15) return (float)(words[field / 5] >> 6 * (field % 5) & 63);
  return (float)((words[0] >> 30 & 3) | (words[1] >> 28 & 12) | (words[2] >> 26 & 48));
}
