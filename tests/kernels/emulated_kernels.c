/* Runs kernels of libraries for another processor, under an emulator, for emulated_kernels.py: a request is a kernel's name,
 * its arguments and the memory that they point into, which is sent back as the kernel leaves it.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST_REGIONS 64
#define APART 64 /* bytes: memory stands as it did within a line */

static void move(int is_read, void *at, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t here = is_read ? read(0, (char *)at + done, bytes - done) : write(1, (char *)at + done, bytes - done);
        if (here <= 0) exit(here < 0 || done > 0);
        done += here;
    }
}

static void *found(void **libraries, int count, const char *name) {
    for (int i = 0; i < count; i++) {
        void *function = dlsym(libraries[i], name);
        if (function) return function;
    }
    fprintf(stderr, "no library has %s\n", name);
    exit(1);
}

/* The first of the libraries has what all share. */
int main(int count, char **files) {
    void *libraries[8];
    const char *shared[] = {"parallel", "choose_token"};
    for (int i = 0; i + 1 < count; i++) {
        libraries[i] = dlopen(files[i + 1], RTLD_NOW);
        if (!libraries[i]) return fprintf(stderr, "%s\n", dlerror()), 1;
        for (int n = 0; n < 2 && i > 0; n++) {
            char name[64];
            snprintf(name, sizeof name, "share_%s", shared[n]);
            ((void (*)(void *))found(libraries + i, 1, name))(dlsym(libraries[0], shared[n]));
        }
    }
    for (;;) {
        struct { int64_t bytes, threads, regions; char name[64]; } asked;
        struct { uint64_t at, bytes; } region[MOST_REGIONS];
        char *memory[MOST_REGIONS], *places[MOST_REGIONS];
        move(1, &asked, sizeof asked);
        uint64_t *words = malloc(asked.bytes);
        move(1, words, asked.bytes);
        move(1, region, asked.regions * sizeof *region);
        for (int64_t i = 0; i < asked.regions; i++) {
            memory[i] = aligned_alloc(APART, (region[i].bytes / APART + 2) * APART);
            places[i] = memory[i] + region[i].at % APART;
            move(1, places[i], region[i].bytes);
            for (int64_t n = 0; n < asked.bytes / 8; n++)
                if (words[n] - region[i].at < region[i].bytes) words[n] += (uint64_t)places[i] - region[i].at;
        }
        ((void (*)(const void *, int))found(libraries, count - 1, asked.name))(words, (int)asked.threads);
        for (int64_t i = 0; i < asked.regions; i++) {
            move(0, places[i], region[i].bytes);
            free(memory[i]);
        }
        free(words);
    }
}
