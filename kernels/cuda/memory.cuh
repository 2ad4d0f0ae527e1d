// Memory that threads share, and what orders it: all of a kernel's accesses go through these functions.
//
// NVRTC compiles them to PTX. Other compilers take `fibers.h` of the tests instead, which has the same names: threads run
// as fibers in random order, and an access that nothing orders after the last write is a fault.
//
// Rules of a chain of kernels that start early:
// - Before `wait_for_previous_kernel` a kernel writes no global memory, and reads constants, or what was written before a
//   kernel that waited before it allowed the next one.
// - What touches other global memory has waited, or stands behind a barrier with a thread that has; every kernel waits.
// - `allow_next_kernel` may come first. The next kernel may then run beside this one and the one before, so that for it
//   neither counts as a kernel that waited first.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

template <int COUNT>
struct alignas(4 * COUNT) Words {  // 1, 2 or 4: what a thread loads or stores at once
  u32 at[COUNT];
};

#ifndef __CUDACC_RTC__
#include "fibers.h"
#else

#define DEVICE __device__ __forceinline__
#define KERNEL(threads, programs) extern "C" __global__ void __launch_bounds__(threads, programs)
#define HAS_EARLY_START (__CUDA_ARCH__ >= 900)

DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_index() { return blockIdx.x; }
DEVICE u32 block_index_y() { return blockIdx.y; }
DEVICE u32 block_count() { return gridDim.x; }

// The shared memory that the launch asks for, at a multiple of 128 bytes.
DEVICE u8 *shared_memory() {
  extern __shared__ __align__(128) u8 launched_memory[];
  return launched_memory;
}
DEVICE u32 shared_address(const void *at) { return (u32)__cvta_generic_to_shared(at); }

namespace pieces {
template <int SIZE>
struct Piece;
#define PIECE(SIZE, WORD, COUNT) \
  template <>                    \
  struct Piece<SIZE> {           \
    WORD at[COUNT];              \
  };
PIECE(1, u16, 1)
PIECE(2, u16, 1)
PIECE(4, u32, 1)
PIECE(8, u32, 2)
PIECE(16, u32, 4)
#undef PIECE
template <typename TO, typename FROM>
DEVICE TO bits_of(const FROM &from) {
  union Both {
    FROM from;
    TO to;
    DEVICE Both() {}
  } both;
  both.from = from;
  return both.to;
}
}  // namespace pieces

// Loads of T, which has 1, 2, 4, 8 or 16 bytes, by one PTX instruction in the order of the source.
#define LOADS(NAME, SPACE, CONSTRAINT)                                                                                \
  template <typename T>                                                                                               \
  DEVICE T NAME(const T *at) {                                                                                        \
    pieces::Piece<sizeof(T)> p;                                                                                       \
    if constexpr (sizeof(T) == 1) {                                                                                   \
      asm volatile("ld" SPACE ".u8 %0, [%1];" : "=h"(p.at[0]) : CONSTRAINT(at) : "memory");                           \
      return pieces::bits_of<T>((u8)p.at[0]);                                                                         \
    } else if constexpr (sizeof(T) == 2) {                                                                            \
      asm volatile("ld" SPACE ".u16 %0, [%1];" : "=h"(p.at[0]) : CONSTRAINT(at) : "memory");                          \
    } else if constexpr (sizeof(T) == 4) {                                                                            \
      asm volatile("ld" SPACE ".u32 %0, [%1];" : "=r"(p.at[0]) : CONSTRAINT(at) : "memory");                          \
    } else if constexpr (sizeof(T) == 8) {                                                                            \
      asm volatile("ld" SPACE ".v2.u32 {%0, %1}, [%2];" : "=r"(p.at[0]), "=r"(p.at[1]) : CONSTRAINT(at) : "memory");  \
    } else {                                                                                                          \
      asm volatile("ld" SPACE ".v4.u32 {%0, %1, %2, %3}, [%4];"                                                       \
                   : "=r"(p.at[0]), "=r"(p.at[1]), "=r"(p.at[2]), "=r"(p.at[3])                                       \
                   : CONSTRAINT(at)                                                                                   \
                   : "memory");                                                                                       \
    }                                                                                                                 \
    return pieces::bits_of<T>(p);                                                                                     \
  }

// A constant, such as a weight, which no kernel in flight writes; also before the wait. It takes no place in L1. Not by way
// of `.nc`: the assembler moves such loads behind the wait.
LOADS(load_constant, ".global.L1::no_allocate", "l")
// Global memory that this kernel, or one before the wait, wrote; constants that many blocks read.
LOADS(load, ".global", "l")
#undef LOADS

template <typename T>
DEVICE void store(T *at, T value) {
  *(volatile T *)at = value;
}

// Shared memory of this block; a barrier orders the accesses of its threads.
template <typename T>
DEVICE T shared_load(const T *at) {
  return *at;
}
template <typename T>
DEVICE void shared_store(T *at, T value) {
  *at = value;
}

// The kernel before this one in the stream has ended, and its writes are seen.
DEVICE void wait_for_previous_kernel() {
#if HAS_EARLY_START
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may start, once all blocks have called this or ended.
DEVICE void allow_next_kernel() {
#if HAS_EARLY_START
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Barriers of all threads of a block, of a number of them (ids 1..15), and of the lanes of a warp.
DEVICE void block_barrier() { __syncthreads(); }
DEVICE void named_barrier(u32 id, u32 threads) { asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void warp_sync() { __syncwarp(); }

// All lanes of a warp call these.
template <typename T>
DEVICE T warp_shuffle(T value, u32 lane) {
  return __shfl_sync(~0u, value, lane);
}
template <typename T>
DEVICE T warp_shuffle_xor(T value, u32 lane_mask) {
  return __shfl_xor_sync(~0u, value, lane_mask);
}

// sums += a @ b of a warp: a [16, 16] by b [16, 8] in 16-bit floats. With g = lane / 4 and q = lane % 4, a lane holds of a
// rows g, g + 8, g, g + 8, the first two columns 2 q, 2 q + 1, the last two 2 q + 8, 2 q + 9; of b column g, rows 2 q,
// 2 q + 1 and 2 q + 8, 2 q + 9; of the sums row g, columns 2 q and 2 q + 1, and row g + 8, the same.
template <bool IS_BFLOAT>
DEVICE void warp_multiply(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#define MULTIPLY(KIND)                                                                                      \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"    \
      "{%0,%1,%2,%3};"                                                                                      \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                          \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
  if constexpr (IS_BFLOAT)
    MULTIPLY("bf16");
  else
    MULTIPLY("f16");
#undef MULTIPLY
}

// Four matrices [8, 8] of 16-bit values: lane 8 m + r names the 16 bytes of row r of matrix m. Of each, a lane gets row
// lane / 4, columns 2 q and 2 q + 1 with q = lane % 4; TRANSPOSED: column lane / 4, rows 2 q and 2 q + 1.
template <bool TRANSPOSED>
DEVICE void warp_load_matrices(u32 (&to)[4], const void *row) {
#define LOAD(KIND)                                                                      \
  asm volatile("ldmatrix.sync.aligned.m8n8.x4" KIND ".shared.b16 {%0, %1, %2, %3}, [%4];" \
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])                     \
               : "r"(shared_address(row))                                               \
               : "memory")
  if constexpr (TRANSPOSED)
    LOAD(".trans");
  else
    LOAD("");
#undef LOAD
}

// Copies of 4, 8 or 16 bytes from global to shared memory, which land at any time until the thread waits for them; its own
// accesses see them then, others' behind a barrier. Without `is_there` they write zeros. A thread's copies since its last
// `async_commit` are a group; `async_wait` waits for all groups but the last `LEFT`.
template <int BYTES>
DEVICE void async_copy(void *shared, const void *global, bool is_there = true) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "4, 8 or 16 bytes");
  const u32 there = is_there ? BYTES : 0;
  if constexpr (BYTES == 16)  // past L1
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(there)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(global), "n"(BYTES),
                 "r"(there)
                 : "memory");
}
DEVICE void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
DEVICE void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Counters in global memory, seen by the whole GPU: a thread that loads with acquire sees what was written before the
// add with release.
DEVICE u32 atomic_add_release(u32 *at, u32 value) {
  u32 before;
  asm volatile("atom.release.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(value) : "memory");
  return before;
}
DEVICE u32 atomic_load_acquire(const u32 *at) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
DEVICE void fence_gpu() { __threadfence(); }

// Blocks of a cluster, from sm_90 on: each may read the others' shared memory, after a barrier, and until one.
DEVICE u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
DEVICE u32 cluster_size() {
  u32 size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

template <typename T>
DEVICE T cluster_load(const T *at, u32 rank) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 16, "4 or 16 bytes");
  u32 there;
  pieces::Piece<sizeof(T)> p;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(at)), "r"(rank));
  if constexpr (sizeof(T) == 4)
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(p.at[0]) : "r"(there) : "memory");
  else
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(p.at[0]), "=r"(p.at[1]), "=r"(p.at[2]), "=r"(p.at[3])
                 : "r"(there)
                 : "memory");
  return pieces::bits_of<T>(p);
}

#if __CUDA_ARCH__ >= 900
// Copies of multiples of 16 bytes from global to shared memory, whose arrival a barrier in shared memory counts.
// A phase of the barrier ends when `count` arrivals and all expected bytes are there; a wait names the phase's parity.
DEVICE void mbarrier_init(u64 *barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
// The thread that made the barriers calls it, before a block barrier.
DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Between ordinary writes of shared memory and a copy over them, by the thread that wrote.
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void mbarrier_arrive(u64 *barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives, too.
DEVICE void mbarrier_expect_bytes(u64 *barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
DEVICE void mbarrier_wait(u64 *barrier, u32 phase) {
  asm volatile(
      "{.reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @done bra DONE; bra AGAIN;"
      " DONE:}" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}
DEVICE void bulk_copy(void *shared, const void *global, u32 bytes, u64 *barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
#endif
#endif
