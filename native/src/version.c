#include "kvstore_native.h"

int kvstore_native_version(void) { return 6; }
