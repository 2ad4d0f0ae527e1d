/* The most that this processor's bf16 dot instructions multiply, from registers: AVX-512's pairs, and AMX's tiles. */
#include <pthread.h>
#include <stdint.h>
#include <time.h>

#define MOST_THREADS 64
#define SUMS 16 /* of pairs that do not wait for one another */
#define TURNS 1000000

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#define WITH_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void *multiply_pairs(void *none) {
#if defined(__AVX512BF16__)
    __m512 sums[SUMS];
    __m512bh x = (__m512bh)_mm512_set1_epi16(0x3f80), y = x;
    for (int i = 0; i < SUMS; i++) sums[i] = _mm512_setzero_ps();
    for (int turn = 0; turn < TURNS; turn++) {
#pragma GCC unroll 16
        for (int i = 0; i < SUMS; i++) sums[i] = _mm512_dpbf16_ps(sums[i], x, y);
        __asm__ volatile("" : "+v"(x), "+v"(y)); /* each turn is done */
    }
    volatile float kept = 0.0f;
    for (int i = 0; i < SUMS; i++) kept += _mm512_reduce_add_ps(sums[i]);
#endif
    return none;
}

static void *multiply_tiles(void *none) {
#ifdef WITH_TILES
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) shapes.rows[tile] = 16, shapes.row_bytes[tile] = 64;
    __asm__ volatile("" : : "r"(&shapes) : "memory"); /* GCC 12 takes it that eight bytes of it are read */
    _tile_loadconfig(&shapes);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int turn = 0; turn < TURNS; turn++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
#endif
    return none;
}

/* Operations a second of so many threads, a multiplication and an addition being two. */
static double measured(void *(*work)(void *), int threads, double operations) {
    pthread_t others[MOST_THREADS];
    double began = seconds_now();
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    for (int i = 1; i < threads; i++) pthread_create(&others[i], 0, work, 0);
    work(0);
    for (int i = 1; i < threads; i++) pthread_join(others[i], 0);
    return operations * threads / (seconds_now() - began);
}

/* 0 where the processor has no such instruction. */
double pair_peak(int threads) {
#if defined(__AVX512BF16__)
    return measured(multiply_pairs, threads, 2.0 * TURNS * SUMS * 32);
#else
    return (void)multiply_pairs, (void)threads, 0.0;
#endif
}

double tile_peak(int threads) {
#ifdef WITH_TILES
    if (syscall(SYS_arch_prctl, 0x1023, 18) == 0) /* the system lends tiles to those who ask */
        return measured(multiply_tiles, threads, 2.0 * TURNS * 4 * 16 * 16 * 32);
#endif
    return (void)multiply_tiles, (void)threads, 0.0;
}
