/* kvstore native kernels: the C contract. Comments here are the manual.
 *
 * No function allocates, keeps state, prints or exits; every one may run in any thread. */
#ifndef KVSTORE_NATIVE_H
#define KVSTORE_NATIVE_H

#include <stdint.h>

/* cffi: begin */

/* Version of this contract. Python refuses a module built from another one. */
int kvstore_native_version(void);

/* cffi: end */

#endif
