/* Consistency check of a tree in an LMDB file, without LMDB. The layout is that of LMDB 0.9:
 * MDB_page, MDB_node, MDB_db and the lists of free pages. */
#define _POSIX_C_SOURCE 200809L /* pread */

#include "bytes.h"
#include "kvstore_native.h"

#include <string.h>
#include <unistd.h>

enum {
    PAGE = 4096,
    HEAD = 16, /* of a page: number, padding, flags, bounds of free space */
    NODE = 8,  /* of a node: size of the value or page below, flags, size of the key */
    RECORD = 48,
    METAS = 2,
    WORD = 8, /* of free lists: page numbers, and their transaction as key */
    WORDS = 512
};
enum { IS_BRANCH = 1, IS_LEAF = 2 };  /* flags of a page */
enum { IS_BIG = 1, IS_DATABASE = 2 }; /* flags of a node */

_Static_assert(sizeof(struct kvstore_tree) == RECORD, "a record is read as it is stored");

struct node {
    const uint8_t *key, *value;
    size_t key_bytes;
    uint32_t word; /* size of the value, or lower half of the page below */
    uint16_t flags;
};

static struct node node_of(const struct kvstore_tree_level *level, size_t i) {
    const uint8_t *at = level->page + load_le16(level->page + HEAD + 2 * i);
    struct node node = {.key = at + NODE, .key_bytes = load_le16(at + 6)};
    node.word = load_le32(at);
    node.flags = load_le16(at + 4);
    node.value = node.key + node.key_bytes;
    return node;
}

static uint64_t pages_of(uint64_t value_bytes) { return (HEAD - 1 + value_bytes) / PAGE + 1; }

static int read_bytes(const struct kvstore_tree_walk *walk, uint64_t at, void *target,
                      size_t bytes) {
    const ssize_t count = pread(walk->file, target, bytes, (off_t)at);
    return count == (ssize_t)bytes ? KVSTORE_OK : count < 0 ? KVSTORE_TREE_READ : KVSTORE_TREE_CUT;
}

/* Mark pages as used; a page that is used already is a fault. */
static int use(struct kvstore_tree_walk *walk, uint64_t first, uint64_t count) {
    if (first < METAS || first >= walk->pages || count > walk->pages - first) {
        return KVSTORE_TREE_USE;
    }
    for (uint64_t page = first; page < first + count; page++) {
        const uint8_t bit = (uint8_t)(1u << page % 8);
        if (walk->used[page / 8] & bit) {
            return KVSTORE_TREE_USE;
        }
        walk->used[page / 8] |= bit;
    }
    walk->used_pages += count;
    return KVSTORE_OK;
}

/* Check that every node is inside the page, and count the nodes. */
static int check_form(struct kvstore_tree_level *level, int is_leaf) {
    const uint8_t *page = level->page;
    if (load_le16(page + 10) != (is_leaf ? IS_LEAF : IS_BRANCH)) {
        return KVSTORE_TREE_KIND;
    }
    const size_t lower = load_le16(page + 12), upper = load_le16(page + 14);
    if (lower <= HEAD || lower > upper || upper > PAGE || lower % 2) {
        return KVSTORE_TREE_FORM;
    }
    level->nodes = (lower - HEAD) / 2;
    for (size_t i = 0; i < level->nodes; i++) {
        const size_t at = load_le16(page + HEAD + 2 * i);
        if (at < upper || at > PAGE - NODE || at % 2) {
            return KVSTORE_TREE_FORM;
        }
        const struct node node = node_of(level, i);
        const size_t value_bytes = !is_leaf ? 0 : node.flags & IS_BIG ? WORD : node.word;
        const size_t room = PAGE - NODE - at;
        if (node.key_bytes > room || value_bytes > room - node.key_bytes) {
            return KVSTORE_TREE_FORM;
        }
    }
    return KVSTORE_OK;
}

/* Read an unused page, mark it as used, and check its form. */
static int enter(struct kvstore_tree_walk *walk, uint64_t number, int is_leaf) {
    struct kvstore_tree_level *level = &walk->level;
    walk->page = number;
    int fault = use(walk, number, 1);
    if (fault == KVSTORE_OK) {
        fault = read_bytes(walk, number * PAGE, level->page, PAGE);
    }
    if (fault == KVSTORE_OK && load_le64(level->page) != number) {
        fault = KVSTORE_TREE_KIND;
    }
    return fault == KVSTORE_OK ? check_form(level, is_leaf) : fault;
}

/* Set the last key, which must ascend. Transactions are integers and never 0. */
static int next_key(struct kvstore_tree_level *level, struct node node, int kind) {
    if (kind == KVSTORE_TREE_FREE) {
        const uint64_t last = level->key_bytes ? load_le64(level->key) : 0;
        if (node.key_bytes != WORD || load_le64(node.key) <= last) {
            return 0;
        }
    } else {
        const size_t had = level->key_bytes, shared = node.key_bytes < had ? node.key_bytes : had;
        const int order = memcmp(node.key, level->key, shared);
        if (order < 0 || (order == 0 && node.key_bytes <= had)) {
            return 0;
        }
    }
    memcpy(level->key, node.key, node.key_bytes);
    level->key_bytes = node.key_bytes;
    return 1;
}

static int go_below(struct kvstore_tree_walk *walk, struct node node) {
    if (walk->below_count == walk->below_room) {
        return KVSTORE_TREE_COUNTERS;
    }
    walk->below[walk->below_count++] = node.word | (uint64_t)node.flags << 32;
    return KVSTORE_OK;
}

/* Check a free list of `bytes` bytes and mark its pages as used. It is in memory, or at an
 * offset of the file if `held` is null. */
static int check_list(struct kvstore_tree_walk *walk, const uint8_t *held, uint64_t at,
                      uint64_t bytes) {
    if (bytes < WORD || bytes % WORD) {
        return KVSTORE_TREE_LIST;
    }
    uint8_t words[WORDS * WORD];
    uint64_t last = UINT64_MAX;
    for (uint64_t done = 0; done < bytes; done += sizeof words) {
        const size_t size = bytes - done < sizeof words ? (size_t)(bytes - done) : sizeof words;
        const uint8_t *source = held == NULL ? words : held + done;
        if (held == NULL) {
            const int fault = read_bytes(walk, at + done, words, size);
            if (fault != KVSTORE_OK) {
                return fault;
            }
        }
        for (size_t i = 0; i < size; i += WORD) {
            const uint64_t word = load_le64(source + i);
            if (done + i == 0) {
                if (word != bytes / WORD - 1) {
                    return KVSTORE_TREE_LIST;
                }
                continue;
            }
            const int fault = word < last ? use(walk, word, 1) : KVSTORE_TREE_LIST;
            if (fault != KVSTORE_OK) {
                return fault;
            }
            last = word;
        }
    }
    return KVSTORE_OK;
}

static int check_value(struct kvstore_tree_walk *walk, struct node node, int kind) {
    const int is_big = (node.flags & IS_BIG) != 0;
    if (kind == KVSTORE_TREE_NAMED) {
        struct kvstore_tree found;
        if (node.flags != IS_DATABASE || node.word != RECORD ||
            walk->named_count == walk->named_room) {
            return KVSTORE_TREE_NODE;
        }
        memcpy(&found, node.value, sizeof found);
        walk->named[walk->named_count++] = found;
        return found.flags || found.pad ? KVSTORE_TREE_NODE : KVSTORE_OK;
    }
    if (node.flags & ~IS_BIG) {
        return KVSTORE_TREE_NODE;
    }
    uint64_t first = 0;
    if (is_big) {
        const uint64_t count = pages_of(node.word);
        first = load_le64(node.value);
        const int fault = use(walk, first, count);
        if (fault != KVSTORE_OK) {
            return fault;
        }
        if (walk->value_count == walk->value_room) {
            return KVSTORE_TREE_COUNTERS;
        }
        walk->values[walk->value_count++] = (struct kvstore_tree_value){first, count};
    }
    if (kind == KVSTORE_TREE_FREE) {
        if (load_le64(node.key) > walk->transaction) {
            return KVSTORE_TREE_LIST;
        }
        return check_list(walk, is_big ? NULL : node.value, first * PAGE + HEAD, node.word);
    }
    return KVSTORE_OK;
}

int kvstore_check_level(struct kvstore_tree_walk *walk, const uint64_t *pages, size_t count,
                        int kind, int is_leaf) {
    if (walk == NULL || walk->used == NULL || (pages == NULL && count > 0)) {
        return KVSTORE_ERR_NULL;
    }
    struct kvstore_tree_level *level = &walk->level;
    level->key_bytes = 0;
    walk->entries = 0;
    walk->below_count = walk->value_count = 0;
    for (size_t i = 0; i < count; i++) {
        int fault = enter(walk, pages[i], is_leaf);
        for (size_t n = 0; fault == KVSTORE_OK && n < level->nodes; n++) {
            const struct node node = node_of(level, n);
            /* The first key of a branch is not stored: it is below the second. */
            if ((is_leaf || n > 0) && !next_key(level, node, kind)) {
                return KVSTORE_TREE_ORDER;
            }
            fault = is_leaf ? check_value(walk, node, kind) : go_below(walk, node);
        }
        if (fault != KVSTORE_OK) {
            return fault;
        }
        walk->entries += level->nodes;
    }
    return KVSTORE_OK;
}

int kvstore_leaf_rows(struct kvstore_tree_level *level, const uint8_t *value, size_t key_bytes,
                      size_t value_bytes, uint8_t rows[4096], size_t *bytes) {
    if (level == NULL || value == NULL || rows == NULL || bytes == NULL) {
        return KVSTORE_ERR_NULL;
    }
    /* Only the copy is used, so checked bytes cannot change. */
    memcpy(level->page, value - (uintptr_t)value % PAGE, PAGE);
    int fault = check_form(level, 1);
    if (fault != KVSTORE_OK) {
        return fault;
    }
    size_t done = 0;
    for (size_t i = 0; i < level->nodes; i++) {
        const struct node node = node_of(level, i);
        if (!next_key(level, node, KVSTORE_TREE_VALUES)) {
            return KVSTORE_TREE_ORDER;
        }
        if (node.key_bytes == key_bytes && node.word == value_bytes && !node.flags) {
            const size_t size = key_bytes + value_bytes;
            if (size > PAGE - done) { /* nodes overlap */
                return KVSTORE_TREE_FORM;
            }
            memcpy(rows + done, node.key, size);
            done += size;
        }
    }
    *bytes = done;
    return KVSTORE_OK;
}
