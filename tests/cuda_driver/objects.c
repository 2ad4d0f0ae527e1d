/* Handles, complaints, calls, and what the tests ask of the stand-in itself. */
#include "stand_in.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BUCKETS 4096
#define TEXT_BYTES (1 << 20)

static pthread_mutex_t mutex;
static pthread_once_t mutex_once = PTHREAD_ONCE_INIT;
static Object *table[BUCKETS], *last_made[KINDS];
static unsigned numbers[KINDS];
static char complaints[TEXT_BYTES], calls[TEXT_BYTES], alive[TEXT_BYTES];
static char failing[64];
static CUresult failing_with;
static unsigned failing_behind;
static uint64_t random_state;
static bool lazy;
static double eagerness;
int driver_version = 13000;

static const char *const names[KINDS] = {"context", "memory", "stream", "event", "module",
                                         "function", "graph", "node", "exec", "condition",
                                         "reservation", "physical memory", "mapping"};

static void make_mutex(void) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE); /* a callback calls the driver */
    pthread_mutex_init(&mutex, &attributes);
}

void lock(void) {
    pthread_once(&mutex_once, make_mutex);
    pthread_mutex_lock(&mutex);
}

void unlock(int *locked) {
    (void)locked;
    pthread_mutex_unlock(&mutex);
}

static void append(char *text, const char *line) {
    size_t length = strlen(text);
    snprintf(text + length, TEXT_BYTES - length, "%s\n", line);
}

CUresult entered(const char *call) {
    append(calls, call);
    if (strcmp(failing, call) != 0) return CUDA_SUCCESS;
    if (failing_behind > 0) {
        failing_behind--;
        return CUDA_SUCCESS;
    }
    return failing_with;
}

void complain(const char *format, ...) {
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    append(complaints, line);
}

static size_t bucket_of(const void *handle) { return ((uintptr_t)handle >> 4) % BUCKETS; }

void *made(Kind kind, size_t size) {
    Object *object = calloc(1, size);
    *object = (Object){.kind = kind, .is_alive = true, .number = ++numbers[kind], .before = last_made[kind]};
    last_made[kind] = object;
    size_t bucket = bucket_of(object);
    object->next = table[bucket];
    table[bucket] = object;
    return object;
}

void *known(const void *handle, Kind kind) {
    for (Object *object = table[bucket_of(handle)]; object != NULL; object = object->next)
        if (object == handle && object->kind == kind) return object;
    return NULL;
}

void *living(const void *handle, Kind kind, const char *call) {
    Object *object = known(handle, kind);
    if (object != NULL && !object->is_alive) {
        complain("%s: %s %u was destroyed", call, names[kind], object->number);
        return NULL;
    }
    return object;
}

Object *newest(Kind kind) { return last_made[kind]; }

bool is_lazy(void) { return lazy; }

/* Whether something runs that nobody has waited for yet. */
bool goes_on(void) { return !lazy || chance() < eagerness; }

double chance(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (double)(random_state >> 11) / (double)(1ull << 53);
}

/* What the tests ask for. */

const char *stand_in_complaints(void) { return complaints; }

const char *stand_in_calls(void) { return calls; }

void stand_in_forget_calls(void) { calls[0] = 0; }

/* Living objects that nobody else owns, one a line; contexts are not given back. */
const char *stand_in_alive(void) {
    lock();
    int locked __attribute__((cleanup(unlock), unused)) = 1;
    alive[0] = 0;
    for (Kind kind = MEMORY; kind < KINDS; kind++)
        for (Object *object = last_made[kind]; object != NULL; object = object->before) {
            if (!object->is_alive || object->is_owned) continue;
            char line[64];
            snprintf(line, sizeof line, "%s %u", names[kind], object->number);
            append(alive, line);
        }
    return alive;
}

/* Let a call fail from its (behind + 1)-th time on; NULL: none. */
void stand_in_fail(const char *call, int code, unsigned behind) {
    snprintf(failing, sizeof failing, "%s", call == NULL ? "" : call);
    failing_with = (CUresult)code;
    failing_behind = behind;
}

/* 0: what is queued runs at once; else as late as it may, in an order that the seed picks. */
void stand_in_seed(uint64_t seed) {
    lazy = seed != 0;
    random_state = seed * 0x9e3779b97f4a7c15ull + 1;
    for (int i = 0; i < 8; i++) chance();
    eagerness = (double)(seed % 3) * 0.4;
}

void stand_in_version(int version) { driver_version = version; }

/* Begin anew: whatever was made before is forgotten, and its handles are unknown. What it took is not given back, for
 * somebody may still hold views of it. */
void stand_in_reset(void) {
    lock();
    int locked __attribute__((cleanup(unlock), unused)) = 1;
    for (Kind kind = 0; kind < KINDS; kind++)
        for (Object *object = last_made[kind]; object != NULL; object = object->before) object->is_alive = false;
    memset(last_made, 0, sizeof last_made);
    memset(table, 0, sizeof table);
    memset(numbers, 0, sizeof numbers);
    complaints[0] = calls[0] = failing[0] = 0;
    driver_version = 13000;
    stand_in_seed(0);
}
