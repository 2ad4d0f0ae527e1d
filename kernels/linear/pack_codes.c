/* Codes of quantized weights as words of panels; see pack_codes.py for the layout. */
#include "native.h"
#include "native_blocks.h"
#include "native_products.h"

/* Some bits of all codes of a block, from `shift` up, as rows of words in `out`: `code` has the codes of the panel's output
 * features, one behind another. */
static void pack_plane(uint32_t *out, uint8_t code[PANEL][QUANTIZED_BLOCK], int bits, int shift) {
    const int in_word = 16 / bits, mask = (1 << bits) - 1;
    for (int row = 0; row < QUANTIZED_BLOCK / in_word; row++)
        for (int column = 0; column < HALF_PANEL; column++) {
            uint32_t pair = 0; /* of words: those of an input feature, and of the next */
            for (int index = 0; index < in_word; index++) {
                const int k = row * in_word + index;
                const uint8_t *two = code[column + k % 2 * HALF_PANEL] + k / 2 * 2;
                pair |= ((uint32_t)(two[0] >> shift & mask) | (uint32_t)(two[1] >> shift & mask) << 16) << index * bits;
            }
            out[row * HALF_PANEL + column] = pair;
        }
}

/* The same for codes of 4 bits that stand as most types have them: what is done with a byte is done with four. */
static void pack_nibbles(uint32_t *out, const uint8_t *stored[PANEL]) {
    for (int row = 0; row < QUANTIZED_BLOCK / 4; row++)
        for (int column = 0; column < HALF_PANEL; column++) {
            uint32_t low, high, nibbles;
            memcpy(&low, stored[column] + row % 4 * 4, 4), memcpy(&high, stored[column + HALF_PANEL] + row % 4 * 4, 4);
            nibbles = (low >> row / 4 * 4 & 0x0f0f0f0f) | (high >> row / 4 * 4 & 0x0f0f0f0f) << 4;
            out[row * HALF_PANEL + column] = (nibbles & 0xff0000ff) | (nibbles & 0xff00) << 8 | (nibbles & 0xff0000) >> 8;
        }
}

static void pack_panels(const void *job, int64_t begin, int64_t end) {
    const pack_codes_args *a = job;
    static const uint8_t nothing[QUANTIZED_BLOCK];
    const int bits = (int)a->bits, low = low_bits(bits), is_halved = a->codes.size[2] < QUANTIZED_BLOCK;
    const uint8_t *stored[PANEL];
    uint8_t code[PANEL][QUANTIZED_BLOCK];
    for (int64_t panel = begin; panel < end; panel++)
        for (int64_t block = 0; block < a->codes.size[1]; block++) {
            uint32_t *out = (uint32_t *)a->out.data + ((panel * a->codes.size[1] + block) * bits) * ROW_WORDS;
            for (int64_t i = 0, row = panel * PANEL; i < PANEL; i++, row++)
                stored[i] = row < a->codes.size[0] ? (const uint8_t *)a->codes.data + row * a->codes.stride[0] +
                                                         block * a->codes.stride[1]
                                                   : nothing;
            if (is_halved) {
                pack_nibbles(out, stored);
                continue;
            }
            for (int i = 0; i < PANEL; i++) memcpy(code[i], stored[i], QUANTIZED_BLOCK);
            if (low == 8) pack_plane(out, code, 8, 0);
            else if (low == 4) pack_plane(out, code, 4, 0);
            else pack_plane(out, code, 2, 0);
            if (bits - low == 1) pack_plane(out + low * ROW_WORDS, code, 1, low);
            else if (bits - low == 2) pack_plane(out + low * ROW_WORDS, code, 2, low);
        }
}

KERNEL(pack_codes) {
    parallel(threads, pack_panels, a, a->out.size[0], items_of(SHARED_WORK, a->codes.size[1] * BLOCK_SIZE));
}
