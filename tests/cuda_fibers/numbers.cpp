// What numbers.cuh makes of every code: tensors: the words, words of higher bits, results [places][8][2] in floats.
#include "numbers.cuh"

template <CodeKind CODE, bool IS_BFLOAT> void values(u32 *words, u32 *high, float *out, int64_t count) {
    constexpr int SPANS = codes_per_word(CODE), PLACES = high_per_word(CODE) ? high_per_word(CODE) : SPANS;
    for (int64_t i = 0; i < count; i++)
        for (int place = 0; place < PLACES; place++) {
            u32 pair = values_of_codes<CODE, IS_BFLOAT>(words[i], high[i], place % SPANS, place);
            *out++ = low_of<IS_BFLOAT>(pair);
            *out++ = high_of<IS_BFLOAT>(pair);
        }
}

extern "C" void values_of_codes(int code, bool is_bfloat, u32 *words, u32 *high, float *out, int64_t count) {
#define CASE(CODE)                                                                      \
    case CODE:                                                                          \
        return is_bfloat ? values<CODE, true>(words, high, out, count) : values<CODE, false>(words, high, out, count);
    switch (code) {
        CASE(U4) CASE(S4) CASE(U5) CASE(S5) CASE(S6) CASE(S8) CASE(E4M3) CASE(E2M1)
    }
}
