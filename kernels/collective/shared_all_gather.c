/* The columns of all ranks side by side; see shared_all_gather.py. */
#include "meeting.h"
#include "native.h"

KERNEL(shared_all_gather) {
    (void)threads;
    board_view board = board_of(a->board.data, a->board.size[0], a->rank, a->ranks);
    int64_t rows = a->out.size[0], columns = a->out.size[1], own = a->part.size[1];
    int64_t widest = (columns + board.count - 1) / board.count;
    int64_t most = board.place_bytes / (widest * (int64_t)sizeof(element));
    for (int64_t begin = 0; begin < rows && !is_over(&board); begin += most) {
        int64_t count = least_of(most, rows - begin);
        memcpy(place_at(&board, board.rank, board.meeting + 1), (const element *)a->part.data + begin * own,
               count * own * sizeof(element));
        if (!meet(&board, 2 * count * columns + 1)) return;
        for (int64_t rank = 0; rank < board.count; rank++) {
            const element *place = (const element *)place_at(&board, rank, board.meeting);
            int64_t first = columns * rank / board.count, width = columns * (rank + 1) / board.count - first;
            for (int64_t row = 0; row < count; row++)
                memcpy((element *)a->out.data + (begin + row) * columns + first, place + row * width,
                       width * sizeof(element));
        }
    }
}
