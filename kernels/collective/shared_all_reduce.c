/* The sum over all ranks; see shared_all_reduce.py. Each rank adds up all ranks' numbers in the order of the ranks. */
#include "meeting.h"
#include "native.h"

typedef struct {
    const board_view *board;
    element *x;
} NAME(reduce_job);

static void NAME(reduce_run)(const void *job, int64_t begin, int64_t end) {
    const NAME(reduce_job) *j = job;
    const board_view *board = j->board;
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) {
        vec sum = load((const element *)place_at(board, 0, board->meeting) + i);
        for (int64_t rank = 1; rank < board->count; rank++)
            sum += load((const element *)place_at(board, rank, board->meeting) + i);
        store(j->x + i, sum);
    }
    for (; i < end; i++) {
        float sum = widen(((const element *)place_at(board, 0, board->meeting))[i]);
        for (int64_t rank = 1; rank < board->count; rank++)
            sum += widen(((const element *)place_at(board, rank, board->meeting))[i]);
        j->x[i] = narrow(sum);
    }
}

KERNEL(shared_all_reduce) {
    board_view board = board_of(a->board.data, a->board.size[0], a->rank, a->ranks);
    int64_t total = a->x.size[0] * a->x.size[1], most = board.place_bytes / (int64_t)sizeof(element);
    for (int64_t begin = 0; begin < total && !is_over(&board); begin += most) {
        int64_t count = least_of(most, total - begin);
        element *x = (element *)a->x.data + begin;
        memcpy(place_at(&board, board.rank, board.meeting + 1), x, count * sizeof(element));
        if (!meet(&board, 2 * count)) return;
        NAME(reduce_job) job = {&board, x};
        parallel(threads, NAME(reduce_run), &job, count, PARALLEL_WORK);
    }
}
