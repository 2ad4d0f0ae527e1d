/* Barriers and collectives of ranks on one machine, over a board of shared memory; see shared_collectives.py.
 *
 * A waiting rank spins, then yields its core at every check, then sleeps between checks: there may be more ranks than cores.
 * If the awaited rank last ran on the same core, which the scheduler does now and then, it yields at once: spinning first
 * would cost a fifth of a millisecond a barrier. It gives up if the board says that a rank is gone, or if a rank is later
 * than the limit; the output is left unchanged then, every later barrier ends at once, and the host, which checks the board
 * after each step, reports who was late. Time in which this process itself did not run does not count.
 */
#include "native.h"
#include "native_system.h"

#include <time.h>

#define BARRIER_SPINS 4000
#define BARRIER_YIELDS 20000
#define BARRIER_SPINS_ON_CORE 16 /* before it yields a core that both ranks are on */
#define BARRIER_LONGEST_LOOK_NS 50000000 /* between two checks: this process did not run in the rest */

typedef struct {
    _Atomic int64_t *words;
    char *data;
    int64_t rank, count, area_bytes;
    int64_t barrier; /* number of the last barrier that this rank joined */
} board_view;

static inline board_view board_of(int64_t *words, int64_t size, int64_t rank, int64_t count) {
    int64_t area_bytes = (size - BOARD_HEADER) / (2 * count) / BOARD_LINE * BOARD_LINE * 8;
    _Atomic int64_t *board = (_Atomic int64_t *)words;
    int64_t barrier = atomic_load(&board[BOARD_LINE * (1 + rank) + BOARD_ARRIVED]);
    return (board_view){board, (char *)(words + BOARD_HEADER), rank, count, area_bytes, barrier};
}

static inline char *area_at(const board_view *board, int64_t rank, int64_t barrier) {
    return board->data + (barrier % 2 * board->count + rank) * board->area_bytes;
}

static inline int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Report a late rank, unless one was reported before. */
static inline void report_late(const board_view *board, int64_t rank) {
    int64_t none = 0;
    atomic_compare_exchange_strong(&board->words[BOARD_LATE], &none, rank + 1);
}

/* Wait until a rank has joined a barrier; return whether it has. */
static int await_rank(const board_view *board, int64_t rank, int64_t barrier) {
    _Atomic int64_t *arrived = &board->words[BOARD_LINE * (1 + rank) + BOARD_ARRIVED];
    _Atomic int64_t *core = &board->words[BOARD_LINE * (1 + rank) + BOARD_CORE];
    int64_t waited = 0, last = 0;
    for (int64_t looks = 0; atomic_load_explicit(arrived, memory_order_acquire) < barrier; looks++) {
        if (atomic_load_explicit(&board->words[BOARD_LATE], memory_order_relaxed)) return 0;
        if (looks < BARRIER_SPINS) {
            pause_core();
            if (looks % BARRIER_SPINS_ON_CORE == BARRIER_SPINS_ON_CORE - 1) {
                int64_t core_here = current_core();
                if (core_here && core_here == atomic_load_explicit(core, memory_order_relaxed)) sched_yield();
            }
            continue;
        }
        if (looks < BARRIER_YIELDS) sched_yield();
        else nanosleep(&(struct timespec){0, 50000}, 0);
        int64_t now = now_ns();
        int64_t look = last ? now - last : 0;
        waited += look < BARRIER_LONGEST_LOOK_NS ? look : BARRIER_LONGEST_LOOK_NS;
        last = now;
        if (waited > board->words[BOARD_LIMIT_MS] * 1000000) {
            report_late(board, rank);
            return 0;
        }
    }
    return 1;
}

/* Join the next barrier, with this rank's data written, and wait for all others; return whether they came with the same
 * `operation`, which says what is computed, and how much. */
static int rendezvous(board_view *board, int64_t operation) {
    _Atomic int64_t *board_line = &board->words[BOARD_LINE * (1 + board->rank)];
    int64_t barrier = ++board->barrier;
    /* the board of the barrier before is not written before all have read it, so that neither is this word */
    atomic_store_explicit(&board_line[BOARD_OPERATION + barrier % 2], operation, memory_order_relaxed);
    atomic_store_explicit(&board_line[BOARD_CORE], current_core(), memory_order_relaxed);
    atomic_store_explicit(&board_line[BOARD_ARRIVED], barrier, memory_order_release);
    for (int64_t rank = 0; rank < board->count; rank++) {
        if (rank == board->rank) continue;
        if (!await_rank(board, rank, barrier)) return 0;
        _Atomic int64_t *line = &board->words[BOARD_LINE * (1 + rank)];
        if (atomic_load_explicit(&line[BOARD_OPERATION + barrier % 2], memory_order_relaxed) != operation) {
            report_late(board, BOARD_MOST_RANKS + rank);
            return 0;
        }
    }
    return 1;
}

static inline int is_over(const board_view *board) { return board->words[BOARD_LATE] != 0; }

typedef struct {
    const board_view *board;
    element *x;
} reduce_job;

static void reduce_run(const void *job, int64_t begin, int64_t end) {
    const reduce_job *j = job;
    const board_view *board = j->board;
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) {
        vec sum = load((const element *)area_at(board, 0, board->barrier) + i);
        for (int64_t rank = 1; rank < board->count; rank++)
            sum += load((const element *)area_at(board, rank, board->barrier) + i);
        store(j->x + i, sum);
    }
    for (; i < end; i++) {
        float sum = widen(((const element *)area_at(board, 0, board->barrier))[i]);
        for (int64_t rank = 1; rank < board->count; rank++)
            sum += widen(((const element *)area_at(board, rank, board->barrier))[i]);
        j->x[i] = narrow(sum);
    }
}

KERNEL(shared_all_reduce) {
    board_view board = board_of(a->board.data, a->board.size[0], a->rank, a->ranks);
    int64_t total = a->x.size[0] * a->x.size[1], most = board.area_bytes / (int64_t)sizeof(element);
    for (int64_t begin = 0; begin < total && !is_over(&board); begin += most) {
        int64_t count = least_of(most, total - begin);
        element *x = (element *)a->x.data + begin;
        memcpy(area_at(&board, board.rank, board.barrier + 1), x, count * sizeof(element));
        if (!rendezvous(&board, 2 * count)) return;
        reduce_job job = {&board, x};
        parallel(threads, reduce_run, &job, count, PARALLEL_WORK);
    }
}

KERNEL(shared_all_gather) {
    (void)threads;
    board_view board = board_of(a->board.data, a->board.size[0], a->rank, a->ranks);
    int64_t rows = a->out.size[0], columns = a->out.size[1], part_columns = a->part.size[1];
    int64_t widest = (columns + board.count - 1) / board.count;
    int64_t most = board.area_bytes / (widest * (int64_t)sizeof(element));
    for (int64_t begin = 0; begin < rows && !is_over(&board); begin += most) {
        int64_t count = least_of(most, rows - begin);
        memcpy(area_at(&board, board.rank, board.barrier + 1), (const element *)a->part.data + begin * part_columns,
               count * part_columns * sizeof(element));
        if (!rendezvous(&board, 2 * count * columns + 1)) return;
        for (int64_t rank = 0; rank < board.count; rank++) {
            const element *area = (const element *)area_at(&board, rank, board.barrier);
            int64_t first = columns * rank / board.count, width = columns * (rank + 1) / board.count - first;
            for (int64_t row = 0; row < count; row++)
                memcpy((element *)a->out.data + (begin + row) * columns + first, area + row * width,
                       width * sizeof(element));
        }
    }
}
