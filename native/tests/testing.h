/* What the native tests share. */
#ifndef KVSTORE_TESTING_H
#define KVSTORE_TESTING_H

#include "kvstore_native.h"

#include <stdio.h>
#include <stdlib.h>

void test_fp4(void);
void test_fp8(void);

#define EXPECT(condition)                                                                  \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition);       \
            exit(1);                                                                       \
        }                                                                                  \
    } while (0)

static const size_t BYTES[] = {4, 2, 2};

static inline uint32_t random_bits(void) {
    static uint64_t state = 1;
    state = state * 6364136223846793005U + 1442695040888963407U;
    return (uint32_t)(state >> 32);
}

static inline void *exactly(size_t bytes) {
    void *memory = malloc(bytes ? bytes : 1);
    EXPECT(memory != NULL);
    return memory;
}

#endif
