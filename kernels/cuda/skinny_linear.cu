// Products of 1 to 8 rows with a weight, out = x @ weight.T + bias, with RMSNorm before, and a gate or a sum behind.
//
// A block multiplies 8 * TILES rows of the weight; its warps share the columns. It lets the next kernel start, loads its
// first weights (all, if AHEAD steps are a warp's part), and only then waits for the activations: memory is busy while the
// kernel before it ends. Weights are the tensor cores' second operand, activations the first, in 16-bit floats; sums are
// float32. Codes become floats in registers, exactly; the sums of a group are scaled. A row's sums have one order,
// whatever the number of rows, so that its bits are the same.
//
#include "product.cuh"

// What a launch is compiled for, beside `product.cuh`.
constexpr int WARPS = SET_WARPS, TILES = SET_TILES;  // of a block; its rows by eights
constexpr int AHEAD = SET_AHEAD;                     // steps of the weight in flight
constexpr int ROWS = SET_ROWS;                       // the most rows of x: 1, 2, 4 or 8

constexpr int THREADS = 32 * WARPS, BLOCK_ROWS = 8 * TILES, OUTPUTS = IS_GATED ? BLOCK_ROWS / 2 : BLOCK_ROWS;
constexpr int PER_THREAD = (OUTPUTS * ROWS + THREADS - 1) / THREADS;  // results
constexpr int STEPS = COLUMNS / Weight::STEP, PER_WARP = (STEPS + WARPS - 1) / WARPS;
constexpr int IN_FLIGHT = AHEAD < PER_WARP ? AHEAD : PER_WARP;
// activations are read for a pass of steps at once: 256 columns, or more of few rows
constexpr int PASS_COLUMNS = ROWS >= 4 ? 256 : IS_NORMED || ROWS == 2 ? 512 : 1024;
constexpr int PASS_STEPS = PASS_COLUMNS / Weight::STEP < PER_WARP ? PASS_COLUMNS / Weight::STEP : PER_WARP;
constexpr int PASS = PASS_STEPS * Weight::STEP, LOADS = (PASS + 255) / 256;  // of 8 columns a lane
constexpr int STRIDE = PASS + 8 * Weight::PAIRS;                             // of a row of x, free of bank conflicts
constexpr bool IS_PASS_AHEAD = ROWS * LOADS <= 4;  // whether registers hold the next pass while one is multiplied

static_assert(PASS_STEPS > 0 && COLUMNS % Weight::STEP == 0 && DEPTH % 8 == 0, "whole steps, and 16 bytes at a time");

// A warp's columns of x for a pass: eight adjacent ones a lane of each row, with their gains.
struct Activations {
  Words<4> x[ROWS][LOADS];
  float gains[LOADS][IS_NORMED ? 8 : 1];

  // `begin`: the pass's first column; `count`: of its columns
  DEVICE void load_gains(const float *gain, u32 begin, u32 count, u32 lane) {
    if constexpr (IS_NORMED) {
#pragma unroll
      for (int i = 0; i < LOADS; i++) {
        u32 column = begin + 8 * lane + 256 * i;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          Words<4> loaded = {};
          if (8 * lane + 256 * i < count && column < DEPTH) loaded = load((const Words<4> *)(gain + column) + half);
#pragma unroll
          for (int j = 0; j < 4; j++) gains[i][4 * half + j] = float_of(loaded.at[j]);
        }
      }
    }
  }
  DEVICE void load_rows(const u16 *from, u32 rows, u32 stride, u32 begin, u32 count, u32 lane) {
#pragma unroll
    for (int m = 0; m < ROWS; m++)
#pragma unroll
      for (int i = 0; i < LOADS; i++) {
        u32 column = begin + 8 * lane + 256 * i;
        x[m][i] = {};
        if (u32(m) < rows && 8 * lane + 256 * i < count && column < DEPTH)
          x[m][i] = load((const Words<4> *)(from + (u64)m * stride + column));
      }
  }
  DEVICE void load_pass(const float *gain, const u16 *from, u32 rows, u32 stride, u32 begin, u32 count, u32 lane) {
    load_gains(gain, begin, count, lane);
    load_rows(from, rows, stride, begin, count, lane);
  }
  // Writes them to shared memory, times the gain if normed, and adds up the squares.
  DEVICE void put(u16 *into, u32 rows, u32 count, u32 lane, float (&squares)[ROWS]) {
#pragma unroll
    for (int m = 0; m < ROWS; m++)
#pragma unroll
      for (int i = 0; i < LOADS; i++) {
        if (u32(m) >= rows || 8 * lane + 256 * i >= count) continue;
        if constexpr (IS_NORMED) {
#pragma unroll
          for (int j = 0; j < 4; j++) {
            float low = low_of<IS_BFLOAT>(x[m][i].at[j]), high = high_of<IS_BFLOAT>(x[m][i].at[j]);
            squares[m] += low * low;
            squares[m] += high * high;
            x[m][i].at[j] = pair_of<IS_BFLOAT>(low * (gains[i][2 * j] * RANGE), high * (gains[i][2 * j + 1] * RANGE));
          }
        }
        shared_store((Words<4> *)(into + m * STRIDE + 8 * lane + 256 * i), x[m][i]);
      }
  }
};

// The columns of the pass that begins with a warp's i-th step.
constexpr DEVICE u32 columns_of_pass(int i) {
  return (PER_WARP - i < PASS_STEPS ? PER_WARP - i : PASS_STEPS) * Weight::STEP;
}

// Whether a warp has an i-th step; the last warps may have fewer.
DEVICE bool is_step(u32 first, u32 i) { return i < PER_WARP && (STEPS % WARPS == 0 || first + i < STEPS); }

DEVICE void load_step(Weight (&into)[TILES], const WeightPointers &weight, const u32 (&row)[TILES],
                      const u32 (&sums_of)[TILES][2], u32 step, u32 lane) {
#pragma unroll
  for (int t = 0; t < TILES; t++) into[t].load(weight, row[t], sums_of[t], step, lane % 4);
}

// Adds the products of a step with the activations in shared memory to the sums.
DEVICE void multiply_step(float (&sums)[TILES][4], const Weight (&weight)[TILES], const u16 *x, u32 rows, u32 lane) {
  const u32 g = lane / 4, q = lane % 4;
  const u32 ones[2] = {power_pair<IS_BFLOAT>(0), power_pair<IS_BFLOAT>(0)};
  float products[TILES][4] = {}, totals[4] = {};
#pragma unroll
  for (int unit = 0; unit < Weight::UNITS; unit++) {
    constexpr int PAIRS = Weight::PAIRS;
    Words<PAIRS> held = {};
    if (g < rows)
      held = shared_load((const Words<PAIRS> *)(x + g * STRIDE + Weight::column_of(unit) + 2 * PAIRS * q));
    u32 values[TILES][PAIRS];
#pragma unroll
    for (int t = 0; t < TILES; t++) weight[t].values(unit, values[t]);
#pragma unroll
    for (int i = 0; i < PAIRS; i += 2) {
      const u32 a[4] = {held.at[i], 0, held.at[i + 1], 0};
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const u32 b[2] = {values[t][i], values[t][i + 1]};
        warp_multiply<IS_BFLOAT>(Weight::GROUP ? products[t] : sums[t], a, b);
      }
      if constexpr (Weight::HAS_TOTALS) warp_multiply<IS_BFLOAT>(totals, a, ones);
    }
    if (!Weight::ends_group(unit)) continue;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      float scaled[2] = {sums[t][0], sums[t][1]};
      weight[t].add_group(scaled, products[t], totals, unit);
      sums[t][0] = scaled[0], sums[t][1] = scaled[1];
#pragma unroll
      for (int i = 0; i < 4; i++) products[t][i] = 0;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) totals[i] = 0;
  }
}

// The weight's row of a block's n-th; of a gated one the first half are the gate's. The last row stands for those past it.
DEVICE u32 row_of(u32 n) {
  u32 row = block_index() * OUTPUTS + n % OUTPUTS;
  return (row < WIDTH ? row : WIDTH - 1) + n / OUTPUTS * WIDTH;
}

KERNEL(THREADS, SET_PROGRAMS)
skinny_linear(Out *out, const u16 *x, const u8 *words, const u8 *high, const u8 *scales, const u8 *seconds, const u16 *bias,
              const float *gain, u32 rows, u32 x_stride, u32 out_stride, float eps, float factor) {
  allow_next_kernel();
  const u32 warp = thread_index() / 32, lane = thread_index() % 32;
  const WeightPointers weight = {words, high, scales, seconds};
  u16 *const own = (u16 *)shared_memory() + warp * (ROWS * STRIDE);
  float *const shared_sums = (float *)((u16 *)shared_memory() + WARPS * ROWS * STRIDE);  // [warp][row of x][BLOCK_ROWS]
  float *const shared_squares = shared_sums + WARPS * ROWS * BLOCK_ROWS;                 // [warp][row of x]

  const u32 first = warp * PER_WARP;
  Weight steps[IN_FLIGHT][TILES];
  u32 row[TILES], sums_of[TILES][2];
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    row[t] = row_of(8 * t + lane / 4);
    sums_of[t][0] = row_of(8 * t + lane % 4 * 2), sums_of[t][1] = row_of(8 * t + lane % 4 * 2 + 1);
  }
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; i++)
    if (is_step(first, i)) load_step(steps[i], weight, row, sums_of, first + i, lane);
  Activations activations;
  activations.load_gains(gain, first * Weight::STEP, PASS, lane);

  wait_for_previous_kernel();
  activations.load_rows(x, rows, x_stride, first * Weight::STEP, PASS, lane);
  u32 row_scales[PER_THREAD][2] = {};  // of the results' rows, and a gated one's second row
  u16 biases[PER_THREAD][2] = {};
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++)
#pragma unroll
    for (int half = 0; half <= IS_GATED; half++) {
      const u32 result = thread_index() + i * THREADS;
      if (result >= OUTPUTS * ROWS) continue;
      const u32 n = row_of(result % OUTPUTS + half * OUTPUTS);
      if constexpr (Weight::HAS_ROW_SCALE) row_scales[i][half] = Weight::load_row_scale(weight, n);
      if (bias != nullptr) biases[i][half] = load_constant(bias + n);
    }
  Out old[PER_THREAD] = {};
  if constexpr (EPILOGUE == ADD) {
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
      const u32 result = thread_index() + i * THREADS, m = result / OUTPUTS, n = block_index() * OUTPUTS + result % OUTPUTS;
      if (m < rows && n < WIDTH) old[i] = load(out + (u64)m * out_stride + n);
    }
  }
  float sums[TILES][4] = {}, squares[ROWS] = {};
#pragma unroll 1
  for (int begin = 0; begin < PER_WARP; begin += IN_FLIGHT) {
#pragma unroll
    for (int slot = 0; slot < IN_FLIGHT; slot++) {
      const int i = begin + slot;
      if (PER_WARP % IN_FLIGHT != 0 && i >= PER_WARP) continue;
      if (i % PASS_STEPS == 0) {
        if (i > 0) warp_sync();  // all lanes have read the pass before
        if (i > 0 && !IS_PASS_AHEAD)
          activations.load_pass(gain, x, rows, x_stride, (first + i) * Weight::STEP, columns_of_pass(i), lane);
        activations.put(own, rows, columns_of_pass(i), lane, squares);
        warp_sync();
        const int next = i + PASS_STEPS;
        if (next < PER_WARP && IS_PASS_AHEAD)
          activations.load_pass(gain, x, rows, x_stride, (first + next) * Weight::STEP, columns_of_pass(next), lane);
      }
      if (is_step(first, i)) multiply_step(sums, steps[slot], own + i % PASS_STEPS * Weight::STEP, rows, lane);
      if (is_step(first, i + IN_FLIGHT)) load_step(steps[slot], weight, row, sums_of, first + i + IN_FLIGHT, lane);
    }
  }

#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int j = 0; j < 2; j++)
      if (lane / 4 < ROWS)
        shared_store(shared_sums + (warp * ROWS + lane / 4) * BLOCK_ROWS + 8 * t + lane % 4 * 2 + j, sums[t][j]);
  if constexpr (IS_NORMED) {
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
#pragma unroll
      for (u32 mask = 16; mask > 0; mask /= 2) squares[m] += warp_shuffle_xor(squares[m], mask);
      if (lane == 0) shared_store(shared_squares + warp * ROWS + m, squares[m]);
    }
  }
  block_barrier();
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    const u32 result = thread_index() + i * THREADS, m = result / OUTPUTS, n = block_index() * OUTPUTS + result % OUTPUTS;
    if (m >= rows || n >= WIDTH) continue;
    float total[2] = {}, square = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
#pragma unroll
      for (int half = 0; half <= IS_GATED; half++)
        total[half] += shared_load(shared_sums + (w * ROWS + m) * BLOCK_ROWS + result % OUTPUTS + half * OUTPUTS);
      if constexpr (IS_NORMED) square += shared_load(shared_squares + w * ROWS + m);
    }
#pragma unroll
    for (int half = 0; half <= IS_GATED; half++) {
      if constexpr (Weight::HAS_ROW_SCALE) total[half] *= Weight::row_scale(row_scales[i][half]);
      if constexpr (IS_NORMED) total[half] *= 1 / RANGE / sqrtf(square / DEPTH + eps);
      total[half] += to_float<IS_BFLOAT>(biases[i][half]);
    }
    float value = total[0];
    if constexpr (EPILOGUE == ADD) value = out_of(old[i]) + factor * value;
    if constexpr (IS_GATED) value = activated(value) * total[1];
    store(out + (u64)m * out_stride + n, to_out(value));
  }
}
