/* The threads that share a kernel's work.
 *
 * Each thread has a share of adjacent items, cut into ever smaller chunks. It does those of its share in order, so that
 * what a kernel prefetches is what it needs next, and then those that others have left: slow cores do less, all end at
 * about the same time, and a descheduled thread is waited for only while it holds a chunk. OpenMP's barrier for all threads
 * costs milliseconds per kernel as soon as another process uses a core. Results do not depend on which thread computes a
 * chunk.
 */
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#define MOST_THREADS 256
#define SLEEP_SPINS 4000 /* pauses, some 0.1 ms, before a thread without work sleeps */
#define YIELD_SPINS 1000 /* pauses before a waiting caller yields its core */
#define SHARE_BITS 4 /* a chunk, but for the last, is at least this power of 1/2 of a thread's share */
#define MOST_CHUNKS (SHARE_BITS + 4) /* of a share */
#define CHUNK_BITS 12 /* of the ticket */
_Static_assert(MOST_THREADS * MOST_CHUNKS < 1 << CHUNK_BITS, "all chunks are counted in the ticket");

typedef void (*body)(const void *job, int64_t begin, int64_t end);

/* Each thread's workspaces; see scratch() and lasting(). */
struct workspace {
    void *at;
    size_t size;
};
static _Thread_local struct workspace thread_memory[2];
static pthread_key_t memory_keys[2]; /* free them when the thread ends */

__attribute__((constructor)) static void make_keys(void) {
    for (int i = 0; i < 2; i++) pthread_key_create(&memory_keys[i], free);
}

static inline void pause_core(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Of a process's libraries, the base's of float32 owns the shared state; the others get pointers to it. */
#define SHARED(function) void share_##function(void *address) { function = address; }

#ifdef SHARED_ELSEWHERE
static void (*parallel)(int64_t threads, body run, const void *job, int64_t items, int64_t least);
SHARED(parallel)
#else
static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    atomic_flag busy;         /* one job at a time */
    _Atomic uint64_t ticket;  /* number of the job, its chunks, the next of them: CHUNK_BITS each of the last two */
    _Atomic int64_t finished; /* finished chunks */
    _Atomic int64_t sleeping;
    _Atomic int64_t threads; /* threads of the job, including the caller */
    int64_t started;
    body run;
    const void *job;
    int64_t items, chunks;           /* chunks of a share */
    int64_t begins[MOST_CHUNKS + 1]; /* of these; a share may have one item less */
    _Atomic uint8_t taken[MOST_THREADS][MOST_CHUNKS];
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .busy = ATOMIC_FLAG_INIT};

static inline uint64_t job_of(uint64_t ticket) { return ticket >> 2 * CHUNK_BITS; }

/* Run a chunk that nobody has taken, of which there is one: the next of a thread's own share, or of another. */
static void run_chunk(int64_t thread) {
    int64_t threads = atomic_load(&pool.threads), share = thread, chunk = 0;
    while (atomic_load(&pool.taken[share][chunk]) || atomic_exchange(&pool.taken[share][chunk], 1))
        if (++chunk == pool.chunks) chunk = 0, share = (share + 1) % threads;
    int64_t first = share * pool.items / threads, count = (share + 1) * pool.items / threads - first;
    int64_t begin = pool.begins[chunk], end = pool.begins[chunk + 1];
    if (begin < count) pool.run(pool.job, first + begin, first + (end < count ? end : count));
}

/* Run chunks of a job until none is left. The ticket alone says whether a chunk may be taken; the job's other fields are
 * valid until all taken chunks are finished. */
static void share_work(uint64_t number, int64_t thread) {
    const uint64_t mask = ((uint64_t)1 << CHUNK_BITS) - 1;
    for (;;) {
        uint64_t ticket = atomic_load(&pool.ticket);
        uint64_t next = ticket & mask, chunks = ticket >> CHUNK_BITS & mask;
        if (job_of(ticket) != number || next >= chunks) return;
        if (!atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket + 1)) continue;
        run_chunk(thread);
        atomic_fetch_add(&pool.finished, 1);
    }
}

static void *serve(void *arg) {
    uint64_t last_job = 0;
    int64_t spins = 0;
    for (;;) {
        uint64_t number = job_of(atomic_load(&pool.ticket));
        if (number == last_job && spins++ < SLEEP_SPINS) {
            pause_core();
        } else if (number == last_job) {
            pthread_mutex_lock(&pool.lock);
            atomic_fetch_add(&pool.sleeping, 1);
            while (job_of(atomic_load(&pool.ticket)) == last_job) pthread_cond_wait(&pool.wake, &pool.lock);
            atomic_fetch_sub(&pool.sleeping, 1);
            pthread_mutex_unlock(&pool.lock);
        } else {
            last_job = number;
            spins = 0;
            if ((int64_t)(intptr_t)arg < atomic_load(&pool.threads)) share_work(number, (int64_t)(intptr_t)arg);
        }
    }
    return 0;
}

/* Start missing threads; they block all signals. */
static void start_threads(int64_t threads) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; pool.started < threads - 1; pool.started++) {
        pthread_t thread;
        if (pthread_create(&thread, 0, serve, (void *)(intptr_t)(pool.started + 1)) != 0) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

/* Cut the job's shares into chunks of half of what is left, at least `least` items but for the last, and return how many
 * there are. */
static int64_t cut_chunks(int64_t threads, int64_t least) {
    int64_t share = (pool.items + threads - 1) / threads, smallest = share >> SHARE_BITS, begin = 0;
    if (smallest < least) smallest = least;
    for (pool.chunks = 0; begin < share; pool.chunks++) {
        pool.begins[pool.chunks] = begin;
        begin += (share - begin) / 2 > smallest ? (share - begin) / 2 : smallest;
        for (int64_t thread = 0; thread < threads; thread++) atomic_init(&pool.taken[thread][pool.chunks], 0);
    }
    pool.begins[pool.chunks] = share;
    return threads * pool.chunks;
}

/* Run `run(job, begin, end)` over 0..items, and wait for all; `least` items are worth a thread. While another thread's job
 * is shared, this thread runs its own without help. */
void parallel(int64_t threads, body run, const void *job, int64_t items, int64_t least) {
    if (threads < 2 || items <= least || atomic_flag_test_and_set(&pool.busy)) {
        run(job, 0, items);
        return;
    }
    if (threads > (items + least - 1) / least) threads = (items + least - 1) / least;
    if (pool.started < threads - 1) start_threads(threads);
    uint64_t number = job_of(atomic_load(&pool.ticket)) + 1;
    atomic_store(&pool.threads, threads);
    pool.run = run, pool.job = job, pool.items = items;
    int64_t chunks = cut_chunks(threads, least);
    atomic_store(&pool.finished, 0);
    atomic_store(&pool.ticket, (number << CHUNK_BITS | (uint64_t)chunks) << CHUNK_BITS);
    if (atomic_load(&pool.sleeping) > 0) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    number = job_of(atomic_load(&pool.ticket)); /* it may have wrapped to 0 */
    share_work(number, 0);
    for (int64_t spins = 1; atomic_load(&pool.finished) < chunks; spins++) {
        pause_core();
        if (spins % YIELD_SPINS == 0) sched_yield();
    }
    atomic_flag_clear(&pool.busy);
}

static void after_fork(void) { /* the child has none of the threads, and locks and a job in any state */
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.wake, 0);
    atomic_flag_clear(&pool.busy);
    atomic_store(&pool.sleeping, 0);
    atomic_store(&pool.ticket, 0);
    pool.started = 0;
}

__attribute__((constructor)) static void survive_forks(void) { pthread_atfork(0, 0, after_fork); }
#endif
