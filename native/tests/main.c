#include "testing.h"

int main(void) {
    test_fp4();
    test_fp8();
    return 0;
}
