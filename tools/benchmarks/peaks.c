/* The most that this processor multiplies from registers: fp32, fp16, pairs of bf16, AMX's tiles of bf16, int8 dots. */
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define MOST_THREADS 64
#define TURNS 1000000

#if defined(__x86_64__)
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

#if defined(__aarch64__)
#include <arm_neon.h>
#define HELD "+w"
#elif defined(__AVX512F__)
#define HELD "+v"
#else
#define HELD "+x"
#endif
#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#if defined(__x86_64__) && !defined(__AVX512F__)
#define SUMS 12 /* that do not wait for one another, and leave registers for the factors */
#else
#define SUMS 16
#endif
typedef float floats __attribute__((vector_size(BYTES)));

/* A thread's work: SUMS += x * y, over and over; each turn is done, for the compiler knows no value. Sums are named by
 * constants alone, so that they stay in registers. */
#define EACH _Pragma("GCC unroll 16") for (int i = 0; i < SUMS; i++)
#define WORK(name, sum, factor, product)                              \
    static void *name(void *none) {                                   \
        sum sums[SUMS];                                               \
        factor x, y;                                                  \
        memset(&x, 0, sizeof x), memset(&y, 0, sizeof y);             \
        EACH sums[i] = (sum){0};                                      \
        for (int turn = 0; turn < TURNS; turn++) {                    \
            __asm__ volatile("" : HELD(x), HELD(y));                  \
            EACH sums[i] = product;                                   \
            EACH __asm__ volatile("" : HELD(sums[i]));                \
        }                                                             \
        return none;                                                  \
    }

WORK(multiply_floats, floats, floats, sums[i] + x * y)
#if defined(__AVX512FP16__)
#define HALVES 32
WORK(multiply_halves, __m512h, __m512h, _mm512_fmadd_ph(x, y, sums[i]))
#elif defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
#define HALVES 8
WORK(multiply_halves, float16x8_t, float16x8_t, vfmaq_f16(sums[i], x, y))
#endif
#if defined(__AVX512BF16__)
#define PAIRS 32
WORK(multiply_pairs, __m512, __m512bh, _mm512_dpbf16_ps(sums[i], x, y))
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PAIRS 8
WORK(multiply_pairs, float32x4_t, bfloat16x8_t, vbfdotq_f32(sums[i], x, y))
#endif
#if defined(__AVX512VNNI__)
#define DOT_BYTES 64
WORK(multiply_bytes, __m512i, __m512i, _mm512_dpbusd_epi32(sums[i], x, y))
#elif defined(__ARM_FEATURE_DOTPROD)
#define DOT_BYTES 16
WORK(multiply_bytes, int32x4_t, int8x16_t, vdotq_s32(sums[i], x, y))
#endif

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

double float_peak(int threads) { return measured(multiply_floats, threads, 2.0 * TURNS * SUMS * (BYTES / 4)); }

/* 0 where the processor has no such instruction. */
#define PEAK(name, work, products) \
    double name(int threads) { return measured(work, threads, 2.0 * TURNS * SUMS * (products)); }
#define NO_PEAK(name) \
    double name(int threads) { return 0.0 * threads; }
#if defined(HALVES)
PEAK(half_peak, multiply_halves, HALVES)
#else
NO_PEAK(half_peak)
#endif
#if defined(PAIRS)
PEAK(pair_peak, multiply_pairs, PAIRS)
#else
NO_PEAK(pair_peak)
#endif
#if defined(DOT_BYTES)
PEAK(byte_peak, multiply_bytes, DOT_BYTES)
#else
NO_PEAK(byte_peak)
#endif

double tile_peak(int threads) {
#ifdef WITH_TILES
    if (syscall(SYS_arch_prctl, 0x1023, 18) == 0) /* the system lends tiles to those who ask */
        return measured(multiply_tiles, threads, 2.0 * TURNS * 4 * 16 * 16 * 32);
#endif
    return (void)multiply_tiles, (void)threads, 0.0;
}
