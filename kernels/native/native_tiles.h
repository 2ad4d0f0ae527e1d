/* Matrix tiles of bf16 (Intel's AMX): whether this process may use them, and how their shapes are set.
 *
 * Tiles 0 to 3 are sums, of TILE_ROWS rows and 16 columns of floats: 0 and 1 of the first rows, 2 and 3 of the next. Tiles
 * 4 and 5 are the rows' values, 6 and 7 the other factor in pairs. A library may hold shapes in the same thread: whoever
 * begins keeps those for the end.
 */
#pragma once

#include "native_system.h"

#define TILE_ROWS 16
#define TILE_IN 32 /* values of bf16 in a row of a tile */

/* In the processor's layout. */
struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__)
#define WITH_TILES
#include <immintrin.h>

static int has_tiles; /* whether the system grants them */

__attribute__((constructor)) static void ask_for_tiles(void) {
    has_tiles = tiles_are_granted();
}

static inline struct tile_shapes tiles_begun(void) {
    struct tile_shapes before = {0};
    if (has_tiles) _tile_storeconfig(&before);
    return before;
}

static inline void load_shapes(const struct tile_shapes *shapes) {
    __asm__ volatile("" : : "r"(shapes) : "memory"); /* GCC 12 believes that eight bytes of them are read */
    _tile_loadconfig(shapes);
}

/* Let the tiles of the first and of the second rows have so many; none or fewer: the second ones are not used. Products
 * are of `in` values at a time, TILE_IN at most. */
static inline void set_tile_shapes(int64_t first, int64_t second, int64_t in) {
    struct tile_shapes shapes = {.palette = 1};
    if (!has_tiles) return;
    for (int tile = 0; tile < 8; tile++) {
        int64_t rows = tile >= 6 ? in / 2 : tile == 4 || tile < 2 ? first : second > 0 ? second : 1;
        shapes.rows[tile] = (uint8_t)rows;
        shapes.row_bytes[tile] = tile == 4 || tile == 5 ? (uint16_t)(2 * in) : 64;
    }
    load_shapes(&shapes);
}

static inline void set_tile_rows(int64_t first, int64_t second) { set_tile_shapes(first, second, TILE_IN); }

static inline void tiles_ended(struct tile_shapes before) {
    if (has_tiles && before.palette) load_shapes(&before);
    else if (has_tiles) _tile_release();
}
#else
static inline struct tile_shapes tiles_begun(void) { return (struct tile_shapes){0}; }
static inline void set_tile_shapes(int64_t first, int64_t second, int64_t in) { (void)first, (void)second, (void)in; }
static inline void set_tile_rows(int64_t first, int64_t second) { (void)first, (void)second; }
static inline void tiles_ended(struct tile_shapes before) { (void)before; }
#endif
