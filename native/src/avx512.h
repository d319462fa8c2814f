/* AVX-512 (F, BW, DQ, VL, VBMI), or its emulation: with KVSTORE_EMULATE_AVX512 the same kernels are
 * built over SIMDe, for tests on processors without it. Private to native/src. */
#ifndef KVSTORE_AVX512_H
#define KVSTORE_AVX512_H

#if defined(KVSTORE_EMULATE_AVX512)
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
/* Not in every version of SIMDe. */
static inline __m512i emulated_cvtepu8_epi64(__m128i bytes) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_cvtepu8_epi64(bytes)),
                              _mm256_cvtepu8_epi64(_mm_srli_si128(bytes, 4)), 1);
}
static inline __m512i emulated_cvtepu8_epi32(__m128i bytes) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_cvtepu8_epi32(bytes)),
                              _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)), 1);
}
#undef _mm512_cvtepu8_epi64
#undef _mm512_cvtepu8_epi32
#undef _mm512_cmpgt_epi16_mask
#undef _mm512_stream_si512
#define _mm512_cvtepu8_epi64 emulated_cvtepu8_epi64
#define _mm512_cvtepu8_epi32 emulated_cvtepu8_epi32
#define _mm512_cmpgt_epi16_mask(a, b) (~_mm512_cmple_epi16_mask(a, b))
#define _mm512_stream_si512(address, vector) _mm512_store_si512(address, vector)
#define AVX512
#else
#include <immintrin.h>
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")))
#endif

/* Truth tables for three operands: bit 4 a + 2 b + c is the result for a, b and c. */
enum { A_OR_B_AND_C = 0xF8 /* a | (b & c) */, A_OR_B_THEN_C = 0xA8 /* (a | b) & c */ };

#endif
