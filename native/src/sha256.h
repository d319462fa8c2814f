/* SHA-256 (FIPS 180-4) for chained block hashes. Private to native/src. */
#ifndef KVSTORE_SHA256_H
#define KVSTORE_SHA256_H

#include <stddef.h>
#include <stdint.h>

enum { SHA256_BLOCK = 64, SHA256_WORDS = 8, SHA256_ROUNDS = 64 };

extern const uint32_t sha256_start[SHA256_WORDS];
extern const uint32_t sha256_k[SHA256_ROUNDS];

/* Mix whole blocks of a message into the state. */
typedef void sha256_mix(uint32_t state[SHA256_WORDS], const uint8_t *message, size_t blocks);
sha256_mix sha256_mix_portable;

#if defined(__x86_64__)
#define KVSTORE_HAS_SHA_NI 1
sha256_mix sha256_mix_sha_ni;
int sha256_has_sha_ni(void);
#endif

#endif
