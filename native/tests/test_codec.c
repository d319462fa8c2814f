/* Preparing a codec: every argument that it refuses. */
#include "testing.h"

#include <math.h>

void test_codec(void) {
    const struct {
        int dtype, format, rule;
        float global_scale;
        int level, code;
    } cases[] = {
        {3, 0, 0, 1, 0, KVSTORE_ERR_DTYPE},
        {-1, 0, 0, 1, 0, KVSTORE_ERR_DTYPE},
        {0, 4, 0, 1, 0, KVSTORE_ERR_FORMAT},
        {0, -1, 0, 1, 0, KVSTORE_ERR_FORMAT},
        {0, 0, 2, 1, 0, KVSTORE_ERR_RULE},
        {0, 1, 1, 1, 0, KVSTORE_ERR_RULE},
        {0, 2, 5, 1, 0, KVSTORE_ERR_RULE},
        {0, 3, 4, 1, 0, KVSTORE_ERR_RULE},
        {0, 0, 0, 2, 0, KVSTORE_ERR_GLOBAL_SCALE},
        {0, 1, 2, 2, 0, KVSTORE_ERR_GLOBAL_SCALE},
        {0, 3, 5, 2, 0, KVSTORE_ERR_GLOBAL_SCALE},
        {0, 0, 1, NAN, 0, KVSTORE_ERR_GLOBAL_SCALE},
        {0, 0, 1, -1, 0, KVSTORE_ERR_GLOBAL_SCALE},
        {0, 0, 1, 0x1p-101F, 0, KVSTORE_ERR_GLOBAL_SCALE},
        {0, 0, 1, 0x1p-100F, 0, KVSTORE_OK},
        {0, 0, 1, 0x1p100F, 0, KVSTORE_OK},
        {0, 0, 0, 1, -1, KVSTORE_ERR_LEVEL},
        {0, 0, 0, 1, kvstore_level() + 1, KVSTORE_ERR_LEVEL},
    };
    unsigned char *memory = aligned_alloc(64, (kvstore_codec_bytes() + 127) / 64 * 64);
    EXPECT(memory != NULL);
    struct kvstore_codec *codec = (struct kvstore_codec *)(void *)memory;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int code =
            kvstore_codec_prepare(codec, cases[i].dtype, cases[i].format, cases[i].rule,
                                  cases[i].global_scale, cases[i].level, 0);
        if (code != cases[i].code) {
            fprintf(stderr, "case %zu returned %d\n", i, code);
            exit(1);
        }
    }
    struct kvstore_codec *beside = (struct kvstore_codec *)(void *)(memory + 32);
    EXPECT(kvstore_codec_prepare(beside, 0, 0, 0, 1, 0, 0) == KVSTORE_ERR_ALIGN);
    EXPECT(kvstore_codec_prepare(NULL, 0, 0, 0, 1, 0, 0) == KVSTORE_ERR_NULL);
    free(memory);
    puts("codec: ok");
}
