// A warp's share of eight rows of a weight, a step of columns at a time, in the layouts that Triton's kernels read.
//
// A lane (g = lane / 4, q = lane % 4) holds row g: of each unit of columns the q-th quarter, which is one or two pairs of
// operands of `warp_multiply` (k within a product may be in any order, if it is the same for both). A plain weight is row-major.
// One in tiles (`weight_tiles.py`) has words of codes, and numbers of its groups, which a lane holds of the two rows 2 q
// and 2 q + 1 whose sums it has.
#pragma once
#include "numbers.cuh"

struct WeightPointers {
  const u8 *words, *high, *scales, *seconds;
};

// Words of 16 bits at a place, `COUNT` of them: 4 or 8.
template <int COUNT>
DEVICE void load_words(u32 *into, const u8 *at) {
  Words<COUNT / 2> loaded = load_constant((const Words<COUNT / 2> *)at);
#pragma unroll
  for (int i = 0; i < COUNT / 2; i++) into[i] = loaded.at[i];
}

// `BYTES` bytes at a multiple of the largest power of two that divides them, into words.
template <int BYTES>
DEVICE void load_bytes(u32 *into, const u8 *at) {
  if constexpr (BYTES == 1) into[0] = load_constant(at);
  if constexpr (BYTES == 2) into[0] = load_constant((const u16 *)at);
  if constexpr (BYTES % 16 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 16; i++) load_words<8>(into + 4 * i, at + 16 * i);
  } else if constexpr (BYTES == 8) {
    load_words<4>(into, at);
  } else if constexpr (BYTES % 4 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 4; i++) into[i] = load_constant((const u32 *)at + i);
  }
}

template <bool IS_BFLOAT, int COLUMNS, int STEP_>
struct PlainWeight {
  static constexpr int STEP = STEP_, UNITS = STEP / 32, PAIRS = 4, GROUP = 0;
  static constexpr int ROW_BYTES = 2 * STEP, TILES = 1, PLANES = 1, SCALE_BYTES = 0, SECOND_BYTES = 0;
  static constexpr bool HAS_TOTALS = false, HAS_ROW_SCALE = false;

  u32 words[UNITS][PAIRS];

  DEVICE void load(const WeightPointers &weight, u32 row, const u32 (&)[2], u32 step, u32 q) {
    const u8 *at = weight.words + ((u64)row * COLUMNS + step * STEP + 8 * q) * 2;
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) load_words<8>(words[unit], at + 64 * unit);
  }
  static constexpr DEVICE int column_of(int unit) { return 32 * unit; }
  static constexpr DEVICE bool ends_group(int) { return false; }
  DEVICE void values(int unit, u32 (&pairs)[PAIRS]) const {
#pragma unroll
    for (int i = 0; i < PAIRS; i++) pairs[i] = words[unit][i];
  }
  DEVICE void add_group(float (&)[2], const float (&)[4], const float (&)[4], int) const {}
  // of `StagedWeight`: bytes from a row to others, in a plane of it, and from a step to the next
  static constexpr u64 STEP_BYTES = 2 * STEP, HIGH_STEP_BYTES = 0;
  static constexpr DEVICE u64 row_bytes(u64 rows) { return 2 * COLUMNS * rows; }
  static constexpr DEVICE u64 plane_bytes(int) { return 0; }
  static DEVICE const u8 *scales_at(const WeightPointers &weight, u32, u32) { return weight.scales; }
  static DEVICE const u8 *seconds_at(const WeightPointers &weight, u32, u32) { return weight.seconds; }
  static constexpr DEVICE int plane_of(int) { return 0; }
  static constexpr DEVICE int high_plane_of(int) { return 0; }
  static constexpr DEVICE int place_of(int) { return 0; }
  static DEVICE u32 value(u32 word, u32, int) { return word; }
  static DEVICE void factors(const u32 *, const u32 *, int, float &, float &) {}
  static DEVICE u32 load_row_scale(const WeightPointers &, u32) { return 0; }
  static DEVICE float row_scale(u32) { return 1; }
};

enum SecondKind { NONE, LEAST, ZEROS, SIX_BITS, PARTS };

template <bool IS_BFLOAT, u32 ROWS, CodeKind CODE, int SPAN, int GROUP_, int STEP_, NumberKind SCALES, SecondKind SECONDS>
struct TiledWeight {
  static constexpr int STEP = STEP_, GROUP = GROUP_;
  static constexpr int PER_WORD = codes_per_word(CODE), TILE = PER_WORD * SPAN, TILES = STEP / TILE;
  static constexpr int WIDTH = SPAN / 4 < 8 ? SPAN / 4 : 8;  // words that a lane loads at once
  static constexpr int CHUNKS = SPAN / 4 / WIDTH;            // of such words in a tile
  static constexpr int UNITS = STEP / (4 * WIDTH), PAIRS = WIDTH / 2;
  static constexpr int OF_HIGH = high_per_word(CODE), HIGHS = OF_HIGH ? STEP / (OF_HIGH * SPAN) : 0;
  static constexpr bool IS_SUPER = SECONDS == SIX_BITS || SECONDS == PARTS;
  static constexpr bool HAS_TOTALS = SECONDS == LEAST || SECONDS == ZEROS || SECONDS == SIX_BITS;
  static constexpr bool HAS_ROW_SCALE = GROUP == 0;
  static constexpr int UNIT = GROUP > STEP ? GROUP : STEP;  // columns whose numbers are adjacent
  static constexpr int GROUPS = GROUP ? UNIT / GROUP : 0;
  static constexpr int SCALE_BYTES = IS_SUPER ? (SECONDS == SIX_BITS ? 4 : 2) : GROUPS * bytes_of_number(SCALES);
  static constexpr int SECOND_BYTES = SECONDS == NONE       ? 0
                                      : SECONDS == LEAST    ? SCALE_BYTES
                                      : SECONDS == ZEROS    ? GROUPS
                                      : SECONDS == SIX_BITS ? 12
                                                            : 16;

  u32 words[TILES * CHUNKS][PAIRS];
  u32 high[HIGHS ? HIGHS : 1][PAIRS];
  u32 scales[2][(SCALE_BYTES + 3) / 4 + 1];
  u32 seconds[2][(SECOND_BYTES + 3) / 4 + 1];

  // `sums_of`: the two rows whose sums the lane has
  DEVICE void load(const WeightPointers &weight, u32 row, const u32 (&sums_of)[2], u32 step, u32 q) {
    constexpr u64 PLANE = (u64)ROWS * SPAN * 2;
    const u8 *at = weight.words + step * TILES * PLANE + ((u64)row * SPAN + WIDTH * q) * 2;
#pragma unroll
    for (int i = 0; i < TILES * CHUNKS; i++)
      load_words<WIDTH>(words[i], at + i / CHUNKS * PLANE + i % CHUNKS * (8 * WIDTH));
    if constexpr (HIGHS > 0) {
      const u8 *above = weight.high + step * HIGHS * PLANE + ((u64)row * SPAN + WIDTH * q) * 2;
#pragma unroll
      for (int i = 0; i < HIGHS; i++) load_words<WIDTH>(high[i], above + i * PLANE);
    }
    if constexpr (GROUP > 0) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        load_bytes<SCALE_BYTES>(scales[i], scales_at(weight, sums_of[i], step));
        if constexpr (SECOND_BYTES > 0) load_bytes<SECOND_BYTES>(seconds[i], seconds_at(weight, sums_of[i], step));
      }
    }
  }
  static DEVICE u32 load_row_scale(const WeightPointers &weight, u32 row) {
    u32 bits[1];
    load_bytes<bytes_of_number(SCALES)>(bits, weight.scales + row * bytes_of_number(SCALES));
    return bits[0];
  }
  static DEVICE float row_scale(u32 bits) { return number_at<SCALES>(&bits, 0); }
  // units: the chunks of the spans of the tiles, in this order
  static constexpr DEVICE int column_of(int unit) {
    return unit / (PER_WORD * CHUNKS) * TILE + unit / CHUNKS % PER_WORD * SPAN + unit % CHUNKS * 4 * WIDTH;
  }
  static constexpr DEVICE bool ends_group(int unit) {
    constexpr int EACH = GROUP < STEP ? GROUP : STEP;
    return GROUP > 0 && (column_of(unit) + 4 * WIDTH) % (EACH ? EACH : 1) == 0;
  }
  DEVICE void values(int unit, u32 (&pairs)[PAIRS]) const {
    const int tile = unit / (PER_WORD * CHUNKS), span = unit / CHUNKS % PER_WORD, spans = tile * PER_WORD + span;
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
      pairs[i] = values_of_codes<CODE, IS_BFLOAT>(words[tile * CHUNKS + unit % CHUNKS][i],
                                                  high[HIGHS ? spans / (OF_HIGH ? OF_HIGH : 1) : 0][i], span,
                                                  OF_HIGH ? spans % (OF_HIGH ? OF_HIGH : 1) : 0);
  }
  // of `StagedWeight`: the columns of a word are planes of rows, the words of higher bits behind them
  static constexpr int ROW_BYTES = 2 * SPAN, PLANES = TILES + HIGHS;
  static constexpr u64 STEP_BYTES = (u64)TILES * ROWS * ROW_BYTES, HIGH_STEP_BYTES = (u64)HIGHS * ROWS * ROW_BYTES;
  static constexpr DEVICE u64 row_bytes(u64 rows) { return ROW_BYTES * rows; }
  static constexpr DEVICE u64 plane_bytes(int i) { return (u64)(i < TILES ? i : i - TILES) * ROWS * ROW_BYTES; }
  static DEVICE const u8 *scales_at(const WeightPointers &weight, u32 row, u32 step) {
    return weight.scales + ((u64)(step * STEP / UNIT) * ROWS + row) * SCALE_BYTES;
  }
  static DEVICE const u8 *seconds_at(const WeightPointers &weight, u32 row, u32 step) {
    return weight.seconds + ((u64)(step * STEP / UNIT) * ROWS + row) * SECOND_BYTES;
  }
  // by a step's column: the plane of its word, of its higher bits, its group
  static constexpr DEVICE int plane_of(int column) { return column / TILE; }
  static constexpr DEVICE int high_plane_of(int column) {
    return OF_HIGH ? TILES + column / (SPAN * (OF_HIGH ? OF_HIGH : 1)) : plane_of(column);
  }
  static constexpr DEVICE int place_of(int column) {
    return GROUP < STEP && GROUP > 0 ? column / (GROUP ? GROUP : 1) : 0;
  }
  static DEVICE u32 value(u32 low, u32 high, int column) {
    const int place = OF_HIGH ? column / SPAN % (OF_HIGH ? OF_HIGH : 1) : 0;
    return values_of_codes<CODE, IS_BFLOAT>(low, high, column / SPAN % PER_WORD, place);
  }
  // What a row's group adds to its sum: `factor` times that of the products, and `offset` times that of the activations.
  static DEVICE void factors(const u32 *scales, const u32 *seconds, int place, float &factor, float &offset) {
    if constexpr (SECONDS == SIX_BITS) {
      factor = number_at<FLOAT16>(scales, 0) * six_bits_at(seconds, 2 * place);
      offset = -number_at<FLOAT16>(scales, 1) * six_bits_at(seconds, 2 * place + 1);
    } else if constexpr (SECONDS == PARTS) {
      factor = number_at<FLOAT16>(scales, 0) * number_at<SIGNED8>(seconds, place);
    } else {
      factor = number_at<SCALES>(scales, place);
      if constexpr (SECONDS == ZEROS) offset = -factor * number_at<UNSIGNED8>(seconds, place);
      if constexpr (SECONDS == LEAST) offset = number_at<SCALES>(seconds, place);
    }
  }
  // Adds a group's scaled sums; `totals` are those of the activations.
  DEVICE void add_group(float (&sums)[2], const float (&products)[4], const float (&totals)[4], int unit) const {
    const int place = place_of(column_of(unit));
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if constexpr (SECONDS == SIX_BITS) {
        sums[i] += number_at<FLOAT16>(scales[i], 0) * six_bits_at(seconds[i], 2 * place) * products[i];
        sums[i] -= number_at<FLOAT16>(scales[i], 1) * six_bits_at(seconds[i], 2 * place + 1) * totals[i];
      } else if constexpr (SECONDS == PARTS) {
        sums[i] += number_at<FLOAT16>(scales[i], 0) * number_at<SIGNED8>(seconds[i], place) * products[i];
      } else {
        float product = products[i];
        if constexpr (SECONDS == ZEROS) product -= number_at<UNSIGNED8>(seconds[i], place) * totals[i];
        sums[i] += number_at<SCALES>(scales[i], place) * product;
        if constexpr (SECONDS == LEAST) sums[i] += number_at<SCALES>(seconds[i], place) * totals[i];
      }
    }
  }
};
