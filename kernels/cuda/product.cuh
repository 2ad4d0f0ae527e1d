// What products with a weight have in common: the constants of a launch, and what is done to a sum.
#pragma once
#include "weights.cuh"

enum Epilogue { STORE, ADD, SILU, GELU_TANH, GELU };

constexpr int COLUMNS = SET_COLUMNS, DEPTH = SET_DEPTH;  // of the weight, with padding and without
constexpr u32 WIDTH = SET_WIDTH;                         // columns of the result
constexpr bool IS_BFLOAT = SET_IS_BFLOAT;                // else float16
constexpr bool IS_NORMED = SET_IS_NORMED;
constexpr Epilogue EPILOGUE = SET_EPILOGUE;
constexpr bool IS_GATED = EPILOGUE >= SILU;  // the weight's first half is the gate's
constexpr float RANGE = IS_NORMED && !IS_BFLOAT ? 1.0f / 16 : 1.0f;  // gains whose products could leave float16's range

#ifdef SET_TILED
typedef TiledWeight<IS_BFLOAT, IS_GATED ? 2 * WIDTH : WIDTH, SET_TILED> Weight;  // code, span, group, step, kinds of scales and seconds
#else
typedef PlainWeight<IS_BFLOAT, COLUMNS, SET_STEP> Weight;
#endif

#if SET_IS_FLOAT_OUT
typedef float Out;
DEVICE float out_of(Out value) { return value; }
DEVICE Out to_out(float value) { return value; }
#else
typedef u16 Out;
DEVICE float out_of(Out value) { return to_float<IS_BFLOAT>(value); }
DEVICE Out to_out(float value) { return from_float<IS_BFLOAT>(value); }
#endif

DEVICE float activated(float gate) {
  if constexpr (EPILOGUE == SILU) return gate / (1 + expf(-gate));
  if constexpr (EPILOGUE == GELU_TANH)
    return gate / (1 + expf(-1.5957691216057308f * (gate + 0.044715f * gate * gate * gate)));
  return 0.5f * gate * (1 + erff(gate * 0.7071067811865476f));
}
