/* SHA-256 in plain C, after FIPS 180-4, for processors without the instructions. */
#include "sha256.h"

const uint32_t sha256_start[SHA256_WORDS] = {
    0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
};

const uint32_t sha256_k[SHA256_ROUNDS] = {
    0x428A2F98, 0x71374491, 0xB5C0FBCF, 0xE9B5DBA5, 0x3956C25B, 0x59F111F1, 0x923F82A4, 0xAB1C5ED5,
    0xD807AA98, 0x12835B01, 0x243185BE, 0x550C7DC3, 0x72BE5D74, 0x80DEB1FE, 0x9BDC06A7, 0xC19BF174,
    0xE49B69C1, 0xEFBE4786, 0x0FC19DC6, 0x240CA1CC, 0x2DE92C6F, 0x4A7484AA, 0x5CB0A9DC, 0x76F988DA,
    0x983E5152, 0xA831C66D, 0xB00327C8, 0xBF597FC7, 0xC6E00BF3, 0xD5A79147, 0x06CA6351, 0x14292967,
    0x27B70A85, 0x2E1B2138, 0x4D2C6DFC, 0x53380D13, 0x650A7354, 0x766A0ABB, 0x81C2C92E, 0x92722C85,
    0xA2BFE8A1, 0xA81A664B, 0xC24B8B70, 0xC76C51A3, 0xD192E819, 0xD6990624, 0xF40E3585, 0x106AA070,
    0x19A4C116, 0x1E376C08, 0x2748774C, 0x34B0BCB5, 0x391C0CB3, 0x4ED8AA4A, 0x5B9CCA4F, 0x682E6FF3,
    0x748F82EE, 0x78A5636F, 0x84C87814, 0x8CC70208, 0x90BEFFFA, 0xA4506CEB, 0xBEF9A3F7, 0xC67178F2,
};

static uint32_t rotate(uint32_t word, int by) { return word >> by | word << (32 - by); }

void sha256_mix_portable(uint32_t state[SHA256_WORDS], const uint8_t *message, size_t blocks) {
    for (; blocks > 0; blocks--, message += SHA256_BLOCK) {
        uint32_t w[SHA256_ROUNDS];
        for (size_t i = 0; i < 16; i++) {
            const uint8_t *bytes = message + 4 * i;
            w[i] = (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 |
                   bytes[3];
        }
        for (size_t i = 16; i < SHA256_ROUNDS; i++) {
            const uint32_t a = w[i - 15], b = w[i - 2];
            w[i] = w[i - 16] + w[i - 7] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) +
                   (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
        }
        uint32_t v[SHA256_WORDS];
        for (size_t i = 0; i < SHA256_WORDS; i++) {
            v[i] = state[i];
        }
        for (size_t i = 0; i < SHA256_ROUNDS; i++) {
            const uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
            const uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
            const uint32_t first = v[7] + (rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25)) +
                                   choice + sha256_k[i] + w[i];
            const uint32_t second =
                (rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22)) + majority;
            for (size_t j = SHA256_WORDS - 1; j > 0; j--) {
                v[j] = v[j - 1];
            }
            v[4] += first;
            v[0] = first + second;
        }
        for (size_t i = 0; i < SHA256_WORDS; i++) {
            state[i] += v[i];
        }
    }
}
