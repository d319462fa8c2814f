/* Gathering under sanitizers: pools, tables and outputs are heap blocks of their exact size, and
 * what comes out is what unpacking the same entries one by one gives. */
#include "testing.h"

#include <string.h>

/* Pages run forwards or backwards, and each entry ends with its scales. */
static void any_pool(int dtype, int format, size_t blocks, size_t pages, size_t entries, size_t gap,
                     int is_backwards) {
    const size_t values = blocks * (format == KVSTORE_NVFP4 ? 16 : 32), code_bytes = values / 2;
    const size_t entry = code_bytes + blocks + gap, page = entries * entry;
    const size_t pool_bytes = pages * page - gap, last_page = (pages - 1) * page;
    const size_t row_bytes = values * BYTES[dtype], rows = 19, table_pages = 5;
    unsigned char *pool = exactly(pool_bytes);
    int64_t *table = exactly(table_pages * sizeof *table), *index = exactly(rows * sizeof *index);
    for (size_t i = 0; i < pool_bytes; i++) {
        pool[i] = (unsigned char)random_bits();
    }
    for (size_t i = 0; i < table_pages; i++) {
        table[i] = (int64_t)(random_bits() % pages);
    }
    const unsigned char *first = is_backwards ? pool + last_page : pool;
    const ptrdiff_t page_stride = is_backwards ? -(ptrdiff_t)page : (ptrdiff_t)page;
    struct kvstore_entries from = {first,       first + code_bytes, page_stride, (ptrdiff_t)entry,
                                   page_stride, (ptrdiff_t)entry,   pages,       entries,
                                   table,       table_pages};
    const struct kvstore_codec *codec = codec_of(dtype, format, unpack_rule(format), 1);
    for (int is_paged = 0; is_paged < 2; is_paged++) {
        const size_t known = is_paged ? table_pages : pages;
        from.table = is_paged ? table : NULL;
        for (size_t i = 0; i < rows; i++) {
            index[i] = (int64_t)(random_bits() % (known * entries));
        }
        index[0] = (int64_t)(known * entries - 1);
        unsigned char *found = exactly(rows * row_bytes), *expected = exactly(row_bytes);
        EXPECT(kvstore_gather(codec, &from, index, rows, values, found, (ptrdiff_t)row_bytes) ==
               KVSTORE_OK);
        for (size_t i = 0; i < rows; i++) {
            const size_t e = (size_t)index[i], slot = e % entries;
            const size_t at = is_paged ? (size_t)table[e / entries] : e / entries;
            const unsigned char *address =
                pool + (is_backwards ? pages - 1 - at : at) * page + slot * entry;
            EXPECT(kvstore_unpack(codec, address, 0, address + code_bytes, 0, 1, values, expected,
                                  0) == KVSTORE_OK);
            EXPECT(memcmp(found + i * row_bytes, expected, row_bytes) == 0);
        }
        index[rows - 1] = (int64_t)(known * entries);
        EXPECT(kvstore_gather(codec, &from, index, rows, values, found, (ptrdiff_t)row_bytes) ==
               KVSTORE_ERR_INDEX);
        free(found);
        free(expected);
    }
    free(pool);
    free(table);
    free(index);
}

void test_gather(void) {
    for (int format = KVSTORE_NVFP4; format <= KVSTORE_MXFP4; format++) {
        for (int dtype = 0; dtype < 3; dtype++) {
            for (size_t blocks = 1; blocks < 12; blocks++) {
                for (size_t pages = 1; pages < 4; pages++) {
                    any_pool(dtype, format, blocks, pages, 1 + blocks % 3, blocks % 4,
                             (blocks + pages) % 2);
                }
            }
        }
    }
    puts("gather: ok");
}
