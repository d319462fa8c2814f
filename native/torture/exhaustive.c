/* Every float of 32 bits, packed to FP4 under every rule at every level, beside scales and codes
 * that are found by comparing alone. Minutes: run by `make torture-codec`, with the shipped flags. */
#include "../tests/testing.h"

#include <float.h>
#include <math.h>

enum { BLOCK_MAX = 32, BLOCKS = 512, E4M3_NAN = 0x7F, E8M0_NAN = 0xFF };

static const uint32_t INFINITY_BITS = 0x7F800000;
static const uint32_t LAST_BITS = 0x7FFFFFFF;
static const uint32_t SIGN = 0x80000000;

int test_level;

/* A number takes the code k or a higher one if it is above the kth limit, or on it where that
 * counts. */
struct limit {
    double at;
    int is_reached;
};

/* How scales of a rule are made. */
struct rule {
    int format, rule;
    size_t block;
    int least, top, infinite, nan; /* the scale bytes that are no matter of limits */
    struct limit limits[256];
};

static double e4m3(int code) {
    return code < 8 ? code * 0x1p-9 : ldexp(8 + code % 8, code / 8 - 10);
}

static double scale_of(const struct rule *rule, int byte) {
    return rule->format == KVSTORE_MXFP4 ? ldexp(1, byte - 127) : e4m3(byte);
}

static struct rule describe(int name) {
    struct rule rule = {KVSTORE_MXFP4, name, 32, 0, 253, 253, E8M0_NAN, {{0, 0}}};
    if (name <= KVSTORE_RULE_TORCHAO) {
        const int least = name == KVSTORE_RULE_V41 ? 0x01 : 0x08;
        rule = (struct rule){KVSTORE_NVFP4, name, 16, least, 0x7E, 0x7E, E4M3_NAN, {{0, 0}}};
    }
    if (name == KVSTORE_RULE_RCEIL) {
        rule.infinite = 254;
    }
    for (int k = 1; k <= rule.top; k++) {
        const double scale = scale_of(&rule, k), below = scale_of(&rule, k - 1);
        if (rule.format == KVSTORE_NVFP4) { /* of six scales, or for TORCHAO of one */
            const double middle = (below + scale) / 2;
            rule.limits[k] = (struct limit){name == KVSTORE_RULE_V41 ? 6 * middle : middle,
                                            k % 2 == 0};
        } else if (name == KVSTORE_RULE_RCEIL) {
            rule.limits[k] = (struct limit){6 * below, 0};
        } else {
            rule.limits[k] = (struct limit){(name == KVSTORE_RULE_FLOOR ? 4 : 3.5) * scale, 1};
        }
    }
    return rule;
}

static int is_beyond(struct limit limit, double number) {
    return limit.is_reached ? number >= limit.at : number > limit.at;
}

static uint32_t at_most(uint32_t limit, uint32_t number) {
    return number < limit ? number : limit;
}

static float float_of(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* The elements are counted limits too: those of E2M1, times the scale. */
static inline void expect_codes(const uint32_t *bits, size_t count, float s, float by,
                                uint8_t *nibbles) {
    uint32_t codes[BLOCK_MAX];
    for (size_t i = 0; i < count; i++) {
        const float x = float_of(bits[i] & LAST_BITS) * by;
        const int code = (x > 0.25F * s) + (x >= 0.75F * s) + (x > 1.25F * s) + (x >= 1.75F * s) +
                         (x > 2.5F * s) + (x >= 3.5F * s) + (x > 5 * s);
        codes[i] = (uint32_t)code | (x > FLT_MAX ? 7 : 0) | bits[i] >> 31 << 3;
    }
    for (size_t i = 0; i < count / 2; i++) {
        nibbles[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    }
}

/* What packing a block must give. Blocks come with amax growing, and `byte` climbs along. */
static void expect_block(const struct rule *rule, const uint32_t *bits, uint32_t amax, int *byte,
                         uint8_t *nibbles, uint8_t *scale) {
    if (amax > INFINITY_BITS) {
        *scale = (uint8_t)rule->nan;
        memset(nibbles, 0, rule->block / 2);
        return;
    }
    const int is_product = rule->rule == KVSTORE_RULE_TORCHAO;
    const double size = is_product ? float_of(amax) / 6.0F : float_of(amax);
    while (*byte < rule->top && is_beyond(rule->limits[*byte + 1], size)) {
        ++*byte;
    }
    *scale = (uint8_t)(amax == INFINITY_BITS ? rule->infinite : *byte);
    /* A limit is a float, or beyond all finite ones and then infinite. */
    const float s = is_product ? 1 : (float)scale_of(rule, *scale);
    const float by = is_product ? 1.0F / (float)scale_of(rule, *scale) : 1;
    if (rule->block == 16) {
        expect_codes(bits, 16, s, by, nibbles);
    } else {
        expect_codes(bits, 32, s, by, nibbles);
    }
}

/* Pack a row at every level, and stop at the first byte that is not as expected. */
static void check_row(const struct rule *rule, const uint32_t *bits, const uint8_t *nibbles,
                      const uint8_t *scales, struct kvstore_pack_stats stats[LEVELS]) {
    static uint8_t found[BLOCKS * BLOCK_MAX / 2], found_scales[BLOCKS];
    const size_t half = rule->block / 2;
    for (test_level = 0; test_level <= kvstore_level(); test_level++) {
        EXPECT(kvstore_pack(codec_of(KVSTORE_F32, rule->format, rule->rule, 1), bits, 1,
                            BLOCKS * rule->block, 0, found, 0, found_scales, 0,
                            &stats[test_level], NULL) == KVSTORE_OK);
        for (size_t i = 0; i < BLOCKS; i++) {
            if (scales[i] != found_scales[i] || memcmp(nibbles + i * half, found + i * half, half)) {
                fprintf(stderr, "level %d, rule %d: scale %02X, expected %02X; numbers and codes:\n",
                        test_level, rule->rule, found_scales[i], scales[i]);
                for (size_t j = 0; j < rule->block; j++) {
                    const size_t shift = j % 2 * 4, byte = i * half + j / 2;
                    fprintf(stderr, "  %08X %X, expected %X\n", bits[i * rule->block + j],
                            found[byte] >> shift & 15, nibbles[byte] >> shift & 15);
                }
                exit(1);
            }
        }
    }
}

/* All magnitudes in order, about half of them negative, and in each block one number more. Up to
 * that number it sets the scale, and from there on the others do. */
static void every_float(const struct rule *rule, float beside, uint32_t flip) {
    static uint32_t bits[BLOCKS * BLOCK_MAX];
    static uint8_t nibbles[BLOCKS * BLOCK_MAX / 2], scales[BLOCKS];
    struct kvstore_pack_stats stats[LEVELS] = {{0, 0}};
    uint64_t nan_blocks = 0;
    uint32_t next = 0, beside_bits;
    memcpy(&beside_bits, &beside, sizeof beside);
    for (int byte = rule->least; next <= LAST_BITS;) {
        for (size_t i = 0; i < BLOCKS; i++) {
            uint32_t *block = bits + i * rule->block;
            const uint32_t at = (uint32_t)(i % rule->block);
            for (uint32_t j = 0; j < rule->block; j++) {
                const uint32_t magnitude = at_most(LAST_BITS, next + j - (j > at));
                block[j] = magnitude | ((magnitude * 0x9E3779B1 ^ flip) & SIGN);
            }
            block[at] = beside_bits;
            next += (uint32_t)rule->block - 1;
            const uint32_t last = at_most(LAST_BITS, next - 1);
            const uint32_t amax = last > beside_bits ? last : beside_bits;
            nan_blocks += amax > INFINITY_BITS;
            expect_block(rule, block, amax, &byte, nibbles + i * rule->block / 2, scales + i);
        }
        check_row(rule, bits, nibbles, scales, stats);
    }
    for (int level = 0; level <= kvstore_level(); level++) {
        EXPECT(stats[level].nan_blocks == nan_blocks && stats[level].inf_values == 1);
    }
}

/* All rules, or the one that is named by its number. */
int main(int count, char **arguments) {
    static const char *const names[] = {"v41", "torchao", "floor", "even", "rceil"};
    const int chosen = count > 1 ? atoi(arguments[1]) : -1;
    EXPECT(kvstore_level() < LEVELS);
    for (int name = KVSTORE_RULE_V41; name <= KVSTORE_RULE_RCEIL; name++) {
        const struct rule rule = describe(name);
        /* Beside 0, every number sets its own scale; 6 makes the scale 1. */
        static const float beside[] = {0, 6, 2600};
        for (size_t i = 0; i < 3 && (chosen < 0 || chosen == name); i++) {
            if (beside[i] < 2600 || name == KVSTORE_RULE_V41) { /* the one that is no power of two */
                every_float(&rule, beside[i], i % 2 ? SIGN : 0);
                printf("%s beside %g: ok\n", names[name], (double)beside[i]);
            }
        }
    }
    return 0;
}
