// A warp's 32 rows of a weight in shared memory, copied ahead a step of columns at a time.
//
// Rows of words stand in planes, of pieces of 16 bytes, so placed that eight rows' have no bank conflicts: matrices that
// the warp loads are the tensor cores' first operand, or its codes. A lane copies the numbers of its row's groups; a number
// of fewer than 4 bytes with the word around it.
#pragma once
#include "weights.cuh"

// `BYTES` of each of 32 rows, in pieces of 16, 8 or 4 bytes beside those of the other rows.
template <int BYTES>
struct Numbers {
  static constexpr int SIZE = BYTES % 16 == 0 ? 16 : BYTES % 8 == 0 ? 8 : 4, COUNT = (BYTES + SIZE - 1) / SIZE;
  static constexpr int WORDS = SIZE * COUNT / 4, ALL = 128 * WORDS;

  static DEVICE void copy(u8 *to, const u8 *from, u32 row, bool is_there) {
    if constexpr (BYTES < 4) from -= (u64)from % 4;
#pragma unroll
    for (int i = 0; i < COUNT; i++) async_copy<SIZE>(to + (i * 32 + row) * SIZE, from + i * SIZE, is_there);
  }
  // `from`: where they were copied from
  static DEVICE void read(u32 *into, const u8 *at, u32 row, const u8 *from) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const Words<SIZE / 4> held = shared_load((const Words<SIZE / 4> *)(at + (i * 32 + row) * SIZE));
#pragma unroll
      for (int j = 0; j < SIZE / 4; j++) into[i * (SIZE / 4) + j] = held.at[j];
    }
    if constexpr (BYTES < 4) into[0] >>= 8 * ((u64)from % 4);
  }
};

// `HALF`: rows that are adjacent, 16 or 32; the second half are `APART` rows behind the first. Past `HEIGHT` rows there
// are zeros.
template <typename Weight, u32 HALF, u32 APART, u32 HEIGHT>
struct StagedWeight {
  typedef Numbers<Weight::SCALE_BYTES> Scales;
  typedef Numbers<Weight::SECOND_BYTES> Seconds;
  static constexpr bool HAS_SCALES = Weight::GROUP > 0, HAS_SECONDS = HAS_SCALES && Weight::SECOND_BYTES > 0;
  static constexpr int PIECES = Weight::ROW_BYTES / 16, PLANE = 32 * Weight::ROW_BYTES;
  static constexpr int SCALES_AT = Weight::PLANES * PLANE;
  static constexpr int SECONDS_AT = SCALES_AT + (HAS_SCALES ? Scales::ALL : 0);
  static constexpr int BYTES = SECONDS_AT + (HAS_SECONDS ? Seconds::ALL : 0);  // of a step

  // Adjacent rows' pieces at one place are in other banks; eight rows further on, so is the same.
  static constexpr DEVICE u32 piece_at(u32 row, u32 piece) {
    return row * Weight::ROW_BYTES + (piece ^ (row / (8 / PIECES) % PIECES)) * 16;
  }
  static constexpr DEVICE u32 row_of(u32 n) { return n / HALF * APART + n % HALF; }

  // A lane's copies of a warp's rows, a step after the other.
  struct Copies {
    const u8 *words, *high;
    u32 first, step, lane, to[2];

    // `first`: the warp's first row
    DEVICE Copies(const WeightPointers &weight, u32 first, u32 step, u32 lane) : first(first), step(step), lane(lane) {
      const u64 at = Weight::row_bytes(first + lane / PIECES) + lane % PIECES * 16;
      words = weight.words + step * Weight::STEP_BYTES + at;
      high = weight.high + step * Weight::HIGH_STEP_BYTES + at;
      to[0] = kept(piece_at(lane / PIECES, lane % PIECES)), to[1] = kept(piece_at(lane / PIECES + 4, lane % PIECES));
    }
    DEVICE bool is_there(u32 n) const { return HEIGHT % HALF == 0 || first + n % HALF < HEIGHT; }

    DEVICE void next(u8 *stage, const WeightPointers &weight) {
#pragma unroll
      for (int i = 0; i < PIECES; i++) {
        const u32 n = i * (32 / PIECES);
#pragma unroll
        for (int plane = 0; plane < Weight::PLANES; plane++)
          async_copy<16>(stage + plane * PLANE + n / 8 * 8 * Weight::ROW_BYTES + to[n / 4 % 2],
                         (plane < Weight::TILES ? words : high) + Weight::plane_bytes(plane) + Weight::row_bytes(row_of(n)),
                         is_there(lane / PIECES + n));
      }
      const u32 row = is_there(lane) ? first + row_of(lane) : first;
      if constexpr (HAS_SCALES) Scales::copy(stage + SCALES_AT, Weight::scales_at(weight, row, step), lane, is_there(lane));
      if constexpr (HAS_SECONDS)
        Seconds::copy(stage + SECONDS_AT, Weight::seconds_at(weight, row, step), lane, is_there(lane));
      words += Weight::STEP_BYTES, high += Weight::HIGH_STEP_BYTES, step++;
    }
  };

  // Where a lane's row of the matrices of `load` begins.
  static DEVICE u32 lane_at(u32 lane) { return piece_at(lane % 16, lane / 16); }
  // The tensor cores' operand of 16 rows from `row` on, by 16 columns.
  static DEVICE void load(u32 (&to)[4], const u8 *stage, u32 row, int column, u32 lane_at) {
    constexpr int PLANE_COLUMNS = 8 * PIECES;
    const u32 at = (lane_at ^ column % PLANE_COLUMNS / 8 * 16) + row * Weight::ROW_BYTES;
    const int low_plane = Weight::plane_of(column), high_plane = Weight::high_plane_of(column);
    u32 high[4] = {};
    warp_load_matrices<false>(to, stage + low_plane * PLANE + at);
    if (high_plane != low_plane) warp_load_matrices<false>(high, stage + high_plane * PLANE + at);
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = Weight::value(to[i], high[i], column);
  }

  // A row's factors of a group; see `TiledWeight`. `n`: of the warp's rows, the first of which is `first`.
  static DEVICE void factors(const u8 *stage, const WeightPointers &weight, u32 first, u32 n, u32 step, int column,
                             float &factor, float &offset) {
    const u32 row = first + row_of(n);
    u32 scales[HAS_SCALES ? Scales::WORDS : 1], seconds[HAS_SECONDS ? Seconds::WORDS : 1];
    if constexpr (HAS_SCALES) Scales::read(scales, stage + SCALES_AT, n, Weight::scales_at(weight, row, step));
    if constexpr (HAS_SECONDS) Seconds::read(seconds, stage + SECONDS_AT, n, Weight::seconds_at(weight, row, step));
    Weight::factors(scales, seconds, Weight::place_of(column), factor, offset);
    factor = kept(factor), offset = kept(offset);
  }
};
