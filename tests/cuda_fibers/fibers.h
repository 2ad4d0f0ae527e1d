// The names of kernels/cuda/memory.cuh under g++: each access is checked, and each thread is a fiber of `machine`.
// Included by memory.cuh where NVRTC does not compile it. A driver launches kernels by `launch`.
#pragma once
#include <cmath>

#include "machine.h"

#define DEVICE inline
#define KERNEL(threads, programs) extern "C" void

inline u32 thread_index() { return fibers::machine.thread->index; }
inline u32 block_index() {
    fibers::Block &block = *fibers::machine.thread->block;
    return block.number % block.kernel->grid.x;
}
inline u32 block_index_y() {
    fibers::Block &block = *fibers::machine.thread->block;
    return block.number / block.kernel->grid.x;
}
inline u32 block_count() { return fibers::machine.thread->block->kernel->grid.x; }
inline u8 *shared_memory() { return (u8 *)fibers::machine.thread->block->shared; }

// where a function of memory.cuh is called
#define CALLED_AT fibers::Site site = {__builtin_FILE(), __builtin_LINE()}

template <class T> T load_constant(const T *at, CALLED_AT) {
    fibers::machine.touch(fibers::Access::READ_CONSTANT, at, sizeof(T), site);
    return *at;
}
template <class T> T load(const T *at, CALLED_AT) {
    fibers::machine.touch(fibers::Access::READ, at, sizeof(T), site);
    return *at;
}
template <class T> struct Same {
    typedef T type;
};
template <class T> void store(T *at, typename Same<T>::type value, CALLED_AT) {
    fibers::machine.touch(fibers::Access::WRITE, at, sizeof(T), site);
    *at = value;
}
template <class T> T shared_load(const T *at, CALLED_AT) { return load(at, site); }
template <class T> void shared_store(T *at, typename Same<T>::type value, CALLED_AT) { store(at, value, site); }

inline void wait_for_previous_kernel(CALLED_AT) { fibers::machine.wait_for_previous(site); }
inline void allow_next_kernel() { fibers::machine.allow_next(); }

inline void block_barrier(CALLED_AT) { fibers::machine.block_barrier(site); }
inline void named_barrier(u32 number, u32 threads, CALLED_AT) { fibers::machine.named_barrier(number, threads, site); }
inline void warp_sync(CALLED_AT) { fibers::machine.warp_sync(site); }
template <class T> T warp_shuffle(T value, u32 lane, CALLED_AT) {
    static_assert(sizeof(T) == 4, "shuffles are of four bytes");
    fibers::Words6 words = {};
    memcpy(words.data(), &value, 4);
    memcpy(&value, fibers::machine.gather(words, site)[lane % 32].data(), 4);
    return value;
}
template <class T> T warp_shuffle_xor(T value, u32 lanes, CALLED_AT) {
    return warp_shuffle(value, (thread_index() % 32) ^ lanes, site);
}

// the half of a word as a number
template <bool IS_BFLOAT> float half_of(u32 word, bool is_high) {
    u16 bits = is_high ? word >> 16 : word & 0xffff;
    if (IS_BFLOAT) {
        u32 wide = u32(bits) << 16;
        float value;
        memcpy(&value, &wide, 4);
        return value;
    }
    _Float16 value;
    memcpy(&value, &bits, 2);
    return value;
}
// mma.m16n8k16, see memory.cuh for which values a lane holds
template <bool IS_BFLOAT> void warp_multiply(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2], CALLED_AT) {
    const fibers::Words6 *lanes = fibers::machine.gather({a[0], a[1], a[2], a[3], b[0], b[1]}, site);
    u32 lane = thread_index() % 32;
    for (u32 i = 0; i < 4; i++) {
        u32 row = lane / 4, column = lane % 4 * 2 + i % 2;
        double sum = sums[i];
        for (u32 k = 0; k < 16; k++) {
            const fibers::Words6 &of_a = lanes[row * 4 + k % 8 / 2], &of_b = lanes[column * 4 + k % 8 / 2];
            sum += double(half_of<IS_BFLOAT>(of_a[k / 8 * 2 + i / 2], k % 2)) *
                   half_of<IS_BFLOAT>(of_b[4 + k / 8], k % 2);
        }
        sums[i] = sum;
    }
}

template <bool TRANSPOSED> void warp_load_matrices(u32 (&to)[4], const void *row, CALLED_AT) {
    uint64_t address = (uint64_t)row;
    fibers::machine.touch(fibers::Access::READ, row, 16, site);
    const fibers::Words6 *lanes = fibers::machine.gather({u32(address), u32(address >> 32)}, site);
    u32 lane = thread_index() % 32, first = lane / 4, second = lane % 4 * 2;
    for (u32 i = 0; i < 4; i++) {
        auto value = [&](u32 r, u32 c) {
            const fibers::Words6 &of_row = lanes[8 * i + r];
            return u32(((const u16 *)(of_row[0] | (uint64_t)of_row[1] << 32))[c]);
        };
        if (TRANSPOSED) to[i] = value(second, first) | value(second + 1, first) << 16;
        else to[i] = value(first, second) | value(first, second + 1) << 16;
    }
}

template <int BYTES> void async_copy(void *shared, const void *global, bool is_there = true, CALLED_AT) {
    fibers::machine.async_copy(shared, global, BYTES, is_there, site);
}
inline void async_commit() { fibers::machine.async_commit(); }
template <int LEFT> void async_wait(CALLED_AT) { fibers::machine.async_wait(LEFT, site); }

inline u32 cluster_size() { return fibers::machine.thread->block->kernel->cluster_size; }
inline u32 cluster_rank() { return fibers::machine.thread->block->number % cluster_size(); }
inline void cluster_arrive(CALLED_AT) { fibers::machine.cluster_arrive(site); }
inline void cluster_wait(CALLED_AT) { fibers::machine.cluster_wait(site); }
template <class T> T cluster_load(const T *at, u32 rank, CALLED_AT) {
    return load((const T *)fibers::machine.remote(at, rank, site), site);
}
template <class T> void cluster_store(T *at, u32 rank, typename Same<T>::type value, CALLED_AT) {
    store((T *)fibers::machine.remote(at, rank, site), value, site);
}

inline void mbarrier_init(u64 *at, u32 arrivals, CALLED_AT) { fibers::machine.mbarrier_init(at, arrivals, site); }
inline void mbarrier_init_fence() { fibers::machine.mbarrier_fence(); }
inline void mbarrier_expect_bytes(u64 *at, u32 bytes, CALLED_AT) { fibers::machine.mbarrier_expect(at, bytes, site); }
inline void mbarrier_arrive(u64 *at, CALLED_AT) { fibers::machine.mbarrier_arrive(at, site); }
inline void mbarrier_wait(u64 *at, u32 parity, CALLED_AT) { fibers::machine.mbarrier_wait(at, parity, site); }
inline void bulk_copy(void *shared, const void *global, u32 bytes, u64 *mbarrier, CALLED_AT) {
    fibers::machine.bulk_copy(shared, global, bytes, mbarrier, site);
}
inline void fence_async() { fibers::machine.async_fence(); }

inline u32 atomic_add_relaxed(u32 *at, u32 value, CALLED_AT) {
    return fibers::machine.atomic_add(at, value, false, false, site);
}
inline u32 atomic_add_release(u32 *at, u32 value, CALLED_AT) {
    return fibers::machine.atomic_add(at, value, true, false, site);
}
inline u32 atomic_add_acquire_release(u32 *at, u32 value, CALLED_AT) {
    return fibers::machine.atomic_add(at, value, true, true, site);
}
inline u32 atomic_load_relaxed(const u32 *at, CALLED_AT) { return fibers::machine.atomic_load(at, false, site); }
inline u32 atomic_load_acquire(const u32 *at, CALLED_AT) { return fibers::machine.atomic_load(at, true, site); }
inline void fence_gpu(CALLED_AT) { fibers::machine.fence(site); }

// run a kernel's `body` after those that were launched before it; `is_early`: before they are over, where they allow it
inline void launch(fibers::Grid grid, u32 threads, u32 cluster, u32 shared_bytes, bool is_early,
                   std::function<void()> body, u32 shared_cell = 4) {
    fibers::Kernel kernel;
    kernel.grid = grid;
    kernel.num_threads = threads;
    kernel.cluster_size = cluster;
    kernel.shared_bytes = shared_bytes;
    kernel.shared_cell = shared_cell;
    kernel.is_early = is_early;
    kernel.body = std::move(body);
    fibers::machine.launch(std::move(kernel));
}
