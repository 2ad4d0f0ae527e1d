// What a step pays for besides its bytes: launches, early starts, hops of the whole grid, barriers, and the clock.
#include "memory.cuh"

DEVICE u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}
DEVICE u64 cycles() {
  u64 now;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
  return now;
}

// Kernels of a chain: what one adds to it is a boundary.
KERNEL(128, 8) triggers_first(u32 *) {
  allow_next_kernel();
  wait_for_previous_kernel();
}
KERNEL(128, 8) waits_first(u32 *) {
  wait_for_previous_kernel();
  allow_next_kernel();
}

// Hops: no block goes on before all blocks have arrived. `state` is zeros. All blocks are resident: one a multiprocessor.
// 0: one counter. 1: a counter for each eight blocks, whose last block counts in one of the grid. 2: a flag for each block,
// which a thread of every block reads.
KERNEL(256, 1) hops(u32 *state, int count, int kind) {
  const u32 blocks = block_count(), block = block_index(), group = block / 8, groups = (blocks + 7) / 8;
  const u32 members = group + 1 < groups ? 8 : blocks - 8 * group;
  for (u32 hop = 1; hop <= (u32)count; hop++) {
    block_barrier();
    if (kind == 2) {
      if (thread_index() == 0) {
        fence_gpu();
        atomic_add_release(state + 32 * block, 1);
      }
      if (thread_index() < blocks)
        while (atomic_load_acquire(state + 32 * thread_index()) < hop) {
        }
    } else if (thread_index() == 0) {
      u32 *const whole = state, target = kind ? hop * groups : hop * blocks;
      fence_gpu();
      if (kind == 0) {
        atomic_add_release(whole, 1);
      } else if (atomic_add_release(state + 32 * (group + 1), 1) == hop * members - 1) {
        fence_gpu();
        atomic_add_release(whole, 1);
      }
      while (atomic_load_acquire(whole) < target) {
      }
    }
    block_barrier();
  }
}

KERNEL(160, 1) cluster_barriers(u32 *, int count) {
#if __CUDA_ARCH__ >= 900
  for (int i = 0; i < count; i++) {
    cluster_arrive();
    cluster_wait();
  }
#endif
}

KERNEL(160, 1) block_barriers(u32 *, int count) {
  for (int i = 0; i < count; i++) block_barrier();
}

// Cycles and nanoseconds of a multiprocessor at work.
KERNEL(256, 1) clocks(u64 *out, int count) {
  float values[8];
  for (int i = 0; i < 8; i++) values[i] = thread_index() + i;
  const u64 from = cycles(), began = nanoseconds();
  for (int i = 0; i < count; i++)
    for (int j = 0; j < 8; j++) values[j] = values[j] * 1.0001f + 0.5f;
  const u64 to = cycles(), ended = nanoseconds();
  float sum = 0;
  for (int i = 0; i < 8; i++) sum += values[i];
  if (thread_index() == 0) {
    store(out + 4 * block_index(), to - from);
    store(out + 4 * block_index() + 1, ended - began);
    store(out + 4 * block_index() + 2, (u64)(sum != 0));
  }
}
