// Numbers of attention: floats of 8 bits, powers of two, tanh.
#pragma once
#include "numbers.cuh"

#ifdef __CUDACC_RTC__

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
// To nearest, at most 448; NaN stays.
DEVICE u8 e4m3_of(float value) {
  u16 codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %1;" : "=h"(codes) : "f"(value));
  return (u8)codes;
}

#else

inline float exp_2(float x) { return exp2f(x); }
inline u32 halves_of_e4m3(u16 codes) {
  u32 halves = 0;
  for (u32 i = 0; i < 2; i++) {  // fp16 has the same layout with a bias of 15 in place of 7: right but for 2^8
    u32 code = codes >> 8 * i & 0xff, bits = (code & 0x7f) << 7 | (code & 0x80) << 8;
    u32 half = (code & 0x7f) == 0x7f ? 0x7e00 : from_float<false>(to_float<false>(bits) * 256.0f);
    halves |= half << 16 * i;
  }
  return halves;
}
inline u8 e4m3_of(float value) {
  u32 bits = bits_of(value), size = bits & 0x7fffffff, code;
  if (size > 0x7f800000) return 0x7f;
  if (size > 0x43e00000) size = 0x43e00000;  // 448
  if (size < 0x3c800000)                     // below 2^-6 steps are of 2^-9: those of floats from 2^14 on
    code = bits_of(float_of(size) + 16384.0f) - 0x46800000u;
  else
    code = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
  return code | (bits >> 24 & 0x80);
}

#endif

DEVICE float infinity() { return float_of(0x7f800000); }

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
