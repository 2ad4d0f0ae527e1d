/* Kernels and pool without Python, for the sanitizers: several threads run kernels at the same time, each with its own
 * number of threads and its own memory, and compare every result with one computed alone. Built by tools/sanitize_kernels
 * behind the unit, which is included here as UNIT.
 */
#include UNIT

#include <assert.h>
#include <sys/wait.h>
#include <unistd.h>

#define CALLERS 4
#define DIM 64
#define HEADS 4
#define BATCH 6
#define HIDDEN 256
#define VOCAB 3000
#define PAGES 9
#define PAGE 4
#define EXPERTS 5
#define SLOTS 2
#define WIDTH 32 /* of an expert */

struct memory {
    float x[BATCH * HIDDEN], weight[HIDDEN * HIDDEN], out[BATCH * HIDDEN], cache[2][PAGES * PAGE * HEADS * DIM];
    float gate_up[EXPERTS * 2 * WIDTH * HIDDEN], down[EXPERTS * HIDDEN * WIDTH], inner[BATCH * SLOTS * WIDTH];
    float parts[BATCH * SLOTS * HIDDEN], expert_weights[BATCH * SLOTS];
    int32_t ids[BATCH * SLOTS], order[BATCH * SLOTS], offsets[EXPERTS + 1];
    float q[BATCH * HEADS * DIM], attended[BATCH * HEADS * DIM], logits[BATCH * VOCAB], numbers[5][BATCH];
    int32_t table[BATCH * (PAGES - 1)], lens[BATCH], live, flags[BATCH], top_k[BATCH], positions[BATCH], none[BATCH];
    int64_t seed[BATCH], sampled[BATCH], bias_ids;
};

static struct memory given;

#define PLACE(field, at, ...) \
    a.field.data = at, memcpy(a.field.size, (int64_t[4]){__VA_ARGS__}, sizeof a.field.size)

static void run_norm(struct memory *m, int threads) {
    rms_norm_args a = {.eps = 1e-5};
    PLACE(out, m->out, BATCH, HIDDEN), PLACE(x, m->x, BATCH, HIDDEN), PLACE(weight, m->weight, HIDDEN);
    a.x.stride[0] = HIDDEN;
    rms_norm_f32(&a, threads);
}

static void run_linear(struct memory *m, int threads) {
    native_linear_args a = {0};
    PLACE(out, m->out, BATCH, HIDDEN), PLACE(x, m->x, BATCH, HIDDEN);
    PLACE(panels, m->weight, HIDDEN / PANEL, HIDDEN, PANEL, 1);
    a.x.stride[0] = HIDDEN;
    native_linear_f32(&a, threads);
}

static void run_attention(struct memory *m, int threads) {
    decode_attention_args a = {.q_len = 1, .sm_scale = 0.125, .v_scale = 1.0, .window_left = -1};
    PLACE(out, m->attended, BATCH, HEADS, DIM), PLACE(q, m->q, BATCH, HEADS, DIM), PLACE(kv_lens, m->lens, BATCH);
    PLACE(k_cache, m->cache[0], PAGES, PAGE, HEADS, DIM), PLACE(v_cache, m->cache[1], PAGES, PAGE, HEADS, DIM);
    PLACE(table, m->table, BATCH, PAGES - 1);
    decode_attention_f32(&a, threads);
}

static void run_sample(struct memory *m, int threads) {
    sample_args a = {0};
    PLACE(sampled, m->sampled, BATCH), PLACE(logits, m->logits, BATCH, VOCAB), PLACE(positions, m->positions, BATCH);
    PLACE(live_rows, &m->live, 1), PLACE(sampling_flags, m->flags, BATCH), PLACE(temperature, m->numbers[0], BATCH);
    PLACE(top_k, m->top_k, BATCH), PLACE(top_p, m->numbers[1], BATCH), PLACE(min_p, m->numbers[2], BATCH);
    PLACE(seed, m->seed, BATCH);
    a.logits.stride[0] = VOCAB;
    sample_f32(&a, threads);
}

static void run_experts(struct memory *m, int threads) {
    {
        moe_route_args a = {.renormalise = 1};
        PLACE(ids, m->ids, BATCH, SLOTS), PLACE(weights, m->expert_weights, BATCH, SLOTS), PLACE(live, &m->live, 1);
        PLACE(order, m->order, BATCH * SLOTS), PLACE(offsets, m->offsets, EXPERTS + 1), PLACE(logits, m->x, BATCH, EXPERTS);
        a.logits.stride[0] = HIDDEN;
        moe_route_f32(&a, threads);
    }
    {
        expert_linear_args a = {.slots = SLOTS, .gate = GATE_SILU};
        PLACE(out, m->inner, BATCH * SLOTS, WIDTH), PLACE(x, m->x, BATCH, HIDDEN), PLACE(order, m->order, BATCH * SLOTS);
        PLACE(weight, m->gate_up, EXPERTS * 2, HIDDEN, PANEL, 1), PLACE(offsets, m->offsets, EXPERTS + 1);
        a.x.stride[0] = HIDDEN;
        expert_linear_f32(&a, threads);
    }
    {
        expert_linear_args a = {.slots = 1, .gate = GATE_NONE};
        PLACE(out, m->parts, BATCH * SLOTS, HIDDEN), PLACE(x, m->inner, BATCH * SLOTS, WIDTH);
        PLACE(weight, m->down, EXPERTS * HIDDEN / PANEL, WIDTH, PANEL, 1), PLACE(offsets, m->offsets, EXPERTS + 1);
        PLACE(order, m->order, BATCH * SLOTS), a.x.stride[0] = WIDTH;
        expert_linear_f32(&a, threads);
    }
    moe_combine_args a = {0};
    PLACE(out, m->x, BATCH, HIDDEN), PLACE(parts, m->parts, BATCH * SLOTS, HIDDEN), PLACE(ids, m->ids, BATCH, SLOTS);
    PLACE(weights, m->expert_weights, BATCH, SLOTS);
    moe_combine_f32(&a, threads);
}

static void run_everything(struct memory *m, int threads) {
    run_norm(m, threads);
    memcpy(m->x, m->out, sizeof m->x);
    run_linear(m, threads);
    run_experts(m, threads);
    run_attention(m, threads);
    run_sample(m, threads);
}

static void fill(struct memory *m) {
    uint32_t state = 7;
    float *parts[] = {m->x, m->weight, m->cache[0], m->cache[1], m->q, m->logits, m->gate_up, m->down};
    size_t sizes[] = {BATCH * HIDDEN, HIDDEN * HIDDEN, PAGES * PAGE * HEADS * DIM, PAGES * PAGE * HEADS * DIM,
                      BATCH * HEADS * DIM, BATCH * VOCAB, EXPERTS * 2 * WIDTH * HIDDEN, EXPERTS * HIDDEN * WIDTH};
    for (int part = 0; part < 8; part++)
        for (size_t i = 0; i < sizes[part]; i++) {
            state = state * 1664525 + 1013904223;
            parts[part][i] = (float)(state >> 8) / (1 << 23) - 1.0f;
        }
    m->live = BATCH;
    for (int row = 0; row < BATCH; row++) {
        m->lens[row] = 5 * row, m->flags[row] = row % 2 ? FLAG_SAMPLE : 0, m->top_k[row] = 40, m->seed[row] = row;
        m->numbers[0][row] = 0.8f, m->numbers[1][row] = 0.9f, m->numbers[2][row] = 0.01f;
        for (int page = 0; page < PAGES - 1; page++) /* some of them cannot be */
            m->table[row * (PAGES - 1) + page] = row == 3 ? 1 << 30 : row == 4 ? -page : page;
    }
}

static int64_t times;

static void *call(void *place) {
    struct memory *mine = malloc(sizeof *mine), *alone = malloc(sizeof *alone);
    memcpy(alone, &given, sizeof given);
    run_everything(alone, 1);
    for (int64_t n = 0; n < times; n++) {
        memcpy(mine, &given, sizeof given);
        run_everything(mine, 1 + (int)((n + (intptr_t)place) % 7));
        if (memcmp(mine, alone, sizeof *mine) != 0) {
            fprintf(stderr, "caller %d got another result at round %d\n", (int)(intptr_t)place, (int)n);
            abort();
        }
    }
    free(mine), free(alone);
    return 0;
}

int main(int count, char **arguments) {
    times = count > 1 ? atoi(arguments[1]) : 50;
    fill(&given);
    pthread_t callers[CALLERS];
    for (intptr_t n = 0; n < CALLERS; n++) pthread_create(callers + n, 0, call, (void *)n);
    for (int n = 0; count > 2 && n < 20; n++) { /* children of a process whose other threads are at work */
        pid_t child = fork();
        if (child == 0) {
            times = 3;
            call((void *)(intptr_t)3);
            _exit(0);
        }
        int status;
        waitpid(child, &status, 0);
        if (status != 0) abort();
    }
    for (int n = 0; n < CALLERS; n++) pthread_join(callers[n], 0);
    printf("%d callers, %d rounds each%s: as if alone\n", CALLERS, (int)times, count > 2 ? ", 20 forks" : "");
    return 0;
}
