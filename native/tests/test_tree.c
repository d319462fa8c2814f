#define _POSIX_C_SOURCE 200809L /* pread, fileno */

#include "testing.h"

#include <unistd.h>

enum {
    PAGE = 4096,
    PAGES = 16,
    BRANCH = 1,
    LEAF = 2,
    BIG = 1,
    DATABASE = 2,
    KEY = 8 /* bytes; big-endian but for free lists */
};

/* A file in the making, and a look at it. */
struct file {
    int fd;
    uint8_t data[PAGES * PAGE];
};

static void put(uint8_t *target, uint64_t value, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        target[i] = (uint8_t)(value >> 8 * i);
    }
}

static uint8_t *page_at(struct file *file, size_t number) { return file->data + number * PAGE; }

static void begin_page(struct file *file, size_t number, unsigned flags) {
    uint8_t *page = page_at(file, number);
    memset(page, 0, PAGE);
    put(page, number, 8);
    put(page + 10, flags, 2);
    put(page + 12, 16, 2);
    put(page + 14, PAGE, 2);
}

/* Add a node behind those that are there. */
static void add_node(struct file *file, size_t number, uint64_t word, unsigned flags,
                     const uint8_t key[KEY], const void *value, size_t bytes) {
    uint8_t *page = page_at(file, number);
    const unsigned lower = page[12] | (unsigned)page[13] << 8;
    const unsigned upper = page[14] | (unsigned)page[15] << 8;
    const unsigned at = (upper - 8 - KEY - (unsigned)bytes) / 2 * 2;
    put(page + lower, at, 2);
    put(page + 12, lower + 2, 2);
    put(page + 14, at, 2);
    put(page + at, word, 4);
    put(page + at + 4, flags, 2);
    put(page + at + 6, KEY, 2);
    memcpy(page + at + 8, key, KEY);
    if (bytes > 0) {
        memcpy(page + at + 8 + KEY, value, bytes);
    }
}

static void key_of(uint64_t number, uint8_t key[KEY]) {
    for (int i = 0; i < KEY; i++) {
        key[i] = (uint8_t)(number >> (56 - 8 * i));
    }
}

/* A branch in page 2 over leaves 3 and 4 of three values; the last has pages 5 to 7; free are 8 and
 * 9, as page 10 says, and page 11 names the tree. */
static void sound(struct file *file) {
    uint8_t key[KEY], word[24];
    memset(file->data, 0, sizeof file->data);
    begin_page(file, 2, BRANCH);
    begin_page(file, 3, LEAF);
    begin_page(file, 4, LEAF);
    key_of(0, key);
    add_node(file, 2, 3, 0, key, NULL, 0);
    key_of(4, key);
    add_node(file, 2, 4, 0, key, NULL, 0);
    for (uint64_t n = 1; n < 6; n++) {
        key_of(n, key);
        add_node(file, n < 4 ? 3 : 4, 5, 0, key, "value", 5);
    }
    key_of(6, key);
    put(word, 5, 8);
    add_node(file, 4, 3 * PAGE - 16, BIG, key, word, 8);
    begin_page(file, 10, LEAF);
    put(key, 7, KEY);
    put(word, 2, 8);
    put(word + 8, 9, 8);
    put(word + 16, 8, 8);
    add_node(file, 10, 24, 0, key, word, 24);
    begin_page(file, 11, LEAF);
    const struct kvstore_tree tree = {
        .depth = 2, .branches = 1, .leaves = 2, .overflow = 3, .entries = 6, .root = 2};
    key_of(1, key);
    add_node(file, 11, sizeof tree, DATABASE, key, &tree, sizeof tree);
}

static void write_file(const struct file *file) {
    EXPECT(pwrite(file->fd, file->data, sizeof file->data, 0) == (ssize_t)sizeof file->data);
}

/* What the last look put out. */
static struct {
    uint64_t below[2];
    struct kvstore_tree_value value;
    struct kvstore_tree named;
} found;

/* Look at one level; every address has exactly the room that is stated. */
static int look(const struct file *file, struct kvstore_tree_walk *walk, uint64_t page,
                size_t count, int kind, int is_leaf) {
    uint64_t *pages = exactly(count * sizeof *pages);
    for (size_t i = 0; i < count; i++) {
        pages[i] = page + i;
    }
    walk->file = file->fd;
    walk->pages = PAGES - 4;
    walk->transaction = 7;
    walk->used = exactly(walk->pages / 8 + 1);
    walk->used_pages = walk->named_count = 0;
    memset(walk->used, 0, walk->pages / 8 + 1);
    walk->below = exactly(walk->below_room * sizeof *walk->below);
    walk->values = exactly(walk->value_room * sizeof *walk->values);
    walk->named = exactly(walk->named_room * sizeof *walk->named);
    const int fault = kvstore_check_level(walk, pages, count, kind, is_leaf);
    EXPECT(walk->below_count <= walk->below_room && walk->value_count <= walk->value_room &&
           walk->named_count <= walk->named_room);
    memcpy(found.below, walk->below, walk->below_count * sizeof *walk->below);
    memcpy(&found.value, walk->values, walk->value_count * sizeof *walk->values);
    memcpy(&found.named, walk->named, walk->named_count * sizeof *walk->named);
    free(walk->used);
    free(walk->below);
    free(walk->values);
    free(walk->named);
    free(pages);
    return fault;
}

static int look_at_leaves(const struct file *file, struct kvstore_tree_walk *walk) {
    write_file(file);
    return look(file, walk, 3, 2, KVSTORE_TREE_VALUES, 1);
}

static void each_fault(struct file *file, struct kvstore_tree_walk *walk) {
    uint8_t key[KEY] = {0};
    sound(file);
    put(page_at(file, 3), 4, 8);
    EXPECT(look_at_leaves(file, walk) == KVSTORE_TREE_KIND);
    sound(file);
    put(page_at(file, 3) + 10, BRANCH, 2);
    EXPECT(look_at_leaves(file, walk) == KVSTORE_TREE_KIND && walk->page == 3);
    sound(file);
    put(page_at(file, 4) + 14, PAGE + 2, 2);
    EXPECT(look_at_leaves(file, walk) == KVSTORE_TREE_FORM && walk->page == 4);
    sound(file);
    put(page_at(file, 4) + 16, PAGE - 2, 2);
    EXPECT(look_at_leaves(file, walk) == KVSTORE_TREE_FORM);
    sound(file);
    add_node(file, 4, PAGE, 0, key, NULL, 0);
    EXPECT(look_at_leaves(file, walk) == KVSTORE_TREE_FORM);
    sound(file);
    add_node(file, 4, 0, 0, key, NULL, 0);
    EXPECT(look_at_leaves(file, walk) == KVSTORE_TREE_ORDER);
    sound(file);
    key_of(9, key);
    add_node(file, 4, 0, DATABASE, key, NULL, 0);
    EXPECT(look_at_leaves(file, walk) == KVSTORE_TREE_NODE);
    for (uint64_t first = 0; first < 5;
         first++) { /* pages before, in the tree, or behind the end */
        sound(file);
        put(page_at(file, 4) + (page_at(file, 4)[14] | page_at(file, 4)[15] << 8) + 8 + KEY,
            first < 4 ? first : PAGES - 5, 8);
        EXPECT(look_at_leaves(file, walk) == KVSTORE_TREE_USE);
    }
    sound(file);
    walk->value_room = 0;
    EXPECT(look_at_leaves(file, walk) == KVSTORE_TREE_COUNTERS);
    walk->value_room = 1;
    walk->below_room = 1;
    EXPECT(look(file, walk, 2, 1, KVSTORE_TREE_VALUES, 0) == KVSTORE_TREE_COUNTERS);
    walk->below_room = 2;
    EXPECT(look(file, walk, 11, 2, KVSTORE_TREE_NAMED, 1) == KVSTORE_TREE_USE);
    put(page_at(file, 10) + (page_at(file, 10)[14] | page_at(file, 10)[15] << 8) + 8, 8, 1);
    write_file(file);
    EXPECT(look(file, walk, 10, 1, KVSTORE_TREE_FREE, 1) == KVSTORE_TREE_LIST);
    sound(file);
    put(page_at(file, 10) + PAGE - 8, 9, 8);
    write_file(file);
    EXPECT(look(file, walk, 10, 1, KVSTORE_TREE_FREE, 1) == KVSTORE_TREE_LIST);
    EXPECT(ftruncate(file->fd, 4 * PAGE) == 0);
    EXPECT(look(file, walk, 3, 2, KVSTORE_TREE_VALUES, 1) == KVSTORE_TREE_CUT && walk->page == 4);
    const int fd = file->fd;
    file->fd = -1;
    EXPECT(look(file, walk, 3, 2, KVSTORE_TREE_VALUES, 1) == KVSTORE_TREE_READ);
    file->fd = fd;
    EXPECT(kvstore_check_level(NULL, NULL, 0, 0, 0) == KVSTORE_ERR_NULL);
}

/* Any bytes in a tree: whatever is said of them, nothing is touched that is not ours. */
static void any_bytes(struct file *file, struct kvstore_tree_walk *walk) {
    struct kvstore_tree_level *level = exactly(sizeof *level);
    uint8_t *mapped = aligned_alloc(PAGE, PAGE), *rows = exactly(PAGE);
    EXPECT(mapped != NULL);
    int sound_levels = 0;
    for (int round = 0; round < 20000; round++) {
        sound(file);
        const uint32_t changes = random_bits() % 6;
        for (uint32_t i = 0; i < changes; i++) {
            uint8_t *page = page_at(file, 2 + random_bits() % 10);
            const size_t addresses[] = {random_bits() % 32, PAGE - 1 - random_bits() % 200,
                                     random_bits() % PAGE};
            page[addresses[random_bits() % 3]] = (uint8_t)(random_bits() >> random_bits() % 8);
        }
        write_file(file);
        for (int kind = KVSTORE_TREE_VALUES; kind <= KVSTORE_TREE_FREE; kind++) {
            sound_levels += !look(file, walk, 2, 1, kind, 0);
            sound_levels += !look(file, walk, 3, 2, kind, 1);
            sound_levels += !look(file, walk, 10 + (kind == KVSTORE_TREE_NAMED), 1, kind, 1);
        }
        size_t bytes = 0;
        level->key_bytes = 0;
        memcpy(mapped, page_at(file, 3), PAGE);
        if (kvstore_leaf_rows(level, mapped + random_bits() % PAGE, KEY, 5, rows, &bytes) ==
            KVSTORE_OK) {
            EXPECT(bytes <= PAGE && bytes % (KEY + 5) == 0);
        }
    }
    EXPECT(sound_levels > 1000);
    free(level);
    free(mapped);
    free(rows);
}

static void rows_of_a_leaf(struct file *file) {
    struct kvstore_tree_level *level = exactly(sizeof *level);
    uint8_t *mapped = aligned_alloc(PAGE, PAGE), *rows = exactly(PAGE), key[KEY];
    EXPECT(mapped != NULL);
    sound(file);
    size_t bytes = 0;
    level->key_bytes = 0;
    memcpy(mapped, page_at(file, 3), PAGE);
    EXPECT(kvstore_leaf_rows(level, mapped + PAGE - 5, KEY, 5, rows, &bytes) == KVSTORE_OK);
    EXPECT(bytes == 3 * (KEY + 5));
    for (uint64_t n = 1; n < 4; n++) {
        key_of(n, key);
        EXPECT(memcmp(rows + (n - 1) * (KEY + 5), key, KEY) == 0);
        EXPECT(memcmp(rows + (n - 1) * (KEY + 5) + KEY, "value", 5) == 0);
    }
    EXPECT(level->key_bytes == KEY && memcmp(level->key, key, KEY) == 0);
    /* Nothing of it follows now. */
    EXPECT(kvstore_leaf_rows(level, mapped, KEY, 5, rows, &bytes) == KVSTORE_TREE_ORDER);
    memcpy(mapped, page_at(file, 4), PAGE); /* a value of another kind is left out */
    EXPECT(kvstore_leaf_rows(level, mapped, KEY, 5, rows, &bytes) == KVSTORE_OK);
    EXPECT(bytes == 2 * (KEY + 5));
    EXPECT(kvstore_leaf_rows(level, NULL, KEY, 5, rows, &bytes) == KVSTORE_ERR_NULL);
    free(level);
    free(mapped);
    free(rows);
}

void test_tree(void) {
    FILE *stream = tmpfile();
    EXPECT(stream != NULL);
    struct file *file = exactly(sizeof *file);
    struct kvstore_tree_walk *walk = exactly(sizeof *walk);
    memset(walk, 0, sizeof *walk);
    walk->below_room = 2;
    walk->value_room = walk->named_room = 1;
    file->fd = fileno(stream);
    sound(file);
    write_file(file);
    EXPECT(look(file, walk, 2, 1, KVSTORE_TREE_VALUES, 0) == KVSTORE_OK && walk->below_count == 2);
    EXPECT(found.below[0] == 3 && found.below[1] == 4);
    EXPECT(look(file, walk, 3, 2, KVSTORE_TREE_VALUES, 1) == KVSTORE_OK && walk->entries == 6 &&
           walk->value_count == 1 && walk->used_pages == 5);
    EXPECT(found.value.page == 5 && found.value.pages == 3);
    EXPECT(look(file, walk, 10, 1, KVSTORE_TREE_FREE, 1) == KVSTORE_OK && walk->used_pages == 3);
    EXPECT(look(file, walk, 11, 1, KVSTORE_TREE_NAMED, 1) == KVSTORE_OK && walk->named_count == 1);
    EXPECT(found.named.root == 2 && found.named.entries == 6);
    any_bytes(file, walk);
    rows_of_a_leaf(file);
    each_fault(file, walk);
    free(walk);
    free(file);
    fclose(stream);
    puts("tree: ok");
}
