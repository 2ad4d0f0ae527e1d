// Parts of decode attention: norm and rotation of heads, a tile's scores and weighted values on tensor cores, and the
// merge of partial results.
#pragma once
#include "attention_numbers.cuh"

constexpr u32 CONSUMERS = 4;        // warps that attend, each to its own keys of a tile
constexpr u32 KEYS = 16;            // of a warp in a tile
constexpr u32 TILE = CONSUMERS * KEYS;
constexpr u32 QUERIES = 16;         // heads of a group, padded to the rows of a product
constexpr float LOG2_E = 1.4426950408889634f;

// What a kernel is compiled for.
template <u32 CHANNELS_, u32 HEADS_, u32 ENTRY_BYTES>
struct Shape {
  static constexpr u32 CHANNELS = CHANNELS_, HEADS = HEADS_;
  static constexpr u32 ROW_BYTES = CHANNELS * ENTRY_BYTES;  // of a key, or a value
  // rows lie 16 bytes further apart than they are long: eight of them are in different banks
  static constexpr u32 STAGE_ROW = ROW_BYTES + 16, WIDE_ROW = CHANNELS * 2 + 16;
  static constexpr u32 BLOCKS = CHANNELS / 8;  // of eight channels
  static_assert(CHANNELS % 16 == 0 && HEADS <= QUERIES, "heads of 16 n channels, at most 16 of a group");
};

// Value of a channel of a head after norm and rotation: cosine and sine of its pair, with the sign that it takes.
struct Rotation {
  u32 partner;
  float cos, sin, gain, partner_gain;
};

// Rotation of a channel at a position; `gains`: weights of the norm, or null.
DEVICE Rotation rotation_of(u32 channel, u32 half, const float *cos_sin, u32 position, const float *gains) {
  Rotation r = {channel, 1.0f, 0.0f, 1.0f, 1.0f};
  if (channel < 2 * half) {
    bool is_first = channel < half;
    const float *at = cos_sin + (u64)position * (2 * half) + (is_first ? channel : channel - half);
    r.partner = is_first ? channel + half : channel - half;
    r.cos = load(at);
    r.sin = load(at + half);
    if (is_first) r.sin = -r.sin;
  }
  if (gains) {
    r.gain = load(gains + channel);
    r.partner_gain = load(gains + r.partner);
  }
  return r;
}

DEVICE float sum_of_warp(float value) {
#pragma unroll
  for (u32 lanes = 16; lanes; lanes /= 2) value += warp_shuffle_xor(value, lanes);
  return value;
}

template <bool BFLOAT, bool WIDE>
DEVICE float value_at(const void *source, u64 at) {
  if constexpr (WIDE) return load((const float *)source + at);
  return to_float<BFLOAT>(load((const u16 *)source + at));
}

// A query's channel in the type that products take: fp16 for keys of 8 bits, where 65504 stands for what is larger.
template <bool BFLOAT, bool NARROW>
DEVICE u16 query_of(float value) {
  u16 bits = from_float<BFLOAT>(value);
  if (!BFLOAT || !NARROW) return bits;
  float wide = to_float<BFLOAT>(bits);
  return from_float<false>(wide > 65504.0f ? 65504.0f : wide < -65504.0f ? -65504.0f : wide);
}

// The partial result of a warp over some keys: sums of weighted values [QUERIES, CHANNELS] as a product leaves them,
// and for the two rows of a lane the largest logit and the sum of weights beside it; base 2.
template <class S>
struct Partial {
  float sums[S::BLOCKS][4];
  float top[2], total[2];

  DEVICE Partial() {
#pragma unroll
    for (u32 i = 0; i < S::BLOCKS; i++) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0f;
    top[0] = top[1] = -infinity();
    total[0] = total[1] = 0.0f;
  }
};

// Queries of a group as the left side of products: two words of each row for each 16 channels.
template <class S>
struct Queries {
  u32 words[S::CHANNELS / 16][4];

  DEVICE void read(const u16 *queries) {
    u32 lane = thread_index() % 32;
    const u16 *low = queries + lane / 4 * (S::WIDE_ROW / 2) + lane % 4 * 2, *high = low + 8 * (S::WIDE_ROW / 2);
#pragma unroll
    for (u32 i = 0; i < S::CHANNELS / 16; i++) {
      words[i][0] = shared_load((const u32 *)(low + 16 * i));
      words[i][1] = shared_load((const u32 *)(high + 16 * i));
      words[i][2] = shared_load((const u32 *)(low + 16 * i + 8));
      words[i][3] = shared_load((const u32 *)(high + 16 * i + 8));
    }
  }
};

// Which keys of a warp a lane may use, and what becomes of logits.
struct Logits {
  int first, last;  // of the warp's 16 keys, those that are seen
  float scale, cap;  // hold log2(e); cap 0: none
};

DEVICE float capped(float logit, float cap) { return cap > 0.0f ? cap * tanh_of(logit / cap) : logit; }

// Adds 16 keys and values, rows of 16-bit numbers of WIDE_ROW bytes, to a partial result.
template <class S, bool BFLOAT>
DEVICE void attend(Partial<S> &partial, const Queries<S> &queries, const u8 *keys, const u8 *values,
                   const Logits &logits) {
  u32 lane = thread_index() % 32;
  float scores[2][4] = {};
  const u8 *row = keys + (lane % 8 + lane / 16 * 8) * S::WIDE_ROW + lane / 8 % 2 * 16;
#pragma unroll
  for (u32 i = 0; i < S::CHANNELS / 16; i++) {
    u32 loaded[4];
    warp_load_matrices<false>(loaded, row + 32 * i);
    const u32 low[2] = {loaded[0], loaded[1]}, high[2] = {loaded[2], loaded[3]};
    warp_multiply<BFLOAT>(scores[0], queries.words[i], low);
    warp_multiply<BFLOAT>(scores[1], queries.words[i], high);
  }
  u32 weights[4];
  float shrink[2];
#pragma unroll
  for (u32 r = 0; r < 2; r++) {
    float of_row[4], top = partial.top[r];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      int key = i / 2 * 8 + lane % 4 * 2 + i % 2;
      bool is_seen = key >= logits.first && key < logits.last;
      of_row[i] = is_seen ? capped(scores[i / 2][2 * r + i % 2] * logits.scale, logits.cap) : -infinity();
      top = fmaxf(top, of_row[i]);
    }
    top = fmaxf(top, warp_shuffle_xor(top, 1));
    top = fmaxf(top, warp_shuffle_xor(top, 2));
    float base = top == -infinity() ? 0.0f : top;
#pragma unroll
    for (u32 i = 0; i < 4; i++) of_row[i] = exp_2(of_row[i] - base);
    shrink[r] = exp_2(partial.top[r] - base);
    partial.total[r] = partial.total[r] * shrink[r] + (of_row[0] + of_row[1]) + (of_row[2] + of_row[3]);
    partial.top[r] = top;
    weights[r] = pair_of<BFLOAT>(of_row[0], of_row[1]);
    weights[2 + r] = pair_of<BFLOAT>(of_row[2], of_row[3]);
  }
  row = values + lane % 16 * S::WIDE_ROW + lane / 16 * 16;
#pragma unroll
  for (u32 i = 0; i < S::BLOCKS; i += 2) {
    u32 loaded[4];
    warp_load_matrices<true>(loaded, row + 16 * i);
    const u32 low[2] = {loaded[0], loaded[1]}, high[2] = {loaded[2], loaded[3]};
#pragma unroll
    for (u32 r = 0; r < 4; r++) {
      partial.sums[i][r] *= shrink[r / 2];
      partial.sums[i + 1][r] *= shrink[r / 2];
    }
    warp_multiply<BFLOAT>(partial.sums[i], weights, low);
    warp_multiply<BFLOAT>(partial.sums[i + 1], weights, high);
  }
}

// Writes a warp's partial result into shared memory: sums [HEADS, CHANNELS], tops and totals [HEADS, 2].
template <class S>
DEVICE void put(Partial<S> &partial, float *sums, float *tops) {
  u32 lane = thread_index() % 32;
#pragma unroll
  for (u32 r = 0; r < 2; r++) {
    u32 head = lane / 4 + 8 * r;
    float total = partial.total[r];
    total += warp_shuffle_xor(total, 1);
    total += warp_shuffle_xor(total, 2);
    if (head < S::HEADS) {
#pragma unroll
      for (u32 i = 0; i < S::BLOCKS; i++)
        shared_store((Words<2> *)(sums + head * S::CHANNELS + 8 * i + lane % 4 * 2),
                     {bits_of(partial.sums[i][2 * r]), bits_of(partial.sums[i][2 * r + 1])});
      if (lane % 4 == 0) {
        shared_store(tops + 2 * head, partial.top[r]);
        shared_store(tops + 2 * head + 1, total);
      }
    }
  }
}
