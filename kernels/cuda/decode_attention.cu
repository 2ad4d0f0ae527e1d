// Attention of one decode step, with norm, rotation and append of the new token before it: a cluster for each row and
// kv head. It has not run on a GPU yet; see `append_attention.py` for the formulas and the tensors.
//
// The newest keys of a row belong to rank 0 of the cluster, the others to the next ranks. One warp of a block copies
// old keys and values, from the newest to the oldest, into a ring of tiles; it begins before the wait, for what the
// previous kernel writes is the product of queries, keys and values alone. Four warps norm and rotate the queries, take
// 16 keys of each tile, and merge their results through shared memory; the cluster merges those of its blocks through
// distributed shared memory. Lengths, page tables and older keys are read before the wait: between the kernels that
// write them and this one there must be one that waits before it allows the next, as this one does.
//
// A block reads span * (2 * ROW_BYTES) bytes of the cache, and (GROUP + 2) heads of the product.
#include "decode_attention.cuh"

// What a launch is compiled for.
constexpr u32 HEAD_DIM = SET_HEAD_DIM, GROUP = SET_GROUP, KV_HEADS = SET_KV_HEADS;  // GROUP query heads of each kv head
constexpr int PAGE_SIZE = SET_PAGE_SIZE;
constexpr u32 HALF = SET_HALF;  // pairs of channels that are rotated
constexpr int STAGES = SET_STAGES;
constexpr bool IS_BFLOAT = SET_IS_BFLOAT, IS_WIDE = SET_IS_WIDE;  // else fp16; the product is fp32
constexpr bool IS_E4M3 = SET_IS_E4M3;                             // the cache has 8 bits
constexpr bool HAS_NORM = SET_HAS_NORM, HAS_SINKS = SET_HAS_SINKS, IS_CHUNKED = SET_IS_CHUNKED;

using S = Shape<HEAD_DIM, GROUP, IS_E4M3 ? 1 : 2>;
constexpr u32 THREADS = 32 * (CONSUMERS + 1);
constexpr u32 STAGE_BYTES = 2 * TILE * S::STAGE_ROW;                       // keys, then values
constexpr u32 WIDE_BYTES = IS_E4M3 ? CONSUMERS * 2 * KEYS * S::WIDE_ROW : 0;  // of each warp, decoded
constexpr u32 PARTIAL_FLOATS = GROUP * (HEAD_DIM + 2);

// Shared memory of a block, in this order.
struct Layout {
  u64 *full, *empty;  // of each stage
  u8 *stages;
  u8 *wide;           // decoded keys and values of each warp
  u16 *queries;       // [QUERIES], WIDE_ROW bytes apart
  float *partials;    // of each warp, then of the block: sums [GROUP, HEAD_DIM], tops and totals [GROUP, 2]

  DEVICE explicit Layout(u8 *base) {
    full = (u64 *)base;
    empty = full + STAGES;
    stages = base + 128;
    wide = stages + STAGES * STAGE_BYTES;
    queries = (u16 *)(wide + WIDE_BYTES);
    partials = (float *)((u8 *)queries + QUERIES * S::WIDE_ROW);
  }
};
constexpr u32 SHARED_BYTES =  // as `decode_attention.py` computes it
    128 + STAGES * STAGE_BYTES + WIDE_BYTES + QUERIES * S::WIDE_ROW + (CONSUMERS + 1) * 4 * PARTIAL_FLOATS;

struct Arguments {
  u16 *out;                  // [rows, KV_HEADS * GROUP, HEAD_DIM]
  u8 *k_cache, *v_cache;     // [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM]
  const void *qkv;           // [rows, (KV_HEADS * (GROUP + 2)) * HEAD_DIM]
  const int *page_table;     // [rows, table_stride]
  const int *kv_lens;        // [rows], the new token included; 0: the row is padding
  const float *cos_sin;      // [positions, 2, HALF]
  const float *q_norm, *k_norm;  // [HEAD_DIM]
  const float *sinks;        // [KV_HEADS * GROUP]
  int qkv_stride, table_stride;
  int window_left;           // -1: no window
  float scale, cap;          // hold log2(e)
  float eps, k_unit, v_unit;
};

// The keys [begin, end) of a block, in tiles that end at `end`.
struct Span {
  int begin, end, tiles;

  DEVICE Span(int kv_len, int window_left) {
    int lowest = 0;
    if (window_left >= 0) {
      int newest = kv_len - 1;
      lowest = IS_CHUNKED ? newest - newest % (window_left + 1) : newest > window_left ? newest - window_left : 0;
    }
    int part = (kv_len - lowest + cluster_size() - 1) / cluster_size();
    part = (part + KEYS - 1) / KEYS * KEYS;
    end = kv_len - (int)cluster_rank() * part;
    end = end > lowest ? end : lowest;
    begin = end - part > lowest ? end - part : lowest;
    tiles = (end - begin + TILE - 1) / TILE;
  }
};

// Where a token's key or value of a kv head is in a cache, in bytes.
DEVICE u64 entry_at(const int *pages, int position, u32 kv_head) {
  u64 page = load(pages + position / PAGE_SIZE);
  return ((page * PAGE_SIZE + position % PAGE_SIZE) * KV_HEADS + kv_head) * S::ROW_BYTES;
}

DEVICE void clear(u8 *row) {
  for (u32 at = 0; at < S::ROW_BYTES; at += 16) shared_store((Words<4> *)(row + at), Words<4>{});
}

// One warp: copies the old keys and values of each tile into the ring. What no key takes is 0.
DEVICE void copy_tiles(const Arguments &a, const Layout &shared, const Span &span, const int *pages, u32 kv_head,
                       int newest) {
  u32 lane = thread_index() % 32;
  for (int tile = 0; tile < span.tiles; tile++) {
    u32 stage = tile % STAGES;
    if (tile >= STAGES) mbarrier_wait(shared.empty + stage, (tile / STAGES & 1) ^ 1);
    u8 *keys = shared.stages + stage * STAGE_BYTES, *values = keys + TILE * S::STAGE_ROW;
    int first = span.end - (tile + 1) * (int)TILE;
    u32 count = 0;
    for (u32 i = lane; i < TILE; i += 32) {
      int position = first + (int)i;
      if (position >= span.begin) {
        count += position < newest;
      } else {
        clear(keys + i * S::STAGE_ROW);
        clear(values + i * S::STAGE_ROW);
      }
    }
    if (count)
      mbarrier_expect_bytes(shared.full + stage, count * 2 * S::ROW_BYTES);
    else
      mbarrier_arrive(shared.full + stage);
    for (u32 i = lane; i < TILE; i += 32) {
      int position = first + (int)i;
      if (position < span.begin || position >= newest) continue;
      u64 at = entry_at(pages, position, kv_head);
      bulk_copy(keys + i * S::STAGE_ROW, a.k_cache + at, S::ROW_BYTES, shared.full + stage);
      bulk_copy(values + i * S::STAGE_ROW, a.v_cache + at, S::ROW_BYTES, shared.full + stage);
    }
  }
}

// A channel of a cache's entry as the cache has it: its code is written to the page and to the first tile.
DEVICE void append(u8 *cache, u8 *row, u32 channel, float value, float unit) {
  if constexpr (IS_E4M3) {
    u8 code = e4m3_of(value / unit);
    store(cache + channel, code);
    shared_store(row + channel, code);
  } else {
    u16 code = from_float<IS_BFLOAT>(value);
    store((u16 *)cache + channel, code);
    shared_store((u16 *)row + channel, code);
  }
}

// Norms and rotates a head at `source`; `done` takes each channel's value.
template <class F>
DEVICE void norm_and_rotate(const Arguments &a, u64 source, const Rotation *rotations, F done) {
  u32 lane = thread_index() % 32;
  constexpr u32 COUNT = (HEAD_DIM + 31) / 32;
  float own[COUNT], partner[COUNT], squares = 0.0f;
#pragma unroll
  for (u32 i = 0; i < COUNT; i++) {
    own[i] = partner[i] = 0.0f;
    u32 channel = lane + 32 * i;
    if (channel < HEAD_DIM) {
      own[i] = value_at<IS_BFLOAT, IS_WIDE>(a.qkv, source + channel);
      partner[i] = value_at<IS_BFLOAT, IS_WIDE>(a.qkv, source + rotations[i].partner);
    }
    squares += own[i] * own[i];
  }
  float scale = 1.0f;
  if (HAS_NORM) scale = 1.0f / sqrtf(sum_of_warp(squares) / HEAD_DIM + a.eps);
#pragma unroll
  for (u32 i = 0; i < COUNT; i++) {
    u32 channel = lane + 32 * i;
    const Rotation &r = rotations[i];
    float value = own[i] * scale * r.gain * r.cos + partner[i] * scale * r.partner_gain * r.sin;
    if (channel < HEAD_DIM) done(channel, value);
  }
}

// Rotations of the channels of a lane.
DEVICE void rotations_of(Rotation *rotations, const Arguments &a, u32 position, const float *gains) {
#pragma unroll
  for (u32 i = 0; i < (HEAD_DIM + 31) / 32; i++) {
    u32 channel = thread_index() % 32 + 32 * i;
    if (channel < HEAD_DIM) rotations[i] = rotation_of(channel, HALF, a.cos_sin, position, HAS_NORM ? gains : nullptr);
  }
}

// The consumers' part of what follows the wait: queries into shared memory, and in rank 0 the new key and value.
DEVICE void take_new_token(const Arguments &a, const Layout &shared, const int *pages, u32 row, u32 kv_head,
                           int newest) {
  constexpr u32 COUNT = (HEAD_DIM + 31) / 32;
  u32 warp = thread_index() / 32, lane = thread_index() % 32;
  bool appends = cluster_rank() == 0 && warp == CONSUMERS - 1;
  u64 entry = appends ? entry_at(pages, newest, kv_head) : 0;
  Rotation for_queries[COUNT], for_key[COUNT];
  rotations_of(for_queries, a, newest, a.q_norm);
  if (appends) rotations_of(for_key, a, newest, a.k_norm);
  wait_for_previous_kernel();
  allow_next_kernel();
  u64 source = (u64)row * a.qkv_stride;
  for (u32 head = warp; head < QUERIES; head += CONSUMERS) {
    u16 *query = shared.queries + head * (S::WIDE_ROW / 2);
    if (head < GROUP) {
      norm_and_rotate(a, source + (u64)(kv_head * GROUP + head) * HEAD_DIM, for_queries, [&](u32 channel, float value) {
        shared_store(query + channel, query_of<IS_BFLOAT, IS_E4M3>(value));
      });
    } else {
      for (u32 channel = lane; channel < HEAD_DIM; channel += 32) shared_store(query + channel, (u16)0);
    }
  }
  if (appends) {
    u8 *key = shared.stages + (TILE - 1) * S::STAGE_ROW, *value = key + TILE * S::STAGE_ROW;
    u64 at = source + (u64)(KV_HEADS * GROUP + kv_head) * HEAD_DIM;
    u8 *page = a.k_cache + entry;
    norm_and_rotate(a, at, for_key, [&](u32 channel, float x) { append(page, key, channel, x, a.k_unit); });
    for (u32 channel = lane; channel < HEAD_DIM; channel += 32) {
      float x = value_at<IS_BFLOAT, IS_WIDE>(a.qkv, at + KV_HEADS * HEAD_DIM + channel);
      append(a.v_cache + entry, value, channel, x, a.v_unit);
    }
    fence_async();  // a later tile is copied over them
  }
  named_barrier(1, 32 * CONSUMERS);
}

// Decodes 16 rows of 8-bit codes, of keys or values, into fp16.
DEVICE void decode(u8 *wide, const u8 *rows) {
  for (u32 i = thread_index() % 32; i < KEYS * (HEAD_DIM / 8); i += 32) {
    u32 row = i / (HEAD_DIM / 8), at = i % (HEAD_DIM / 8) * 8;
    Words<2> codes = shared_load((const Words<2> *)(rows + row * S::STAGE_ROW + at));
    Words<4> halves;
#pragma unroll
    for (u32 k = 0; k < 4; k++) halves.at[k] = halves_of_e4m3(codes.at[k / 2] >> (k % 2 * 16));
    shared_store((Words<4> *)(wide + row * S::WIDE_ROW + at * 2), halves);
  }
}

// A warp's part of a tile: its 16 keys.
DEVICE void attend_tile(Partial<S> &partial, const Queries<S> &queries, const Layout &shared, u32 stage,
                        const Logits &logits) {
  u32 warp = thread_index() / 32;
  const u8 *keys = shared.stages + stage * STAGE_BYTES + warp * KEYS * S::STAGE_ROW;
  const u8 *values = keys + TILE * S::STAGE_ROW;
  if constexpr (IS_E4M3) {
    u8 *wide = shared.wide + warp * 2 * KEYS * S::WIDE_ROW;
    decode(wide, keys);
    decode(wide + KEYS * S::WIDE_ROW, values);
    warp_sync();
    attend<S, false>(partial, queries, wide, wide + KEYS * S::WIDE_ROW, logits);
  } else {
    attend<S, IS_BFLOAT>(partial, queries, keys, values, logits);
  }
}

// Merges the results of the block's warps into the block's.
DEVICE void merge_warps(const Layout &shared) {
  float *merged = shared.partials + CONSUMERS * PARTIAL_FLOATS;
  for (u32 i = thread_index(); i < GROUP * HEAD_DIM; i += 32 * CONSUMERS) {
    u32 head = i / HEAD_DIM;
    float tops[CONSUMERS], top = -infinity(), total = 0.0f, sum = 0.0f;
#pragma unroll
    for (u32 w = 0; w < CONSUMERS; w++) {
      tops[w] = shared_load(shared.partials + w * PARTIAL_FLOATS + GROUP * HEAD_DIM + 2 * head);
      top = fmaxf(top, tops[w]);
    }
    float base = top == -infinity() ? 0.0f : top;
#pragma unroll
    for (u32 w = 0; w < CONSUMERS; w++) {
      const float *of_warp = shared.partials + w * PARTIAL_FLOATS;
      float weight = exp_2(tops[w] - base);
      total += weight * shared_load(of_warp + GROUP * HEAD_DIM + 2 * head + 1);
      sum += weight * shared_load(of_warp + i);
    }
    shared_store(merged + i, sum);
    if (i % HEAD_DIM == 0) {
      shared_store(merged + GROUP * HEAD_DIM + 2 * head, top);
      shared_store(merged + GROUP * HEAD_DIM + 2 * head + 1, total);
    }
  }
}

// Merges the results of the cluster's blocks, each block for its part of the output.
DEVICE void merge_blocks(const Arguments &a, const Layout &shared, u32 row, u32 kv_head) {
  const float *merged = shared.partials + CONSUMERS * PARTIAL_FLOATS;
  u32 blocks = cluster_size(), all = GROUP * HEAD_DIM;
  for (u32 i = cluster_rank() * THREADS + thread_index(); i < all; i += blocks * THREADS) {
    u32 head = i / HEAD_DIM;
    float top = -infinity(), total = 0.0f, sum = 0.0f;
    if (HAS_SINKS) {
      top = load(a.sinks + kv_head * GROUP + head) * LOG2_E;
      total = 1.0f;
    }
    for (u32 rank = 0; rank < blocks; rank++) {
      float of_block = cluster_load(merged + all + 2 * head, rank);
      float total_of_block = cluster_load(merged + all + 2 * head + 1, rank);
      if (of_block == -infinity() && total_of_block == 0.0f) continue;  // no key; a NaN has no largest logit, and stays
      float new_top = fmaxf(top, of_block), shrink = exp_2(top - new_top), weight = exp_2(of_block - new_top);
      total = total * shrink + weight * total_of_block;
      sum = sum * shrink + weight * cluster_load(merged + i, rank);
      top = new_top;
    }
    float result = sum / (total == 0.0f ? 1.0f : total) * a.v_unit;
    store(a.out + ((u64)row * KV_HEADS + kv_head) * all + i, from_float<IS_BFLOAT>(result));
  }
}

DEVICE void clear_row(const Arguments &a, u32 row, u32 kv_head) {
  u32 all = GROUP * HEAD_DIM;
  for (u32 i = cluster_rank() * THREADS + thread_index(); i < all; i += cluster_size() * THREADS)
    store(a.out + ((u64)row * KV_HEADS + kv_head) * all + i, (u16)0);
}

DEVICE void attend_row(const Arguments &a, u32 row, u32 kv_head, int kv_len) {
  Layout shared(shared_memory());
  Span span(kv_len, a.window_left);
  const int *pages = a.page_table + (u64)row * a.table_stride;
  u32 warp = thread_index() / 32, lane = thread_index() % 32;
  if (thread_index() == 0) {
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(shared.full + i, 32);
      mbarrier_init(shared.empty + i, CONSUMERS);
    }
    mbarrier_init_fence();
  }
  block_barrier();
  if (warp == CONSUMERS) {
    copy_tiles(a, shared, span, pages, kv_head, kv_len - 1);
  } else {
    take_new_token(a, shared, pages, row, kv_head, kv_len - 1);
    Queries<S> queries;
    queries.read(shared.queries);
    Partial<S> partial;
    for (int tile = 0; tile < span.tiles; tile++) {
      u32 stage = tile % STAGES;
      int first = span.end - (tile + 1) * (int)TILE + (int)(warp * KEYS);
      mbarrier_wait(shared.full + stage, tile / STAGES & 1);
      attend_tile(partial, queries, shared, stage, Logits{span.begin - first, span.end - first, a.scale, a.cap});
      warp_sync();
      if (lane == 0) mbarrier_arrive(shared.empty + stage);
    }
    float *sums = shared.partials + warp * PARTIAL_FLOATS;
    put(partial, sums, sums + GROUP * HEAD_DIM);
    named_barrier(1, 32 * CONSUMERS);
    merge_warps(shared);
  }
  cluster_arrive();
  cluster_wait();
  merge_blocks(a, shared, row, kv_head);
  cluster_arrive();
  cluster_wait();
}

KERNEL(THREADS, 1)
decode_attention(u16 *out, u8 *k_cache, u8 *v_cache, const void *qkv, const int *page_table, const int *kv_lens,
                 const float *cos_sin, const float *q_norm, const float *k_norm, const float *sinks, int qkv_stride,
                 int table_stride, int window_left, float scale, float cap, float eps, float k_unit, float v_unit) {
  const Arguments a = {out, k_cache, v_cache, qkv, page_table, kv_lens, cos_sin, q_norm, k_norm, sinks,
                       qkv_stride, table_stride, window_left, scale, cap, eps, k_unit, v_unit};
  u32 row = block_index_y(), kv_head = block_index() / cluster_size();
  int kv_len = load(kv_lens + row);
  if (kv_len > 0) {
    attend_row(a, row, kv_head, kv_len);
  } else {
    wait_for_previous_kernel();
    allow_next_kernel();
    clear_row(a, row, kv_head);
  }
}
