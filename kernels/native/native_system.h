/* The kernels' interface to the operating system: Linux, and macOS (never run). The Python counterpart is system.py.
 */
#pragma once

#include <stdint.h>

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>

/* 1 + the core that this thread is on; 0: unknown. */
static inline int64_t current_core(void) {
    extern int sched_getcpu(void); /* which headers declare for some programs alone */
    return 1 + sched_getcpu();
}
#else
static inline int64_t current_core(void) { return 0; }
#endif

#if defined(__linux__) && defined(__x86_64__)
#define ASK_FOR_STATE 0x1023 /* ARCH_REQ_XCOMP_PERM */
#define TILE_STATE 18        /* XFEATURE_XTILEDATA */

/* Whether the system lets this process use matrix tiles. */
static inline int tiles_are_granted(void) { return syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_STATE) == 0; }
#else
static inline int tiles_are_granted(void) { return 0; }
#endif
