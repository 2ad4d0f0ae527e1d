// Numbers of attention: floats of 16 and 8 bits, powers of two, tanh. No memory.
#pragma once

#ifdef __CUDACC_RTC__
DEVICE float float_of_bits(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 bits_of_float(float value) { return __float_as_uint(value); }
DEVICE float float_of_half(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
DEVICE u16 half_of_float(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
DEVICE float exp_2(float x) {
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}
// Two e4m3 codes as two halves.
DEVICE u32 halves_of_e4m3(u16 codes) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  return halves;
}
DEVICE u8 e4m3_of(float value) {
  u16 codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %1;" : "=h"(codes) : "f"(value));
  return (u8)codes;
}
#else
inline float float_of_bits(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline u32 bits_of_float(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float float_of_half(u16 bits) {
  _Float16 value;
  memcpy(&value, &bits, 2);
  return value;
}
inline u16 half_of_float(float value) {
  _Float16 half = value;
  u16 bits;
  memcpy(&bits, &half, 2);
  return bits;
}
inline float exp_2(float x) { return exp2f(x); }
// fp16 has the same layout with a bias of 15 in place of 7: right but for a factor of 2^8.
inline u32 halves_of_e4m3(u16 codes) {
  u32 halves = 0;
  for (u32 i = 0; i < 2; i++) {
    u32 code = codes >> 8 * i & 0xff, bits = (code & 0x7f) << 7 | (code & 0x80) << 8;
    bool is_nan = (code & 0x7f) == 0x7f;
    halves |= (is_nan ? 0x7e00u : half_of_float(float_of_half(bits) * 256.0f)) << 16 * i;
  }
  return halves;
}
inline u8 e4m3_of(float value) {
  u32 bits = bits_of_float(value), size = bits & 0x7fffffff, code;
  if (size > 0x7f800000) return 0x7f;
  if (size > 0x43e00000) size = 0x43e00000;  // 448
  if (size < 0x3c800000u)  // below 2^-6 steps are of 2^-9: those of floats from 2^14 on
    code = bits_of_float(float_of_bits(size) + 16384.0f) - 0x46800000u;
  else
    code = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
  return code | (bits >> 24 & 0x80);
}
#endif

DEVICE float infinity() { return float_of_bits(0x7f800000); }

template <bool BFLOAT>
DEVICE float to_float(u16 bits) {
  return BFLOAT ? float_of_bits((u32)bits << 16) : float_of_half(bits);
}

// To nearest, ties to even.
template <bool BFLOAT>
DEVICE u16 from_float(float value) {
  if constexpr (!BFLOAT) return half_of_float(value);
  u32 bits = bits_of_float(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

template <bool BFLOAT>
DEVICE u32 pair_of(float low, float high) {
  return from_float<BFLOAT>(low) | (u32)from_float<BFLOAT>(high) << 16;
}

// x P(x^2) / Q(x^2), within 4e-7: 1 - 2 / (e^2x + 1) loses the digits of small x. NaN stays.
DEVICE float tanh_of(float x) {
  x = x < -9.0f ? -9.0f : x > 9.0f ? 9.0f : x;
  float square = x * x;
  float over = 2.0609308e-5f + square * 1.3354916e-8f;
  over = 1.0f + square * (0.1338104f + square * (0.0034956038f + square * over));
  float under = 0.00032856589f + square * 7.7766748e-7f;
  under = 1.0f + square * (0.46714354f + square * (0.025877044f + square * under));
  return x * over / under;
}
