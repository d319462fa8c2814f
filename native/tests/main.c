#include "testing.h"

int test_level;

int main(void) {
    test_chain();
    test_codec();
    for (test_level = KVSTORE_LEVEL_PORTABLE; test_level <= kvstore_level(); test_level++) {
        printf("level %d\n", test_level);
        test_fp4();
        test_fp8();
        test_gather();
    }
    return 0;
}
