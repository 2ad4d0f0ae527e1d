// Small kernels that use each name of memory.cuh rightly; the tests leave out what orders them, one call at a time.
#include "memory.cuh"

constexpr u32 THREADS = 64;

// sums of a block by shared memory, shuffles and a barrier
KERNEL(64, 1) sum_of_block(float *out, const float *x) {
    u8 *base = shared_memory();
    float *sums = (float *)base;
    float value = load(x + block_index() * THREADS + thread_index());
    for (u32 lanes = 16; lanes; lanes /= 2) value += warp_shuffle_xor(value, lanes);
    if (thread_index() % 32 == 0) shared_store(sums + thread_index() / 32, value);
    block_barrier();
    if (thread_index() == 0) store(out + block_index(), shared_load(sums) + shared_load(sums + 1));
}

// a product of matrices of a warp: `a` [16, 16] in halves, `b` [16, 8] by columns, behind it
template <bool IS_BFLOAT> DEVICE void product_of_warp(float *out, const u16 *a) {
    const u16 *b = a + 256;
    u32 group = thread_index() / 4, pair = thread_index() % 4 * 2;
    auto two = [](const u16 *at) { return load((const u32 *)at); };
    const u16 *low = a + group * 16 + pair, *high = low + 128, *column = b + group * 16 + pair;
    const u32 of_a[4] = {two(low), two(high), two(low + 8), two(high + 8)}, of_b[2] = {two(column), two(column + 8)};
    float sums[4] = {1, 1, 1, 1};
    warp_multiply<IS_BFLOAT>(sums, of_a, of_b);
    for (u32 i = 0; i < 4; i++) store(out + (group + i / 2 * 8) * 8 + pair + i % 2, sums[i]);
}
KERNEL(32, 1) product_of_bfloats(float *out, const u16 *a) { product_of_warp<true>(out, a); }
KERNEL(32, 1) product_of_halves(float *out, const u16 *a) { product_of_warp<false>(out, a); }

// one value passed on through shared memory within a warp, and another among the threads of a named barrier
KERNEL(64, 1) pass_on(float *out, const float *x) {
    u8 *base = shared_memory();
    float *values = (float *)base;
    u32 thread = thread_index();
    shared_store(values + thread, load(x + thread));
    warp_sync();
    float next = shared_load(values + (thread & ~31u) + (thread + 1) % 32);
    if (thread < 32) shared_store(values + THREADS + thread, next);
    named_barrier(1, THREADS);
    store(out + thread, shared_load(values + THREADS + thread % 32));
}

// a grid's sum: each block stores a part, the one that arrives last adds them
KERNEL(32, 1) sum_of_grid(float *out, float *parts, u32 *count, const float *x) {
    if (thread_index() == 0) {
        store(parts + block_index(), load(x + block_index()));
        if (atomic_add_acquire_release(count, 1) == block_count() - 1) {
            float sum = 0;
            for (u32 i = 0; i < block_count(); i++) sum += load(parts + i);
            store(out, sum);
            store(count, 0);
        }
    }
}

// two passes over a grid, with a hop between them; `fenced`: by fences and relaxed atomics
DEVICE void two_passes(float *out, float *parts, u32 *count, const float *x, bool fenced) {
    u32 own = block_index() * 32 + thread_index(), all = block_count() * 32;
    store(parts + own, 2 * load(x + own));
    block_barrier();
    if (thread_index() == 0 && fenced) {
        fence_gpu();
        atomic_add_relaxed(count, 1);
        while (atomic_load_relaxed(count) < block_count()) {}
        fence_gpu();
    } else if (thread_index() == 0) {
        atomic_add_release(count, 1);
        while (atomic_load_acquire(count) < block_count()) {}
    }
    block_barrier();
    store(out + own, load(parts + (own + 32) % all));
}
KERNEL(32, 1) hop(float *out, float *parts, u32 *count, const float *x) { two_passes(out, parts, count, x, false); }
KERNEL(32, 1) fenced_hop(float *out, float *parts, u32 *count, const float *x) {
    two_passes(out, parts, count, x, true);
}

// sums of a cluster through distributed shared memory
KERNEL(32, 1) sum_of_cluster(float *out, const float *x) {
    u8 *base = shared_memory();
    float *own = (float *)base;
    shared_store(own + thread_index(), load(x + block_index() * 32 + thread_index()));
    cluster_arrive();
    cluster_wait();
    float sum = 0;
    for (u32 rank = 0; rank < cluster_size(); rank++) sum += cluster_load(own + thread_index(), rank);
    cluster_arrive();
    cluster_wait();
    store(out + block_index() * 32 + thread_index(), sum);
}

// each block gives its values to the next one of its cluster
KERNEL(32, 1) shift_in_cluster(float *out, const float *x) {
    u8 *base = shared_memory();
    float *own = (float *)base;
    cluster_arrive();
    cluster_wait();
    u32 next = (cluster_rank() + 1) % cluster_size();
    cluster_store(own + thread_index(), next, load(x + block_index() * 32 + thread_index()));
    cluster_arrive();
    cluster_wait();
    store(out + block_index() * 32 + thread_index(), shared_load(own + thread_index()));
}

// a ring of two stages: a thread copies ahead, a warp adds up
KERNEL(64, 1) sum_of_ring(float *out, const float *x, u32 stages_of_input) {
    u8 *base = shared_memory();
    constexpr u32 STAGES = 2, VALUES = 32;
    u64 *full = (u64 *)base, *empty = full + STAGES;
    float *ring = (float *)(base + 64);
    if (thread_index() == 0) {
        for (u32 i = 0; i < STAGES; i++) {
            mbarrier_init(full + i, 1);
            mbarrier_init(empty + i, 32);
        }
        mbarrier_init_fence();
    }
    block_barrier();
    if (thread_index() == 32)
        for (u32 i = 0; i < stages_of_input; i++) {
            if (i >= STAGES) mbarrier_wait(empty + i % STAGES, (i / STAGES & 1) ^ 1);
            mbarrier_expect_bytes(full + i % STAGES, VALUES * 4);
            bulk_copy(ring + i % STAGES * VALUES, x + i * VALUES, VALUES * 4, full + i % STAGES);
        }
    float sum = 0;
    if (thread_index() < 32)
        for (u32 i = 0; i < stages_of_input; i++) {
            mbarrier_wait(full + i % STAGES, i / STAGES & 1);
            sum += shared_load(ring + i % STAGES * VALUES + thread_index());
            mbarrier_arrive(empty + i % STAGES);
        }
    if (thread_index() < 32) store(out + thread_index(), sum);
}

// ordinary zeros, then a bulk copy over a part of them
KERNEL(32, 1) copy_over_zeros(float *out, const float *x, bool fenced) {
    u8 *base = shared_memory();
    float *values = (float *)(base + 64);
    shared_store(values + thread_index(), 0.0f);
    if (thread_index() == 0) {
        mbarrier_init((u64 *)base, 1);
        mbarrier_init_fence();
    }
    if (fenced) fence_async();
    block_barrier();
    if (thread_index() == 0) {
        mbarrier_expect_bytes((u64 *)base, 64);
        bulk_copy(values, x, 64, (u64 *)base);
    }
    mbarrier_wait((u64 *)base, 0);
    store(out + thread_index(), shared_load(values + thread_index()));
}

// one of a chain of early kernels: `y = x + weights`, its weights read before the wait
KERNEL(32, 1) add_weights(float *y, const float *x, const float *weights) {
    u32 own = block_index() * 32 + thread_index();
    float weight = load_constant(weights + own);
    allow_next_kernel();
    wait_for_previous_kernel();
    store(y + own, load(x + own) + weight);
}

// the same; it reads `old` before the wait, which is right where two kernels before have been waited for
KERNEL(32, 1) add_old(float *y, const float *x, const float *old, bool waits_first) {
    u32 own = block_index() * 32 + thread_index();
    float value = load(old + own);
    if (!waits_first) allow_next_kernel();
    wait_for_previous_kernel();
    if (waits_first) allow_next_kernel();
    store(y + own, load(x + own) + value);
}

// each thread copies ahead for its neighbour, in groups; past the end there are zeros
KERNEL(32, 1) sum_of_copies(float *out, const float *x, u32 stages_of_input) {
    u8 *base = shared_memory();
    constexpr u32 SLOTS = 3, VALUES = 32;
    float *ring = (float *)base, sum = 0;
    auto copy = [&](u32 i) {
        float *to = ring + i % SLOTS * VALUES + thread_index();
        if (i <= stages_of_input) async_copy<4>(to, x + i * VALUES + thread_index(), i < stages_of_input);
        async_commit();
    };
    for (u32 i = 0; i + 1 < SLOTS; i++) copy(i);
    for (u32 i = 0; i <= stages_of_input; i++) {
        async_wait<SLOTS - 2>();
        block_barrier();
        copy(i + SLOTS - 1);
        sum += shared_load(ring + i % SLOTS * VALUES + (thread_index() + 1) % VALUES);
    }
    store(out + thread_index(), sum);
}

KERNEL(32, 1) never_written(float *out) {
    u8 *base = shared_memory();
    store(out + thread_index(), shared_load((float *)base + thread_index()));
}
KERNEL(32, 1) half_of_a_barrier() {
    if (thread_index() < 16) named_barrier(1, 32);
}
KERNEL(32, 1) wait_without_end(u32 *count) {
    while (!atomic_load_acquire(count)) {}
}
KERNEL(32, 1) constant_in_place(float *x) { store(x + thread_index(), load_constant(x + thread_index()) + 1); }
KERNEL(32, 1) too_far(float *out, const float *x) { store(out + thread_index(), load(x + thread_index() + 1)); }

typedef float *F;
extern "C" void run_small(const char *name, void **t, const int64_t *n, const float *) {
    std::string is = name;
    auto once = [&](u32 blocks, u32 threads, std::function<void()> body, u32 cluster = 1) {
        launch({blocks}, threads, cluster, 1024, false, body);
    };
    if (is == "sum_of_block") once(3, 64, [=] { sum_of_block(F(t[0]), F(t[1])); });
    if (is == "bfloat16") once(1, 32, [=] { product_of_bfloats(F(t[0]), (u16 *)t[1]); });
    if (is == "float16") once(1, 32, [=] { product_of_halves(F(t[0]), (u16 *)t[1]); });
    if (is == "pass_on") once(1, 64, [=] { pass_on(F(t[0]), F(t[1])); });
    if (is == "sum_of_grid") once(4, 32, [=] { sum_of_grid(F(t[0]), F(t[1]), (u32 *)t[2], F(t[3])); });
    if (is == "hop") once(3, 32, [=] { hop(F(t[0]), F(t[1]), (u32 *)t[2], F(t[3])); });
    if (is == "fenced_hop") once(3, 32, [=] { fenced_hop(F(t[0]), F(t[1]), (u32 *)t[2], F(t[3])); });
    if (is == "sum_of_cluster") once(4, 32, [=] { sum_of_cluster(F(t[0]), F(t[1])); }, 2);
    if (is == "shift_in_cluster") once(4, 32, [=] { shift_in_cluster(F(t[0]), F(t[1])); }, 2);
    if (is == "sum_of_ring") once(1, 64, [=] { sum_of_ring(F(t[0]), F(t[1]), n[0]); });
    if (is == "sum_of_copies") once(1, 32, [=] { sum_of_copies(F(t[0]), F(t[1]), n[0]); });
    if (is == "copy_over_zeros") once(1, 32, [=] { copy_over_zeros(F(t[0]), F(t[1]), n[0]); });
    if (is == "chain")
        for (u32 i = 0; i < 3; i++)
            launch({2}, 32, 1, 0, true, [=] { add_weights(F(t[i + 1]), F(t[i]), F(t[4])); });
    if (is == "chain_with_old") {  // writes t[1], passes on, and reads t[1] again before its wait
        launch({2}, 32, 1, 0, true, [=] { add_weights(F(t[1]), F(t[0]), F(t[4])); });
        launch({2}, 32, 1, 0, true, [=] { add_old(F(t[2]), F(t[1]), F(t[4]), n[0]); });
        launch({2}, 32, 1, 0, true, [=] { add_old(F(t[3]), F(t[2]), F(t[1]), false); });
    }
    if (is == "never_written") once(1, 32, [=] { never_written(F(t[0])); });
    if (is == "half_of_a_barrier") once(1, 32, [=] { half_of_a_barrier(); });
    if (is == "wait_without_end") once(1, 32, [=] { wait_without_end((u32 *)t[0]); });
    if (is == "constant_in_place") once(1, 32, [=] { constant_in_place(F(t[0])); });
    if (is == "too_far") once(1, 32, [=] { too_far(F(t[0]), F(t[1])); });
}
