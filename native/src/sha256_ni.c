/* SHA-256 with the x86 SHA instructions. Each has four rounds of the message schedule; the state is
 * in the words A B E F and C D G H. */
#include "sha256.h"

#ifdef KVSTORE_HAS_SHA_NI
#include <cpuid.h>
#include <immintrin.h>

int sha256_has_sha_ni(void) {
    unsigned a, b, c, d;
    const int has_sse41 = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSE4_1) && (c & bit_SSSE3);
    return has_sse41 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA);
}

__attribute__((target("sha,sse4.1,ssse3"))) void
sha256_mix_sha_ni(uint32_t state[SHA256_WORDS], const uint8_t *message, size_t blocks) {
    const __m128i big_endian = _mm_set_epi64x(0x0C0D0E0F08090A0B, 0x0405060700010203);
    const __m128i dcba = _mm_loadu_si128((const __m128i *)(const void *)state);
    const __m128i hgfe = _mm_loadu_si128((const __m128i *)(const void *)(state + 4));
    const __m128i cdab = _mm_shuffle_epi32(dcba, 0xB1), efgh = _mm_shuffle_epi32(hgfe, 0x1B);
    __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
    __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xF0);
    for (; blocks > 0; blocks--, message += SHA256_BLOCK) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4]; /* the last 16 words of the schedule */
        for (int i = 0; i < 4; i++) {
            const __m128i *four = (const __m128i *)(const void *)(message + 16 * i);
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128(four), big_endian);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            if (i >= 4) {
                __m128i *now = &w[i % 4];
                const __m128i before = w[(i + 3) % 4];
                const __m128i seventh = _mm_alignr_epi8(before, w[(i + 2) % 4], 4);
                *now = _mm_sha256msg1_epu32(*now, w[(i + 1) % 4]);
                *now = _mm_sha256msg2_epu32(_mm_add_epi32(*now, seventh), before);
            }
            const __m128i *k = (const __m128i *)(const void *)(sha256_k + 4 * i);
            const __m128i words = _mm_add_epi32(w[i % 4], _mm_loadu_si128(k));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, words);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(words, 0x0E));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
    _mm_storeu_si128((__m128i *)(void *)state, _mm_blend_epi16(feba, dchg, 0xF0));
    _mm_storeu_si128((__m128i *)(void *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}
#endif
