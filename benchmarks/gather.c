/* The floor: what plain C needs for the same bytes. Compiled by adapters/c.py with cc -O3, once per work, with

     -DROW_NBYTES=168 -DLEAVES='{0,68},{68,24},...'     (offset and size of each leaf of a packed row)

   so that row and leaf sizes are constants, as they would be in a program written for one row type. Each
   time_... function makes `calls` calls and returns seconds; no Python runs between the calls. */

#define _POSIX_C_SOURCE 199309L
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { LINE = 64, DISTANCE = 12, MAX_PREFETCH = 512 };

static const struct {
    size_t offset, nbytes;
} leaf[] = {LEAVES};

enum { N_LEAVES = sizeof leaf / sizeof *leaf };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Long rows are left to the hardware after their first lines. */
static inline void prefetch(const char *row) {
    const size_t nbytes = ROW_NBYTES < MAX_PREFETCH ? ROW_NBYTES : MAX_PREFETCH;
#pragma GCC unroll 8
    for (size_t b = 0; b < nbytes; b += LINE) __builtin_prefetch(row + b);
    __builtin_prefetch(row + nbytes - 1);
}

static void gather_packed(const char *rows, const int64_t *index, size_t n, char *out) {
    for (size_t i = 0; i < n; i++) {
        if (i + DISTANCE < n) prefetch(rows + index[i + DISTANCE] * ROW_NBYTES);
        memcpy(out + i * ROW_NBYTES, rows + index[i] * ROW_NBYTES, ROW_NBYTES);
    }
}

static void gather_leaves(const char *rows, const int64_t *index, size_t n, char *const *outs) {
    for (size_t i = 0; i < n; i++) {
        if (i + DISTANCE < n) prefetch(rows + index[i + DISTANCE] * ROW_NBYTES);
        const char *row = rows + index[i] * ROW_NBYTES;
#pragma GCC unroll 16
        for (size_t l = 0; l < N_LEAVES; l++)
            memcpy(outs[l] + i * leaf[l].nbytes, row + leaf[l].offset, leaf[l].nbytes);
    }
}

/* The index pool is walked on from *at, so that no two calls read the same rows. */
static const int64_t *next_indices(const int64_t *pool, size_t n_pool, size_t *at, size_t n) {
    if (*at + n > n_pool) *at = 0;
    const int64_t *index = pool + *at;
    *at += n;
    return index;
}

double time_packed(const char *rows, const int64_t *pool, size_t n_pool, size_t *at, size_t n, size_t calls,
                   char *out) {
    const double start = now();
    for (size_t c = 0; c < calls; c++) gather_packed(rows, next_indices(pool, n_pool, at, n), n, out);
    return now() - start;
}

double time_leaves(const char *rows, const int64_t *pool, size_t n_pool, size_t *at, size_t n, size_t calls,
                   char *const *outs) {
    const double start = now();
    for (size_t c = 0; c < calls; c++) gather_leaves(rows, next_indices(pool, n_pool, at, n), n, outs);
    return now() - start;
}

/* Copies `nbytes` from src + from[k] to dst + to[k], k = *at, *at + 1, ... round the two offset lists. */
double time_memcpy(char *dst, const int64_t *to, const char *src, const int64_t *from, size_t n_offsets,
                   size_t *at, size_t nbytes, size_t calls) {
    const double start = now();
    for (size_t c = 0; c < calls; c++) {
        if (*at >= n_offsets) *at = 0;
        memcpy(dst + to[*at], src + from[*at], nbytes);
        ++*at;
    }
    return now() - start;
}
