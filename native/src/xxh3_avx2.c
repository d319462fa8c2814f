/* XXH3's stripes with AVX2: four lanes in a vector. */
#include "xxh3.h"

#ifdef KVSTORE_HAS_XXH3_AVX2
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2")))
#define INLINE static inline __attribute__((always_inline, target("avx2")))

enum { LANES_PER_VECTOR = 4, VECTORS = XXH3_LANES / LANES_PER_VECTOR, AHEAD = 2048 };

enum way { SUM, COPY, STREAM }; /* target of stripes besides the sum: none, cached, or streamed */

INLINE __m256i load(const void *address) { return _mm256_loadu_si256((const __m256i *)address); }

INLINE void put(uint8_t *target, __m256i vector, enum way way) {
    if (way == COPY) {
        _mm256_storeu_si256((__m256i *)(void *)target, vector);
    } else if (way == STREAM) { /* 16 bytes wide: targets are seldom aligned to more */
        __m128i *address = (__m128i *)(void *)target;
        _mm_stream_si128(address, _mm256_castsi256_si128(vector));
        _mm_stream_si128(address + 1, _mm256_extracti128_si256(vector, 1));
    }
}

INLINE void scramble(__m256i lanes[VECTORS]) {
    const __m256i prime = _mm256_set1_epi32((int)0x9E3779B1);
    for (int i = 0; i < VECTORS; i++) {
        const __m256i key = load(xxh3_secret + 128 + 32 * i);
        const __m256i shifted = _mm256_xor_si256(lanes[i], _mm256_srli_epi64(lanes[i], 47));
        const __m256i keyed = _mm256_xor_si256(shifted, key);
        /* A product with 32 bits, from two of which AVX2 makes four at a time. */
        const __m256i low = _mm256_mul_epu32(keyed, prime);
        const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(keyed, 32), prime);
        lanes[i] = _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
    }
}

INLINE void mix(uint64_t memory[XXH3_LANES], const uint8_t *data, size_t stripes, size_t first,
                uint8_t *target, enum way way) {
    __m256i lanes[VECTORS];
    for (int i = 0; i < VECTORS; i++) {
        lanes[i] = load(memory + LANES_PER_VECTOR * i);
    }
    while (stripes > 0) {
        const size_t to_scramble = XXH3_BLOCK_STRIPES - first;
        const size_t run = stripes < to_scramble ? stripes : to_scramble;
        const uint8_t *secret = xxh3_secret + 8 * first;
        /* Each word is also added to the neighbour of its lane; the order changes once per run. */
        __m256i plain[VECTORS] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        for (size_t stripe = 0; stripe < run; stripe++) {
            if (way == STREAM) {
                _mm_prefetch((const char *)data + AHEAD, _MM_HINT_T0);
            }
            for (int i = 0; i < VECTORS; i++) {
                __m256i words = load(data + 32 * i);
                __asm__("" : "+x"(words)); /* the compiler may not read data again instead */
                put(target + 32 * i, words, way);
                const __m256i keyed = _mm256_xor_si256(words, load(secret + 32 * i));
                const __m256i product = _mm256_mul_epu32(keyed, _mm256_shuffle_epi32(keyed, 0xF5));
                lanes[i] = _mm256_add_epi64(lanes[i], product);
                plain[i] = _mm256_add_epi64(plain[i], words);
            }
            data += XXH3_STRIPE;
            target = way == SUM ? target : target + XXH3_STRIPE;
            secret += 8;
        }
        for (int i = 0; i < VECTORS; i++) {
            lanes[i] = _mm256_add_epi64(lanes[i], _mm256_shuffle_epi32(plain[i], 0x4E));
        }
        if (run == to_scramble) {
            scramble(lanes);
        }
        stripes -= run;
        first = 0;
    }
    for (int i = 0; i < VECTORS; i++) {
        _mm256_storeu_si256((__m256i *)(void *)(memory + LANES_PER_VECTOR * i), lanes[i]);
    }
}

AVX2 void xxh3_mix_avx2(uint64_t lanes[XXH3_LANES], const uint8_t *data, size_t stripes,
                        size_t first, uint8_t *target, int is_streamed) {
    if (target == NULL) {
        mix(lanes, data, stripes, first, target, SUM);
    } else if (is_streamed && (uintptr_t)target % 16 == 0) {
        mix(lanes, data, stripes, first, target, STREAM);
    } else {
        mix(lanes, data, stripes, first, target, COPY);
    }
}
#endif
