/* The walk along one row that is packed, the same at each level. It is included where STEP,
 * PREFETCH_BYTES, INLINE, pack_step_of_16 and pack_step_of_32 are defined. */

INLINE void pack_step(const struct kvstore_codec *codec, const unsigned char *values,
                      uint8_t *codes, uint8_t *scales, struct kvstore_pack_stats *stats, int dtype,
                      size_t block) {
    int is_odd = 0;
    if (dtype == KVSTORE_F32) {
        pack_step_of_32(codec, values, codes, scales, &is_odd, block);
    } else {
        pack_step_of_16(codec, values, codes, scales, &is_odd, dtype, block);
    }
    if (is_odd) { /* rare: what is counted, replaced or very small is left to the definition */
        fp4_pack_portable(codec, values, STEP, codes, scales, stats);
    }
}

INLINE void pack_steps(const struct kvstore_codec *codec, const unsigned char *values, size_t count,
                       uint8_t *codes, uint8_t *scales, struct kvstore_pack_stats *stats, int dtype,
                       size_t block) {
    const size_t bytes = WIDE_BYTES[dtype];
    size_t i = 0;
    for (; i + STEP <= count; i += STEP) {
        for (size_t line = 0; line < STEP * bytes; line += 64) {
            __builtin_prefetch(values + i * bytes + PREFETCH_BYTES + line);
        }
        pack_step(codec, values + i * bytes, codes + i / 2, scales + i / block, stats, dtype,
                  block);
    }
    if (i < count) { /* the tail of a row: the same on a copy that is filled with zeros */
        const size_t rest = count - i;
        unsigned char padded[STEP * 4] = {0};
        uint8_t tail_codes[STEP / 2], tail_scales[STEP / 16];
        memcpy(padded, values + i * bytes, rest * bytes);
        pack_step(codec, padded, tail_codes, tail_scales, stats, dtype, block);
        memcpy(codes + i / 2, tail_codes, rest / 2);
        memcpy(scales + i / block, tail_scales, rest / block);
    }
}

/* A copy of the walk for each combination, in which dtype and block are constants. */
INLINE void pack_any(const struct kvstore_codec *codec, const unsigned char *values, size_t count,
                     uint8_t *codes, uint8_t *scales, struct kvstore_pack_stats *stats) {
    const int is_nvfp4 = codec->format == KVSTORE_NVFP4;
    if (codec->dtype == KVSTORE_F32) {
        is_nvfp4 ? pack_steps(codec, values, count, codes, scales, stats, KVSTORE_F32, 16)
                 : pack_steps(codec, values, count, codes, scales, stats, KVSTORE_F32, 32);
    } else if (codec->dtype == KVSTORE_F16) {
        is_nvfp4 ? pack_steps(codec, values, count, codes, scales, stats, KVSTORE_F16, 16)
                 : pack_steps(codec, values, count, codes, scales, stats, KVSTORE_F16, 32);
    } else {
        is_nvfp4 ? pack_steps(codec, values, count, codes, scales, stats, KVSTORE_BF16, 16)
                 : pack_steps(codec, values, count, codes, scales, stats, KVSTORE_BF16, 32);
    }
}
