/* The kernels of gpu_state/staging/blake3.cu on the CPU: the same parameters and the same ids, written for reading, not for speed.
 *
 * BLAKE3 in hash mode after https://github.com/BLAKE3-team/BLAKE3-specs, one 4 MiB chunk at a time, on one thread. The scratch
 * memory is checked as the GPU would use it, and left alone.
 */
#include "driver.h"

#define LEAF 1024u
#define CHUNK (4096u * LEAF)
#define BLOCKS_PER_CHUNK 16u /* TILES_PER_CHUNK */
#define LAUNCH_CHUNKS 1024u
#define SCRATCH_BYTES(chunks) (LAUNCH_CHUNKS * 4ull + (chunks) * 256ull * 32)

enum { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8 };

struct range_to_hash { uint64_t address, length, destination, first_chunk; };
struct launch { const struct range_to_hash *ranges; uint64_t range_count, first_chunk, chunks; uint8_t *ids; bool copies; };

static const uint32_t start_value[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};
static const uint8_t order[7][16] = { /* of the message words in each round */
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1},
    {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4},
    {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13},
};

static inline uint32_t rotate(uint32_t x, int by) { return x >> by | x << (32 - by); }

static inline void mix(uint32_t *v, int a, int b, int c, int d, uint32_t x, uint32_t y)
{
    v[a] += v[b] + x;
    v[d] = rotate(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = rotate(v[b] ^ v[c], 12);
    v[a] += v[b] + y;
    v[d] = rotate(v[d] ^ v[a], 8);
    v[c] += v[d];
    v[b] = rotate(v[b] ^ v[c], 7);
}

static void compress(uint32_t cv[8], const uint8_t block[64], uint32_t counter, uint32_t length, uint32_t flags)
{
    uint32_t m[16], v[16];
    memcpy(m, block, 64); /* little-endian, as every machine with such a GPU */
    memcpy(v, cv, 32);
    memcpy(v + 8, start_value, 16);
    v[12] = counter, v[13] = 0, v[14] = length, v[15] = flags;
    for (int n = 0; n < 7; n++) {
        const uint8_t *o = order[n];
        for (int i = 0; i < 4; i++) mix(v, i, 4 + i, 8 + i, 12 + i, m[o[2 * i]], m[o[2 * i + 1]]);
        for (int i = 0; i < 4; i++) mix(v, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[o[8 + 2 * i]], m[o[9 + 2 * i]]);
    }
    for (int n = 0; n < 8; n++) cv[n] = v[n] ^ v[n + 8];
}

static void hash_leaf(uint32_t cv[8], const uint8_t *data, uint32_t length, uint32_t number, uint32_t root)
{
    memcpy(cv, start_value, 32);
    for (uint32_t at = 0; at == 0 || at < length; at += 64) {
        uint8_t block[64] = {0};
        uint32_t here = length - at < 64 ? length - at : 64;
        memcpy(block, data + at, here);
        compress(cv, block, number, here, (at ? 0 : CHUNK_START) | (at + 64 >= length ? CHUNK_END | root : 0));
    }
}

/* The left subtree is the largest power of two of whole leaves that leaves something for the right one. */
static void hash_tree(uint32_t cv[8], const uint8_t *data, uint32_t length, uint32_t first_leaf, uint32_t root)
{
    if (length <= LEAF) {
        hash_leaf(cv, data, length, first_leaf, root);
        return;
    }
    uint32_t left = LEAF, pair[16];
    while (left * 2 < length) left *= 2;
    hash_tree(pair, data, left, first_leaf, 0);
    hash_tree(pair + 8, data + left, length - left, first_leaf + left / LEAF, 0);
    memcpy(cv, start_value, 32);
    compress(cv, (const uint8_t *)pair, 0, 64, PARENT | root);
}

/* The copying kernel writes whole vectors of 16 bytes. */
static bool set_aside(uint64_t destination, uint64_t address, uint32_t length)
{
    uint32_t padded = (uint32_t)ROUND_UP(length, 16);
    if (!memory_is_device(destination, padded, true)) return false;
    memcpy((void *)destination, (void *)address, length);
    memset((char *)destination + length, 0, padded - length);
    return true;
}

static bool hash_chunk(const struct launch *launch, uint64_t number)
{
    const struct range_to_hash *range = launch->ranges;
    for (uint64_t n = 1; n < launch->range_count && launch->ranges[n].first_chunk <= number; n++) range = &launch->ranges[n];
    uint64_t offset = (number - range->first_chunk) * CHUNK;
    if (number < range->first_chunk || offset >= range->length || range->address % 16 || range->destination % 16) return false;
    uint32_t length = range->length - offset < CHUNK ? (uint32_t)(range->length - offset) : CHUNK;
    uint64_t source = range->address + offset;
    uint32_t cv[8];
    if (!memory_is_device(source, length, false)) return false;
    if (launch->copies) {
        if (!set_aside(range->destination + offset, source, length)) return false;
        source = range->destination + offset; /* hashed is what was copied, whoever writes meanwhile */
    }
    hash_tree(cv, (const uint8_t *)source, length, 0, ROOT);
    memcpy(launch->ids + 32 * number, cv, 32);
    return true;
}

static bool hash_launch(const struct kernel_args *args, bool copies)
{
    struct range_to_hash one = {args->value[2], args->value[3], args->value[4], 0};
    struct launch launch = {&one, 1, args->value[6], args->blocks / BLOCKS_PER_CHUNK, (uint8_t *)args->value[7], copies};
    if (args->value[0]) {
        launch.ranges = (const struct range_to_hash *)args->value[0];
        launch.range_count = args->value[1];
        if (!memory_is_device(args->value[0], launch.range_count * sizeof one, false)) return false;
    }
    if (launch.chunks > LAUNCH_CHUNKS || !memory_is_device(args->value[5], SCRATCH_BYTES(launch.chunks), true)) return false;
    if (!memory_is_device(args->value[7] + 32 * launch.first_chunk, 32 * launch.chunks, true)) return false;
    for (uint64_t n = 0; n < launch.chunks; n++)
        if (!hash_chunk(&launch, launch.first_chunk + n)) return false;
    return true;
}

bool blake3_chunks(const struct kernel_args *args) { return hash_launch(args, false); }
bool blake3_chunks_copy(const struct kernel_args *args) { return hash_launch(args, true); }
