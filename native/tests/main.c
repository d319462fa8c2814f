#include "testing.h"

int test_level;

static void test_one_level(void) {
    printf("level %d\n", test_level);
    test_fp4();
    test_fp8();
    test_gather();
    test_part();
}

/* Without an argument, test all; with "avx512" only what that level does. */
int main(int count, char **arguments) {
    if (count > 1 && strcmp(arguments[1], "avx512") == 0) {
        EXPECT(kvstore_level() == KVSTORE_LEVEL_AVX512);
        test_level = KVSTORE_LEVEL_AVX512;
        test_one_level();
        return 0;
    }
    test_chain();
    test_codec();
    test_tree();
    for (test_level = KVSTORE_LEVEL_PORTABLE; test_level <= kvstore_level(); test_level++) {
        test_one_level();
    }
    return 0;
}
