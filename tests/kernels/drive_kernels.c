/* Kernels and pool without Python, for the sanitizers: several threads run all kernels at the same time, in all types,
 * each with its own number of threads and its own memory, and compare every result with one computed alone. Lengths,
 * pages, ids and counts are partly such as cannot be. tools/sanitize_kernels builds this file once for each element type,
 * with its source as SOURCE: float32's is the program, which loads the libraries of the others from FOLDER, as Python does.
 */
#ifndef DRIVES
#define SHARED_ELSEWHERE
#endif
#include "native.h"
#undef PARALLEL_WORK
#define PARALLEL_WORK 16 /* so that these small jobs are shared, too */
#include SOURCE

#ifdef DRIVES
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#define CALLERS 6
#define DIM 64
#define HEADS 4
#define KV_HEADS 2
#define BATCH 6
#define HIDDEN 256
#define VOCAB 2011 /* no whole number of vectors */
#define PAGES 9
#define PAGE 4
#define ROW_PAGES (PAGES - 1)
#define EXPERTS 5
#define SLOTS 2
#define WIDTH 32 /* of an expert */
#define TOPS 5
#define BIASES 4
#define STOPS 3
#define WORDS 2
#define RING_STEPS 4
#define EXTENDED 5 /* rows of an extension, of which two cannot be */
#define TOKENS 8   /* in the embedding */

struct memory {
    /* in the kernels' element type, which for those of two bytes leaves the second half of each unused */
    float x[BATCH * HIDDEN], residual[BATCH * HIDDEN], weight[HIDDEN * HIDDEN], out[BATCH * HIDDEN], embedded[BATCH * HIDDEN];
    float cache[2][PAGES * PAGE * KV_HEADS * DIM], q[BATCH * HEADS * DIM], attended[BATCH * HEADS * DIM];
    float qkv[BATCH * (HEADS + 2 * KV_HEADS) * DIM], logits[BATCH * VOCAB], gated[BATCH * WIDTH], bias[EXPERTS * 2 * WIDTH];
    float gate_up[EXPERTS * 2 * WIDTH * HIDDEN], down[EXPERTS * HIDDEN * WIDTH], inner[BATCH * SLOTS * WIDTH];
    float parts[BATCH * SLOTS * HIDDEN], scales[HIDDEN];
    enum kind { F32, BF16, F16 } kind;
    int64_t code; /* of tensors that may be floats beside elements */
    /* in floats */
    float gains[HIDDEN], cos_sin[ROW_PAGES * PAGE * DIM], sinks[HEADS], expert_weights[BATCH * SLOTS], numbers[6][BATCH];
    float bias_values[BATCH * BIASES], sampled_logprob[BATCH], top_logprobs[BATCH * TOPS];
    float ring_logprob[RING_STEPS * BATCH], ring_top_logprobs[RING_STEPS * BATCH * TOPS];
    int32_t ids[BATCH * SLOTS], order[BATCH * SLOTS], offsets[EXPERTS + 1], running, ring_rank[RING_STEPS * BATCH];
    int32_t table[BATCH * ROW_PAGES], lens[BATCH], kv_lens[BATCH], live, flags[BATCH], top_k[BATCH], positions[BATCH];
    int32_t rows[BATCH], cu_q[EXTENDED + 1], cu_kv[EXTENDED + 1], bias_ids[BATCH * BIASES], stop_ids[BATCH * STOPS];
    int32_t min_position[BATCH], last_position[BATCH], num_logprobs[BATCH], token_mask[BATCH * ((VOCAB + 31) / 32)];
    int32_t bad_words[BATCH * WORDS * BAD_WORD_LENGTH], recent_tokens[BATCH * BAD_WORD_LENGTH], plan[BATCH];
    int32_t token_counts[BATCH * VOCAB], sampled_rank[BATCH], top_ids[BATCH * TOPS], finished[BATCH];
    int32_t ring_top_ids[RING_STEPS * BATCH * TOPS];
    int64_t seed[BATCH], sampled[BATCH], tokens[BATCH], step_index, ring_tokens[RING_STEPS * BATCH];
};

#define KINDS 3
static struct memory given[KINDS];
static void *libraries[KINDS]; /* but float32's */

static void *found_in(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (!found) fprintf(stderr, "%s\n", dlerror()), abort();
    return found;
}

static void load_libraries(void) {
    const char *paths[KINDS] = {0, FOLDER "/bf16.so", FOLDER "/f16.so"};
    for (int kind = BF16; kind < KINDS; kind++) {
        libraries[kind] = dlopen(paths[kind], RTLD_NOW);
        if (!libraries[kind]) fprintf(stderr, "%s\n", dlerror()), abort();
        ((void (*)(void *))found_in(libraries[kind], "share_parallel"))(parallel);
        ((void (*)(void *))found_in(libraries[kind], "share_choose_token"))(choose_token);
    }
}

static void run(enum kind kind, const char *name, const void *args, int threads) {
    ((void (*)(const void *, int))found_in(libraries[kind], name))(args, threads);
}

#define PLACE(field, at, ...) \
    a.field.data = at, memcpy(a.field.size, (int64_t[4]){__VA_ARGS__}, sizeof a.field.size)
#define MAY_BE_WIDE(field) a.field.code = m->code
#define RUN(kernel)                                                    \
    do {                                                               \
        if (m->kind == F32) kernel##_f32(&a, threads);                 \
        else if (m->kind == BF16) run(BF16, #kernel "_bf16", &a, threads); \
        else run(F16, #kernel "_f16", &a, threads);                    \
    } while (0)

static void run_norms(struct memory *m, int threads) {
    {
        rms_norm_args a = {.eps = 1e-5};
        PLACE(out, m->out, BATCH, HIDDEN), PLACE(x, m->x, BATCH, HIDDEN), PLACE(weight, m->gains, HIDDEN);
        a.x.stride[0] = HIDDEN, MAY_BE_WIDE(x);
        RUN(rms_norm);
    }
    add_rms_norm_args a = {.eps = 1e-5, .post_eps = 1e-5, .scale = 0.5};
    PLACE(out, m->x, BATCH, HIDDEN), PLACE(x, m->out, BATCH, HIDDEN), PLACE(residual, m->residual, BATCH, HIDDEN);
    PLACE(weight, m->gains, HIDDEN), PLACE(post_weight, m->gains, HIDDEN);
    a.x.stride[0] = HIDDEN, MAY_BE_WIDE(x), MAY_BE_WIDE(residual);
    RUN(add_rms_norm);
}

static void run_linear(struct memory *m, int threads) {
    native_linear_args a = {0};
    PLACE(out, m->out, BATCH, HIDDEN), PLACE(x, m->x, BATCH, HIDDEN), PLACE(bias, m->scales, HIDDEN);
    a.x.stride[0] = HIDDEN, MAY_BE_WIDE(out);
    PLACE(panels, m->weight, HIDDEN / PANEL, HIDDEN, PANEL, 1);
    RUN(native_linear);
}

static void run_act_mul(struct memory *m, int threads, int64_t activation) {
    act_mul_args a = {.activation = activation};
    PLACE(out, m->gated, BATCH, WIDTH), PLACE(gate_up, m->x, BATCH, 2 * WIDTH);
    a.gate_up.stride[0] = HIDDEN, MAY_BE_WIDE(gate_up);
    RUN(act_mul);
}

static void run_embedding(struct memory *m, int threads) {
    embedding_args a = {.scale = 1.5};
    PLACE(out, m->embedded, BATCH, HIDDEN), PLACE(tokens, m->tokens, BATCH), PLACE(live, &m->live, 1);
    PLACE(weight, m->weight, TOKENS, HIDDEN), a.weight.stride[0] = HIDDEN, MAY_BE_WIDE(out);
    RUN(embedding);
}

static void run_append(struct memory *m, int threads) {
    rope_append_args a = {.eps = 1e-5};
    PLACE(q_out, m->q, BATCH, HEADS, DIM), PLACE(qkv, m->qkv, BATCH, (HEADS + 2 * KV_HEADS) * DIM);
    PLACE(k_cache, m->cache[0], PAGES, PAGE, KV_HEADS, DIM), PLACE(v_cache, m->cache[1], PAGES, PAGE, KV_HEADS, DIM);
    PLACE(rows, m->rows, BATCH), PLACE(positions, m->positions, BATCH), PLACE(live, &m->live, 1);
    PLACE(page_table, m->table, BATCH, ROW_PAGES), PLACE(cos_sin, m->cos_sin, ROW_PAGES * PAGE, 2, DIM / 2);
    PLACE(q_norm, m->gains, DIM), PLACE(k_norm, m->gains, DIM), MAY_BE_WIDE(qkv);
    RUN(rope_append);
}

static void run_decode_attention(struct memory *m, int threads, int64_t window) {
    {
        attention_plan_args a = {.window_left = window};
        PLACE(kv_lens, m->kv_lens, BATCH), PLACE(plan, m->plan, BATCH), PLACE(pre_step_seqlens, m->lens, BATCH);
        PLACE(live_rows, &m->live, 1);
        attention_plan_f32(&a, threads);
    }
    decode_attention_args a = {.q_len = 1, .sm_scale = 0.125, .v_scale = 1.0, .window_left = window};
    PLACE(out, m->attended, BATCH, HEADS, DIM), PLACE(q, m->q, BATCH, HEADS, DIM), PLACE(kv_lens, m->kv_lens, BATCH);
    PLACE(k_cache, m->cache[0], PAGES, PAGE, KV_HEADS, DIM), PLACE(v_cache, m->cache[1], PAGES, PAGE, KV_HEADS, DIM);
    PLACE(table, m->table, BATCH, ROW_PAGES);
    if (window >= 0) a.logits_soft_cap = 20.0, PLACE(sinks, m->sinks, HEADS);
    RUN(decode_attention);
    /* latent keys in parts, each row's pages from the third one of the list on */
    PLACE(out, m->attended, BATCH, HEADS, DIM / 2), PLACE(table, m->table, BATCH * ROW_PAGES);
    PLACE(indptr, m->rows, BATCH);
    PLACE(k_cache, m->cache[0], PAGES, PAGE, 1, DIM / 2), PLACE(v_cache, m->cache[1], PAGES, PAGE, 1, DIM / 2);
    a.k_cache.stride[1] = a.v_cache.stride[1] = DIM / 2;
    RUN(decode_attention);
}

static void run_extend_attention(struct memory *m, int threads, int64_t window) {
    extend_attention_args a = {.sm_scale = 0.125, .window_left = window};
    PLACE(out, m->attended, BATCH, HEADS, DIM), PLACE(q, m->q, BATCH, HEADS, DIM);
    PLACE(k_cache, m->cache[0], PAGES, PAGE, KV_HEADS, DIM), PLACE(v_cache, m->cache[1], PAGES, PAGE, KV_HEADS, DIM);
    PLACE(cu_seqlens_q, m->cu_q, EXTENDED + 1), PLACE(cu_seqlens_kv, m->cu_kv, EXTENDED + 1);
    PLACE(page_table, m->table, EXTENDED, ROW_PAGES);
    if (window >= 0) a.logits_soft_cap = 20.0, PLACE(sinks, m->sinks, HEADS);
    RUN(extend_attention);
}

static void run_expert_linears(struct memory *m, int threads, int64_t gate) {
    {
        expert_linear_args a = {.slots = SLOTS, .gate = gate, .alpha = 1.7, .limit = 7.0};
        PLACE(out, m->inner, BATCH * SLOTS, WIDTH), PLACE(x, m->x, BATCH, HIDDEN), PLACE(order, m->order, BATCH * SLOTS);
        PLACE(weight, m->gate_up, EXPERTS * 2, HIDDEN, PANEL, 1), PLACE(offsets, m->offsets, EXPERTS + 1);
        PLACE(bias, m->bias, EXPERTS, 2 * WIDTH), a.x.stride[0] = HIDDEN;
        RUN(expert_linear);
    }
    expert_linear_args a = {.slots = 1, .gate = GATE_NONE};
    PLACE(out, m->parts, BATCH * SLOTS, HIDDEN), PLACE(x, m->inner, BATCH * SLOTS, WIDTH);
    PLACE(weight, m->down, EXPERTS * HIDDEN / PANEL, WIDTH, PANEL, 1), PLACE(offsets, m->offsets, EXPERTS + 1);
    PLACE(order, m->order, BATCH * SLOTS), a.x.stride[0] = WIDTH, MAY_BE_WIDE(out);
    RUN(expert_linear);
}

static void run_experts(struct memory *m, int threads, int64_t gate) {
    {
        moe_route_args a = {.renormalize = gate == GATE_SILU};
        PLACE(ids, m->ids, BATCH, SLOTS), PLACE(weights, m->expert_weights, BATCH, SLOTS), PLACE(live, &m->live, 1);
        PLACE(order, m->order, BATCH * SLOTS), PLACE(offsets, m->offsets, EXPERTS + 1), PLACE(logits, m->x, BATCH, EXPERTS);
        a.logits.stride[0] = HIDDEN;
        RUN(moe_route);
    }
    run_expert_linears(m, threads, gate);
    moe_combine_args a = {0};
    PLACE(out, m->out, BATCH, HIDDEN), PLACE(parts, m->parts, BATCH * SLOTS, HIDDEN), PLACE(ids, m->ids, BATCH, SLOTS);
    PLACE(weights, m->expert_weights, BATCH, SLOTS);
    if (gate != GATE_SILU) PLACE(gate, m->x, BATCH, 1), a.gate.stride[0] = HIDDEN;
    MAY_BE_WIDE(out), MAY_BE_WIDE(parts), MAY_BE_WIDE(gate);
    RUN(moe_combine);
}

/* What `sample` and `advance` both read of a row's request. */
#define PLACE_REQUESTS                                                                                              \
    PLACE(live_rows, &m->live, 1), PLACE(sampling_flags, m->flags, BATCH), PLACE(temperature, m->numbers[0], BATCH); \
    PLACE(top_k, m->top_k, BATCH), PLACE(top_p, m->numbers[1], BATCH), PLACE(min_p, m->numbers[2], BATCH);           \
    PLACE(seed, m->seed, BATCH), PLACE(repetition_penalty, m->numbers[3], BATCH);                                    \
    PLACE(presence_penalty, m->numbers[4], BATCH), PLACE(frequency_penalty, m->numbers[5], BATCH);                   \
    PLACE(bias_ids, m->bias_ids, BATCH, BIASES), PLACE(bias_values, m->bias_values, BATCH, BIASES);                  \
    PLACE(stop_ids, m->stop_ids, BATCH, STOPS), PLACE(min_position, m->min_position, BATCH);                         \
    PLACE(last_position, m->last_position, BATCH), PLACE(num_logprobs, m->num_logprobs, BATCH);                      \
    PLACE(token_mask, m->token_mask, BATCH, (VOCAB + 31) / 32), PLACE(sampled, m->sampled, BATCH);                   \
    PLACE(bad_words, m->bad_words, BATCH, WORDS, BAD_WORD_LENGTH), PLACE(token_counts, m->token_counts, BATCH, VOCAB); \
    PLACE(recent_tokens, m->recent_tokens, BATCH, BAD_WORD_LENGTH), a.token_counts.stride[0] = VOCAB

static void run_sampler(struct memory *m, int threads) {
    {
        cap_logits_args a = {.cap = 30.0};
        PLACE(logits, m->logits, BATCH, VOCAB);
        RUN(cap_logits);
    }
    {
        sample_args a = {0};
        PLACE_REQUESTS;
        PLACE(logits, m->logits, BATCH, VOCAB), a.logits.stride[0] = VOCAB, PLACE(positions, m->lens, BATCH);
        RUN(sample);
    }
    {
        token_logprobs_args a = {0};
        PLACE(sampled_logprob, m->sampled_logprob, BATCH), PLACE(sampled_rank, m->sampled_rank, BATCH);
        PLACE(top_logprobs, m->top_logprobs, BATCH, TOPS), PLACE(top_ids, m->top_ids, BATCH, TOPS);
        PLACE(logits, m->logits, BATCH, VOCAB), a.logits.stride[0] = VOCAB, PLACE(sampled, m->sampled, BATCH);
        PLACE(live_rows, &m->live, 1), PLACE(sampling_flags, m->flags, BATCH), PLACE(num_logprobs, m->num_logprobs, BATCH);
        RUN(token_logprobs);
    }
    advance_args a = {0};
    PLACE_REQUESTS;
    PLACE(tokens, m->tokens, BATCH), PLACE(pre_step_seqlens, m->lens, BATCH), PLACE(finished, m->finished, BATCH);
    PLACE(step_index, &m->step_index, 1), PLACE(running, &m->running, 1), PLACE(ring_tokens, m->ring_tokens, RING_STEPS, BATCH);
    PLACE(ring_logprob, m->ring_logprob, RING_STEPS, BATCH), PLACE(ring_rank, m->ring_rank, RING_STEPS, BATCH);
    PLACE(ring_top_logprobs, m->ring_top_logprobs, RING_STEPS, BATCH, TOPS);
    PLACE(ring_top_ids, m->ring_top_ids, RING_STEPS, BATCH, TOPS), PLACE(sampled_logprob, m->sampled_logprob, BATCH);
    PLACE(sampled_rank, m->sampled_rank, BATCH), PLACE(top_logprobs, m->top_logprobs, BATCH, TOPS);
    PLACE(top_ids, m->top_ids, BATCH, TOPS);
    advance_f32(&a, threads);
}

static void run_everything(struct memory *m, int threads) {
    for (int is_wide = 0; is_wide < 2; is_wide++) {
        m->code = is_wide ? CODE_WIDE : 0;
        run_norms(m, threads);
        run_embedding(m, threads);
        run_linear(m, threads);
        for (int64_t kind = ACTIVATION_SILU; kind <= ACTIVATION_GELU; kind++) run_act_mul(m, threads, kind);
        for (int64_t gate = GATE_SILU; gate <= GATE_SWIGLU_CLAMPED; gate++) run_experts(m, threads, gate);
        run_append(m, threads);
    }
    for (int64_t window = -1; window < 15; window += 8) {
        run_extend_attention(m, threads, window);
        run_decode_attention(m, threads, window);
    }
    for (int step = 0; step < 3; step++) run_sampler(m, threads);
}

static uint32_t drawn(void) {
    static uint32_t state = 7;
    return state = state * 1664525 + 1013904223;
}

/* Draw floats; those of the kernels' element type are rounded to it in place, so that the first half holds them all. */
static void fill_floats(struct memory *m, float *values, size_t bytes, float least, float range, int as_elements) {
    for (size_t i = 0; i < bytes / sizeof(float); i++) {
        float value = least + range * (float)(drawn() >> 8) / (1 << 24);
        uint16_t rounded = m->kind == BF16 ? bf16_of_float(value) : f16_of_float(value);
        if (as_elements && m->kind != F32) memcpy((char *)values + 2 * i, &rounded, 2);
        else memcpy(values + i, &value, sizeof value);
    }
}

#define ELEMENTS(field) fill_floats(m, (float *)m->field, sizeof m->field, -1.0f, 2.0f, 1)
#define FLOATS(field, least, range) fill_floats(m, (float *)m->field, sizeof m->field, least, range, 0)

static void fill_rows(struct memory *m) {
    m->live = BATCH, m->step_index = -1;
    for (int row = 0; row < BATCH; row++) {
        m->positions[row] = m->lens[row] = 5 * row, m->rows[row] = row, m->top_k[row] = 40, m->seed[row] = row;
        m->flags[row] = row == 0 ? 0 : row == 1 ? FLAG_SAMPLE : FLAG_BAD_WORDS * 2 - 1; /* all of them */
        m->tokens[row] = row == 2 ? -1 : row == 4 ? INT64_MAX : row;
        m->num_logprobs[row] = row == 5 ? INT32_MAX : row, m->last_position[row] = 26, m->min_position[row] = 10;
        m->numbers[0][row] = 0.8f, m->numbers[1][row] = 0.9f, m->numbers[2][row] = 0.01f, m->numbers[3][row] = 1.2f;
        for (int page = 0; page < ROW_PAGES; page++) /* some of them cannot be */
            m->table[row * ROW_PAGES + page] = row == 3 ? 1 << 30 : row == 4 ? -page - 1 : page;
        m->bias_ids[row * BIASES] = row, m->bias_ids[row * BIASES + 1] = INT32_MAX, m->bias_ids[row * BIASES + 2] = -1;
        m->stop_ids[row * STOPS] = 1 << 30, m->stop_ids[row * STOPS + 1] = 3, m->stop_ids[row * STOPS + 2] = 11;
        for (int place = 0; place < WORDS * BAD_WORD_LENGTH; place++)
            m->bad_words[row * WORDS * BAD_WORD_LENGTH + place] = place % BAD_WORD_LENGTH < BAD_WORD_LENGTH - 1 ? -1 : 7;
        m->bad_words[(row * WORDS + 2) * BAD_WORD_LENGTH - 1] = INT32_MAX;
    }
    m->rows[0] = INT32_MAX, m->rows[1] = -1, m->lens[5] = INT32_MAX; /* longer than its pages are */
    int32_t q[EXTENDED + 1] = {0, 3, 4, 6, 9, 2}, kv[EXTENDED + 1] = {0, 30, 31, 43, 60, 50};
    memcpy(m->cu_q, q, sizeof q), memcpy(m->cu_kv, kv, sizeof kv);
}

static void fill(struct memory *m) {
    ELEMENTS(x), ELEMENTS(residual), ELEMENTS(weight), ELEMENTS(cache), ELEMENTS(q), ELEMENTS(qkv), ELEMENTS(logits);
    ELEMENTS(bias), ELEMENTS(gate_up), ELEMENTS(down), ELEMENTS(scales);
    FLOATS(gains, 0.5f, 1.0f), FLOATS(cos_sin, -1.0f, 2.0f), FLOATS(sinks, -1.0f, 2.0f), FLOATS(numbers, 0.1f, 0.5f);
    FLOATS(bias_values, -5.0f, 10.0f);
    for (size_t i = 0; i < sizeof m->token_mask / 4; i++) m->token_mask[i] = (int32_t)drawn();
    for (size_t i = 0; i < sizeof m->token_counts / 4; i++) m->token_counts[i] = drawn() >> 24 ? 0 : (int32_t)(drawn() >> 30);
    fill_rows(m);
}

static int64_t times;

static void *call(void *place) {
    struct memory *mine = malloc(sizeof *mine), *alone = malloc(sizeof *alone);
    const struct memory *begun = given + (intptr_t)place % KINDS;
    memcpy(alone, begun, sizeof *alone);
    run_everything(alone, 1);
    for (int64_t n = 0; n < times; n++) {
        memcpy(mine, begun, sizeof *mine);
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
    load_libraries();
    for (int kind = F32; kind < KINDS; kind++) given[kind].kind = kind, fill(given + kind);
    pthread_t callers[CALLERS];
    for (intptr_t n = 0; n < CALLERS; n++) pthread_create(callers + n, 0, call, (void *)n);
    for (int n = 0; count > 2 && n < 20; n++) { /* children of a process whose other threads are at work */
        pid_t child = fork();
        if (child == 0) {
            times = 3;
            call((void *)(intptr_t)n);
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
#endif
