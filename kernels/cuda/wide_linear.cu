// Products of 9 to 64 rows with a weight, out = x @ weight.T + bias, with RMSNorm before, and a gate or a sum behind.
//
// A block multiplies 32 rows of the weight a warp, times ROW_WARPS; COLUMN_WARPS such groups of warps share its columns, and
// the blocks of a cluster share the weight's columns among them. Weights are the tensor cores' first operand, activations
// the second, in 16-bit floats; sums are float32. Both come through shared memory, by copies that are several chunks of
// columns ahead: a warp's own weights, and activations for a group of warps, whose barrier is the only one of a chunk.
// It lets the next kernel start, asks for its first weights, and only then waits for the activations. Those are normed,
// and their totals taken, in place by the threads that copied them, once for all of the block's weights.
//
// The order of a row's sums depends on the launch's constants but ROWS: its bits are the same beside any others.
#include "product.cuh"
#include "staged_weights.cuh"

// What a launch is compiled for, beside `product.cuh`.
constexpr int ROW_WARPS = SET_ROW_WARPS, COLUMN_WARPS = SET_COLUMN_WARPS, SPLITS = SET_SPLITS;  // blocks of a cluster
constexpr int AHEAD = SET_AHEAD;  // chunks of columns in flight, and one that is multiplied
constexpr int ROWS = SET_ROWS;    // the most rows of x: a multiple of 16

constexpr int GROUP_THREADS = 32 * ROW_WARPS, THREADS = COLUMN_WARPS * GROUP_THREADS;
constexpr int BLOCK_ROWS = 32 * ROW_WARPS, OUTPUTS = IS_GATED ? BLOCK_ROWS / 2 : BLOCK_ROWS;
constexpr int PANELS = ROWS / 8, STEPS = COLUMNS / Weight::STEP;
constexpr int SHARES = SPLITS * COLUMN_WARPS, PER_SHARE = (STEPS + SHARES - 1) / SHARES;  // of the steps
constexpr int CHUNK = SET_CHUNK, CHUNKS = Weight::STEP / CHUNK;  // columns; of a step
constexpr int STAGES = (AHEAD + CHUNKS - 1) / CHUNKS + 1;  // steps of the weight in shared memory
constexpr int PIECES = CHUNK / 8, LOADS = (ROWS * PIECES + GROUP_THREADS - 1) / GROUP_THREADS;  // of x a thread
constexpr bool HAS_PASS = IS_NORMED || Weight::HAS_TOTALS;
constexpr int TOTALS = Weight::HAS_TOTALS ? 2 * (CHUNK / 32) * ROWS : 0;  // of a group of warps, for two chunks
constexpr int SCALED = Weight::GROUP == 16 ? 16 : 32;  // columns whose products are summed before they are scaled
constexpr int STRIDE = BLOCK_ROWS + 4;  // of a row of x among sums, free of bank conflicts

constexpr int ADJACENT = IS_GATED ? 16 : 32;  // rows of a warp; of a gated weight the other 16 are those of the second half
typedef StagedWeight<Weight, ADJACENT, WIDTH, WIDTH> Staged;
constexpr int X_BYTES = ROWS * CHUNK * 2;  // of a chunk
constexpr int WEIGHTS_AT = COLUMN_WARPS * (AHEAD + 1) * X_BYTES;
constexpr int TOTALS_AT = WEIGHTS_AT + COLUMN_WARPS * ROW_WARPS * STAGES * Staged::BYTES;

static_assert(CHUNKS * CHUNK == Weight::STEP && COLUMNS % Weight::STEP == 0 && DEPTH % 8 == 0, "whole chunks");
static_assert(AHEAD >= 1 && ROWS % 16 == 0 && 16 % SPLITS == 0, "rows by sixteens");

// Where 16 bytes of a row of x stand in a chunk: those of eight rows in other banks.
constexpr DEVICE u32 piece_at(u32 row, u32 piece) { return row * (CHUNK * 2) + (piece ^ row % 8) * 16; }

// A group of warps' part of x: threads copy chunks of it ahead.
struct Activations {
  static constexpr u32 APART = GROUP_THREADS / PIECES;  // rows of x of a thread's copies, which have two or four places in eight
  static constexpr u32 EACH = APART % 4 ? 2 : 4;

  const u16 *next;  // its first row of the next chunk
  u8 *ring;         // [AHEAD + 1] chunks
  float *totals;    // of 32 columns, by row
  u32 rows, stride, begin, chunks, thread, to[8 / EACH];
  float gains[IS_NORMED ? 8 : 1], squares[LOADS];

  DEVICE Activations(const u16 *x, u8 *ring, float *totals, u32 rows, u32 stride, u32 begin, u32 chunks, u32 thread)
      : ring(ring), totals(totals), rows(rows), stride(stride), begin(begin), chunks(chunks), thread(thread), squares{} {
    next = x + (u64)row(0) * stride + begin + column();
#pragma unroll
    for (u32 i = 0; i < 8 / EACH; i++) to[i] = kept(piece_at(row(0) + i * EACH, thread % PIECES));
  }
  DEVICE u32 column() const { return thread % PIECES * 8; }  // of a chunk
  DEVICE u32 row(int i) const { return thread / PIECES + i * APART; }
  DEVICE u8 *slot(u32 chunk) const { return ring + chunk % (AHEAD + 1) * X_BYTES; }
  DEVICE u8 *piece(u32 chunk, u32 i) const {
    return slot(chunk) + i * APART / 8 * (16 * CHUNK) + to[i * APART % 8 / EACH];
  }

  DEVICE void copy(u32 chunk) {
    if (chunk >= chunks) return;
    const bool is_column = COLUMNS == DEPTH || begin + chunk * CHUNK + column() < DEPTH;
#pragma unroll
    for (int i = 0; i < LOADS; i++)
      if (ROWS % APART == 0 || row(i) < ROWS)
        async_copy<16>(piece(chunk, i), next + (u64)(i * APART) * stride, is_column && row(i) < rows);
    next += CHUNK;
  }
  DEVICE void load_gains(const float *gain, u32 chunk) {
    if constexpr (IS_NORMED) {
      const u32 at = begin + chunk * CHUNK + column();
#pragma unroll
      for (int half = 0; half < 2; half++) {
        Words<4> loaded = {};
        if (chunk < chunks && at < DEPTH) loaded = load((const Words<4> *)(gain + at) + half);
#pragma unroll
        for (int j = 0; j < 4; j++) gains[4 * half + j] = float_of(loaded.at[j]);
      }
    }
  }
  // What a thread does to its own pieces of a chunk: the gain's product, squares, and totals with three other lanes.
  DEVICE void prepare(u32 chunk) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const u32 m = row(i);
      float total = 0;
      if (m < ROWS) {
        Words<4> *const at = (Words<4> *)piece(chunk, i);
        Words<4> held = shared_load(at);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          if constexpr (IS_NORMED) {
            const float low = low_of<IS_BFLOAT>(held.at[j]), high = high_of<IS_BFLOAT>(held.at[j]);
            squares[i] += low * low;
            squares[i] += high * high;
            held.at[j] = pair_of<IS_BFLOAT>(low * (gains[2 * j] * RANGE), high * (gains[2 * j + 1] * RANGE));
          }
          if constexpr (Weight::HAS_TOTALS) total += low_of<IS_BFLOAT>(held.at[j]) + high_of<IS_BFLOAT>(held.at[j]);
        }
        if constexpr (IS_NORMED) shared_store(at, held);
      }
      if constexpr (Weight::HAS_TOTALS) {
        total += warp_shuffle_xor(total, 1);
        total += warp_shuffle_xor(total, 2);
        if (m < ROWS && thread % 4 == 0)
          shared_store(totals + (chunk % 2 * (CHUNK / 32) + thread % PIECES / 4) * ROWS + m, total);
      }
    }
  }
};

// Adds a chunk's products to a warp's sums: of 16 rows of the weight each, by eight rows of x. `begin`: its column of the step.
// `weight_at` and `x_at`: where the lane's rows of matrices begin in a stage and a chunk.
DEVICE void multiply(float (&sums)[2][PANELS][4], const u8 *stage, const WeightPointers &weight, u32 first_row, u32 step,
                     const Activations &of, u32 chunk, int begin, u32 lane, u32 weight_at, u32 x_at) {
  const u8 *const x = of.slot(chunk);
#pragma unroll
  for (int column = 0; column < CHUNK; column += SCALED) {
    u32 a[SCALED / 16][2][4];
#pragma unroll
    for (int k = 0; k < SCALED / 16; k++)
#pragma unroll
      for (int t = 0; t < 2; t++) Staged::load(a[k][t], stage, 16 * t, begin + column + 16 * k, weight_at);
    float factor[4] = {}, offset[4] = {};
    if constexpr (Weight::GROUP > 0) {
#pragma unroll
      for (int i = 0; i < 4; i++)
        Staged::factors(stage, weight, first_row, 8 * i + lane / 4, step, begin + column, factor[i], offset[i]);
    }
#pragma unroll
    for (int pair = 0; pair < PANELS; pair += 2) {
      if (Weight::GROUP > 0 && u32(8 * pair) >= of.rows) continue;  // so that products of 16 rows at a time are in registers
      float products[2][2][4] = {};
#pragma unroll
      for (int k = 0; k < SCALED / 16; k++) {
        u32 b[4];
        warp_load_matrices<false>(b, x + (x_at ^ (column / 8 + 2 * k) * 16) + pair * (16 * CHUNK));
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int t = 0; t < 2; t++) {
            const u32 columns[2] = {b[2 * n], b[2 * n + 1]};
            warp_multiply<IS_BFLOAT>(Weight::GROUP ? products[n][t] : sums[t][pair + n], a[k][t], columns);
          }
      }
      if constexpr (Weight::GROUP > 0) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
          float totals[2] = {};
          if constexpr (Weight::HAS_TOTALS) {
            const float *at = of.totals + (chunk % 2 * (CHUNK / 32) + column / 32) * ROWS + 8 * (pair + n);
            const Words<2> both = shared_load((const Words<2> *)(at + lane % 4 * 2));
            totals[0] = float_of(both.at[0]), totals[1] = float_of(both.at[1]);
          }
#pragma unroll
          for (int t = 0; t < 2; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
              float &sum = sums[t][pair + n][i];
              sum += factor[2 * t + i / 2] * products[n][t][i];
              if constexpr (Weight::HAS_TOTALS) sum += offset[2 * t + i / 2] * totals[i % 2];
            }
        }
      }
    }
  }
}

// Where a block's sums come together, once all have read the activations, which lay there.
struct Sums {
  float *parts, *squares, *factors;  // [group][row of x][STRIDE], [group][row of x], [row of x]: the norm's

  DEVICE explicit Sums(u8 *memory)
      : parts((float *)memory), squares(parts + COLUMN_WARPS * ROWS * STRIDE), factors(squares + COLUMN_WARPS * ROWS) {}

  DEVICE void put(const float (&sums)[2][PANELS][4], const Activations &of, u32 group, u32 row_warp, u32 lane) {
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
      for (int n = 0; n < PANELS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          shared_store(parts + (group * ROWS + 8 * n + lane % 4 * 2 + i % 2) * STRIDE + 32 * row_warp + 16 * t +
                           i / 2 * 8 + lane / 4,
                       sums[t][n][i]);
    if constexpr (IS_NORMED) {
#pragma unroll
      for (int i = 0; i < LOADS; i++) {
        float square = of.squares[i];
#pragma unroll
        for (u32 mask = PIECES / 2; mask > 0; mask /= 2) square += warp_shuffle_xor(square, mask);
        if (of.thread % PIECES == 0 && of.row(i) < ROWS) shared_store(squares + group * ROWS + of.row(i), square);
      }
    }
  }
  // Adds those of the groups, where other blocks read the sum.
  DEVICE void add_groups(u32 thread) {
    auto add = [&](float *at, u32 stride) {
      float sum = 0;
#pragma unroll
      for (int k = 0; k < COLUMN_WARPS; k++) sum += shared_load(at + k * stride);
      shared_store(at, sum);
    };
    for (u32 i = thread; i < ROWS * BLOCK_ROWS; i += THREADS)
      add(parts + i / BLOCK_ROWS * STRIDE + i % BLOCK_ROWS, ROWS * STRIDE);
    if constexpr (IS_NORMED)
      for (u32 m = thread; m < ROWS; m += THREADS) add(squares + m, ROWS);
  }
  // Of the cluster, or the groups, in one order.
  static DEVICE float whole(const float *at, u32 stride) {
    float sum = 0;
    if constexpr (SPLITS > 1) {
#pragma unroll
      for (int r = 0; r < SPLITS; r++) sum += cluster_load(at, r);
    } else {
#pragma unroll
      for (int k = 0; k < COLUMN_WARPS; k++) sum += shared_load(at + k * stride);
    }
    return sum;
  }
  DEVICE float product(u32 m, u32 row) const { return whole(parts + m * STRIDE + row, ROWS * STRIDE); }
  DEVICE void put_factors(u32 thread, float eps) {
    for (u32 m = thread; m < ROWS; m += THREADS)
      shared_store(factors + m, 1 / RANGE / sqrtf(whole(squares + m, ROWS) / DEPTH + eps));
    block_barrier();
  }
};

// What a thread writes: results of a block, of every SPLITS-th row of x, each THREADS-th of them. Loads of a few are in
// flight at a time.
struct Results {
  static constexpr int COUNT = OUTPUTS * ROWS / SPLITS, PER_THREAD = (COUNT + THREADS - 1) / THREADS;
  static constexpr int AT_ONCE = PER_THREAD < 8 ? PER_THREAD : 8;

  Out *out;
  const u16 *bias;
  WeightPointers weight;
  u32 rows, stride, block, rank;
  float factor;

  DEVICE void write(const Sums &sums, u32 first) const {
    u32 m[AT_ONCE], n[AT_ONCE], row_scales[AT_ONCE][2] = {};
    u16 biases[AT_ONCE][2] = {};
    Out old[AT_ONCE] = {};
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const u32 result = first + i * THREADS, column = block * OUTPUTS + result % OUTPUTS;
      m[i] = result / OUTPUTS * SPLITS + rank, n[i] = result % OUTPUTS;
      if (result >= COUNT || column >= WIDTH) m[i] = ROWS;
      if (m[i] >= rows) continue;
      if constexpr (EPILOGUE == ADD) old[i] = load(out + (u64)m[i] * stride + column);
#pragma unroll
      for (int half = 0; half <= IS_GATED; half++) {
        if constexpr (Weight::HAS_ROW_SCALE) row_scales[i][half] = Weight::load_row_scale(weight, column + half * WIDTH);
        if (bias != nullptr) biases[i][half] = load_constant(bias + column + half * WIDTH);
      }
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      if (m[i] >= rows) continue;
      const u32 place = IS_GATED ? n[i] / 16 * 32 + n[i] % 16 : n[i];  // among the block's rows of the weight
      float values[2] = {};
#pragma unroll
      for (int half = 0; half <= IS_GATED; half++) {
        values[half] = sums.product(m[i], place + 16 * half);
        if constexpr (Weight::HAS_ROW_SCALE) values[half] *= Weight::row_scale(row_scales[i][half]);
        if constexpr (IS_NORMED) values[half] *= shared_load(sums.factors + m[i]);
        values[half] += to_float<IS_BFLOAT>(biases[i][half]);
      }
      float value = values[0];
      if constexpr (EPILOGUE == ADD) value = out_of(old[i]) + factor * value;
      if constexpr (IS_GATED) value = activated(value) * values[1];
      store(out + (u64)m[i] * stride + block * OUTPUTS + n[i], to_out(value));
    }
  }
};

KERNEL(THREADS, 1)
wide_linear(Out *out, const u16 *x, const u8 *words, const u8 *high, const u8 *scales, const u8 *seconds, const u16 *bias,
            const float *gain, u32 rows, u32 x_stride, u32 out_stride, float eps, float factor) {
  allow_next_kernel();
  const u32 thread = thread_index(), lane = thread % 32, row_warp = thread / 32 % ROW_WARPS;
  const u32 group = thread / GROUP_THREADS, block = block_index() / SPLITS, rank = block_index() % SPLITS;
  const WeightPointers weight = {words, high, scales, seconds};
  const u32 first = (rank * COLUMN_WARPS + group) * PER_SHARE;  // step
  const u32 steps = first >= STEPS ? 0 : STEPS - first < PER_SHARE ? STEPS - first : PER_SHARE;
  u8 *const memory = shared_memory(), *const stages = memory + WEIGHTS_AT + thread / 32 * (STAGES * Staged::BYTES);

  const u32 first_row = block * OUTPUTS + row_warp * ADJACENT;
  const u32 weight_at = kept(Staged::lane_at(lane)), x_at = kept(piece_at(lane / 16 * 8 + lane % 8, lane / 8 % 2));
  Staged::Copies copies(weight, first_row, first, lane);
#pragma unroll
  for (int i = 0; i + 1 < STAGES; i++)
    if (u32(i) < steps) copies.next(stages + i * Staged::BYTES, weight);
  Activations of(x, memory + group * (AHEAD + 1) * X_BYTES, (float *)(memory + TOTALS_AT) + group * TOTALS, rows, x_stride,
                 first * Weight::STEP, steps * CHUNKS, thread % GROUP_THREADS);
  of.load_gains(gain, 0);

  wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    of.copy(i);
    async_commit();
  }
  float sums[2][PANELS][4] = {};
#pragma unroll 1
  for (u32 step = 0; step < steps; step++) {
    const u8 *const own = stages + step % STAGES * Staged::BYTES;
#pragma unroll
    for (int part = 0; part < CHUNKS; part++) {
      const u32 chunk = step * CHUNKS + part;
      async_wait<AHEAD - 1>();
      if constexpr (HAS_PASS) of.prepare(chunk);
      named_barrier(1 + group, GROUP_THREADS);  // the chunk is there, and the one before has been multiplied
      of.copy(chunk + AHEAD);
      if (part == 0 && step + STAGES - 1 < steps)
        copies.next(stages + (step + STAGES - 1) % STAGES * Staged::BYTES, weight);
      async_commit();
      of.load_gains(gain, chunk + 1);
      multiply(sums, own, weight, first_row, first + step, of, chunk, part * CHUNK, lane, weight_at, x_at);
    }
  }

  Sums all(memory);
  block_barrier();
  all.put(sums, of, group, row_warp, lane);
  if constexpr (SPLITS == 1 || COLUMN_WARPS > 1) block_barrier();
  if constexpr (SPLITS > 1) {
    if constexpr (COLUMN_WARPS > 1) all.add_groups(thread);
    cluster_arrive();
    cluster_wait();
  }
  if constexpr (IS_NORMED) all.put_factors(thread, eps);
  const Results results = {out, bias, weight, rows, out_stride, block, rank, factor};
#pragma unroll 1
  for (u32 i = thread; i < Results::COUNT; i += Results::AT_ONCE * THREADS) results.write(all, i);
  if constexpr (SPLITS > 1) {  // no block ends before the others have read its sums
    cluster_arrive();
    cluster_wait();
  }
}
