/* BLAKE3-256 of every 4 MiB chunk of device memory, in one launch (spec: https://github.com/BLAKE3-team/BLAKE3-specs, hash mode).
 *
 * Each chunk is hashed on its own: leaf counter from 0, ROOT at its own top; the last chunk of a range may be shorter.
 * Launched by chunk_hasher.py; compiled by build_kernel.py; tests/software_gpu/driver/blake3.c answers to the same names.
 *
 *   vgpu_blake3_chunks(const Range *ranges, uint32_t range_count, uint64_t address, uint64_t length, uint64_t destination,
 *                      uint8_t *scratch, uint32_t first_chunk, uint8_t *ids)
 *   vgpu_blake3_chunks_copy(the same)   also writes every byte it hashed to the range's destination
 *
 * With ranges == NULL the one range is {address, length, destination}; else `ranges` holds range_count of them, in order of
 * first_chunk, and the three are ignored. The chunks of all ranges are numbered through, a range of length 0 has none;
 * ids[32 * n] belongs to chunk n. A launch does the chunks from first_chunk on.
 * Grid: TILES_PER_CHUNK blocks of TILE threads for each chunk, at most LAUNCH_CHUNKS chunks.
 * scratch: LAUNCH_CHUNKS 32-bit counters, zero before the first launch and left zero, then NODES_PER_CHUNK * 32 bytes for each
 * chunk; of launches in flight at once each needs its own. ids may be mapped host memory.
 * Addresses are multiples of 16; the 16 bytes that hold the last byte are read whole, and written whole by the copying kernel, with
 * zeros after the end. Every byte is read once, so that what is copied is what was hashed even while somebody writes to it.
 *
 * A block hashes a tile of TILE leaves of 1 KiB, one a thread, and joins them up to NODES_PER_TILE nodes; the block that finishes a
 * chunk last joins those up to the root. Bound by 32-bit integer instructions, not by memory: on an H200 the integer pipe is busy
 * in 96% of all cycles at 2.0 TB/s, while memory is at 43% (docs/measurements, gpu-blake3).
 */
typedef unsigned int u32;
typedef unsigned long long u64;

/* bench/gpu_blake3_tune.py sets these to other values; it found the ones here. */
#ifndef TILE
#define TILE 256 /* leaves of a block = its threads */
#endif
#ifndef NODES_PER_TILE
#define NODES_PER_TILE 16
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 4
#endif
#ifndef SPREAD
#define SPREAD 1 /* how many additions of a + b + m are forced onto the multiply-add pipe; the assembler puts more there */
#endif
#ifndef READ
#define READ "ld.global.v4.u32"
#endif
#ifndef COPY_ROW
#define COPY_ROW 128 /* bytes of a leaf that the copying kernel writes at once; 0: what a thread has just read */
#endif
#ifndef WRITE
#define WRITE "st.global.v4.u32"
#endif

#define LAUNCH_CHUNKS 1024u
#define LEAF 1024u
#define CHUNK (4096u * LEAF)
#define TILES_PER_CHUNK (CHUNK / LEAF / TILE)
#define NODES_PER_CHUNK (TILES_PER_CHUNK * NODES_PER_TILE)
#define ALL_LEVELS 32
#define TILE_LEVELS (__builtin_ctz(TILE / NODES_PER_TILE))
#define NODE_VECTORS 2 /* a node is 32 bytes, two 16-byte vectors */
#define NODES_SHARED (NODES_PER_CHUNK > TILE ? NODES_PER_CHUNK : TILE)
static_assert(NODES_PER_CHUNK <= 2 * TILE, "a thread joins at most one pair of a level");

enum { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8 };

struct Range { u64 address, length, destination, first_chunk; };
struct Chunk { u64 address, destination; u32 length; };

/* The assembler does not know it: it would turn a multiplication by a known 1 back into an addition. */
__constant__ u32 vgpu_one = 1;

/* x + y on the multiply-add pipe, which would idle; xors and rotations can run on the integer pipe alone. Left to itself the
 * assembler makes one instruction of a + b + m, on the integer pipe: 17% slower. */
__device__ __forceinline__ u32 add_elsewhere(u32 x, u32 y) { return x * vgpu_one + y; }

__device__ __forceinline__ u32 add3(u32 a, u32 b, u32 m)
{
    if (SPREAD >= 2) return add_elsewhere(b, add_elsewhere(m, a));
    if (SPREAD == 1) return add_elsewhere(m, a) + b;
    return a + b + m;
}

__device__ __forceinline__ void mix(u32 &a, u32 &b, u32 &c, u32 &d, u32 x, u32 y)
{
    a = add3(a, b, x);
    d = __byte_perm(d ^ a, 0, 0x1032);
    c += d;
    b = __funnelshift_r(b ^ c, b ^ c, 12);
    a = add3(a, b, y);
    d = __byte_perm(d ^ a, 0, 0x0321);
    c += d;
    b = __funnelshift_r(b ^ c, b ^ c, 7);
}

template <int A, int B, int C, int D, int E, int F, int G, int H, int I, int J, int K, int L, int M, int N, int O, int P>
__device__ __forceinline__ void round_of(u32 (&v)[16], const u32 (&m)[16])
{
    mix(v[0], v[4], v[8], v[12], m[A], m[B]);
    mix(v[1], v[5], v[9], v[13], m[C], m[D]);
    mix(v[2], v[6], v[10], v[14], m[E], m[F]);
    mix(v[3], v[7], v[11], v[15], m[G], m[H]);
    mix(v[0], v[5], v[10], v[15], m[I], m[J]);
    mix(v[1], v[6], v[11], v[12], m[K], m[L]);
    mix(v[2], v[7], v[8], v[13], m[M], m[N]);
    mix(v[3], v[4], v[9], v[14], m[O], m[P]);
}

/* cv becomes the chaining value after one 64-byte block; the message order of each round is the permutation applied once more. */
__device__ __forceinline__ void compress(u32 (&cv)[8], const u32 (&m)[16], u32 counter, u32 length, u32 flags)
{
    u32 v[16] = {cv[0], cv[1], cv[2], cv[3], cv[4], cv[5], cv[6], cv[7],
                 0x6A09E667u, 0xBB67AE85u, 0x3C6EF372u, 0xA54FF53Au, counter, 0, length, flags};
    round_of<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>(v, m);
    round_of<2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8>(v, m);
    round_of<3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1>(v, m);
    round_of<10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6>(v, m);
    round_of<12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4>(v, m);
    round_of<9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7>(v, m);
    round_of<11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13>(v, m);
#pragma unroll
    for (int n = 0; n < 8; n++) cv[n] = v[n] ^ v[n + 8];
}

__device__ __forceinline__ void start(u32 (&cv)[8])
{
    cv[0] = 0x6A09E667u, cv[1] = 0xBB67AE85u, cv[2] = 0x3C6EF372u, cv[3] = 0xA54FF53Au;
    cv[4] = 0x510E527Fu, cv[5] = 0x9B05688Cu, cv[6] = 0x1F83D9ABu, cv[7] = 0x5BE0CD19u;
}

/* volatile: once, and from memory that an application may be writing. */
__device__ __forceinline__ uint4 read_vector(u64 address)
{
    uint4 v;
    asm volatile(READ " {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
    return v;
}

__device__ __forceinline__ u32 keep_low_bytes(u32 word, int bytes)
{
    return bytes >= 4 ? word : bytes <= 0 ? 0 : word & ((1u << (8 * bytes)) - 1);
}

/* The part of a 16-byte vector that lies within the chunk; nothing is read when that is none of it. */
__device__ uint4 read_end(u64 address, int bytes)
{
    if (bytes <= 0) return make_uint4(0, 0, 0, 0);
    uint4 v = read_vector(address);
    return make_uint4(keep_low_bytes(v.x, bytes), keep_low_bytes(v.y, bytes - 4), keep_low_bytes(v.z, bytes - 8),
                      keep_low_bytes(v.w, bytes - 12));
}

__device__ __forceinline__ void read_words(u32 (&m)[16], int n, uint4 v)
{
    m[4 * n] = v.x, m[4 * n + 1] = v.y, m[4 * n + 2] = v.z, m[4 * n + 3] = v.w;
}

/* One message block; `bytes` of it belong to the chunk. */
__device__ __forceinline__ void read_block(u32 (&m)[16], u64 address, int bytes)
{
    if (bytes >= 64) {
#pragma unroll
        for (int n = 0; n < 4; n++) read_words(m, n, read_vector(address + 16 * n));
    } else {
#pragma unroll
        for (int n = 0; n < 4; n++) read_words(m, n, read_end(address + 16 * n, bytes - 16 * n));
    }
}

__device__ __forceinline__ uint4 words(const u32 (&m)[16], int n)
{
    return make_uint4(m[4 * n], m[4 * n + 1], m[4 * n + 2], m[4 * n + 3]);
}

__device__ __forceinline__ void write_vector(u64 address, uint4 v)
{
    asm volatile(WRITE " [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void write_block(const u32 (&m)[16], u64 address, int bytes)
{
#pragma unroll
    for (int n = 0; n < 4; n++)
        if (16 * n < bytes) write_vector(address + 16 * n, words(m, n));
}

/* The 32 leaves of a warp, all whole, go through shared memory, so that each write covers COPY_ROW neighbouring bytes of a few
 * leaves and not 16 bytes of each: twice as fast. `leaves` is where the first leaf goes. */
__device__ __forceinline__ void write_rows(const u32 (&m)[16], u64 leaves, u32 block)
{
    const u32 vectors = COPY_ROW ? COPY_ROW / 16 : 1, mask = vectors < 8 ? vectors - 1 : 7, shift = vectors < 8 ? 1 : 0;
    __shared__ uint4 rows[TILE * vectors];
    uint4 *mine = rows + threadIdx.x / 32 * 32 * vectors;
    u32 lane = threadIdx.x % 32, first = block * 4 % vectors;
#pragma unroll
    for (u32 n = 0; n < 4; n++) mine[lane * vectors + ((first + n) ^ (lane >> shift & mask))] = words(m, n); /* spread over banks */
    if (first + 4 < vectors) return;
    __syncwarp();
    u64 to = leaves + (block * 4 - first) * 16;
#pragma unroll
    for (u32 n = 0; n < vectors; n++) {
        u32 row = (32 * n + lane) / vectors, column = (32 * n + lane) % vectors;
        write_vector(to + row * LEAF + column * 16, mine[row * vectors + (column ^ (row >> shift & mask))]);
    }
    __syncwarp();
}

/* The chaining value of one leaf, or the root of a chunk that is one leaf. */
template <bool COPIES>
__device__ __forceinline__ void hash_leaf(u32 (&cv)[8], const Chunk &chunk, u32 leaf)
{
    u64 address = chunk.address + (u64)leaf * LEAF, destination = chunk.destination + (u64)leaf * LEAF;
    int left = min(chunk.length - leaf * LEAF, LEAF);
    u32 flags = CHUNK_START, last = chunk.length <= LEAF ? CHUNK_END | ROOT : CHUNK_END, m[16];
    u32 warp_leaf = leaf / 32 * 32;
    bool by_rows = COPY_ROW && chunk.length >= (warp_leaf + 32) * LEAF;
    start(cv);
#pragma unroll 1
    for (u32 block = 0; left > 0; block++, left -= 64) {
        read_block(m, address + 64 * block, left);
        if (COPIES && by_rows) write_rows(m, chunk.destination + (u64)warp_leaf * LEAF, block);
        if (COPIES && !by_rows) write_block(m, destination + 64 * block, left);
        if (left <= 64) flags |= last;
        compress(cv, m, leaf, min(left, 64), flags);
        flags = 0;
    }
}

__device__ __forceinline__ void write_node(uint4 *node, const u32 (&cv)[8])
{
    node[0] = make_uint4(cv[0], cv[1], cv[2], cv[3]);
    node[1] = make_uint4(cv[4], cv[5], cv[6], cv[7]);
}

/* Thread n makes node n of the next level from nodes 2n and 2n + 1, in place; an odd last one goes up as it is. */
__device__ __forceinline__ void join_level(uint4 *nodes, u32 count, u32 flags)
{
    u32 left = 2 * threadIdx.x, m[16], cv[8];
    if (left < count) {
        const uint4 *pair = nodes + NODE_VECTORS * left;
#pragma unroll
        for (int n = 0; n < 4; n++) read_words(m, n, pair[n]); /* past an odd last node: read, not used */
        start(cv);
        if (left + 1 < count) {
            compress(cv, m, 0, 64, flags);
        } else {
#pragma unroll
            for (int n = 0; n < 8; n++) cv[n] = m[n];
        }
    }
    __syncthreads();
    if (left < count) write_node(nodes + NODE_VECTORS * threadIdx.x, cv);
    __syncthreads();
}

__device__ __forceinline__ u32 range_of(const Range *ranges, u32 range_count, u32 chunk)
{
    u32 low = 0, high = range_count;
    while (low + 1 < high) {
        u32 middle = (low + high) / 2;
        if (ranges[middle].first_chunk > chunk) high = middle;
        else low = middle;
    }
    return low;
}

__device__ __forceinline__ Chunk chunk_of(Range range, u32 chunk)
{
    u64 offset = (chunk - range.first_chunk) * CHUNK;
    u64 left = range.length - offset;
    return {range.address + offset, range.destination + offset, left < CHUNK ? (u32)left : CHUNK};
}

/* True in the block that is the last of the chunk's `tiles` to come here; the counter is zero again afterwards. */
__device__ __forceinline__ bool is_last_tile(u32 *counter, u32 tiles)
{
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(counter, 1) == tiles - 1;
        if (is_last) *counter = 0;
        __threadfence();
    }
    __syncthreads();
    return is_last;
}

__device__ __forceinline__ void write_nodes(uint4 *to, const uint4 *nodes, u32 count)
{
    if (threadIdx.x < NODE_VECTORS * count) to[threadIdx.x] = nodes[threadIdx.x];
}

/* Past the L1 cache: other blocks wrote them. */
__device__ __forceinline__ void read_nodes(uint4 *nodes, const uint4 *from, u32 count)
{
    for (u32 n = threadIdx.x; n < NODE_VECTORS * count; n += TILE) nodes[n] = __ldcg(from + n);
    __syncthreads();
}

template <bool COPIES>
__device__ __forceinline__ void hash_tile(Chunk chunk, u32 tile, u32 *counter, uint4 *chunk_nodes, uint4 *id)
{
    __shared__ uint4 nodes[NODE_VECTORS * NODES_SHARED];
    u32 leaves = (chunk.length + LEAF - 1) / LEAF, tiles = (leaves + TILE - 1) / TILE;
    u32 count = min(leaves - tile * TILE, (u32)TILE); /* nodes of this level held by this block */
    u32 in_chunk = leaves;                            /* and by the whole chunk */
    u32 levels = tiles == 1 ? ALL_LEVELS : TILE_LEVELS;

    if (threadIdx.x < count) {
        u32 cv[8];
        hash_leaf<COPIES>(cv, chunk, tile * TILE + threadIdx.x);
        write_node(nodes + NODE_VECTORS * threadIdx.x, cv);
    }
    __syncthreads();
#pragma unroll 1
    for (;;) {
        for (; levels > 0 && in_chunk > 1; levels--) {
            join_level(nodes, count, in_chunk == 2 ? PARENT | ROOT : PARENT);
            count = (count + 1) / 2;
            in_chunk = (in_chunk + 1) / 2;
        }
        if (in_chunk == 1) break;
        write_nodes(chunk_nodes + NODE_VECTORS * NODES_PER_TILE * tile, nodes, count);
        if (!is_last_tile(counter, tiles)) return;
        read_nodes(nodes, chunk_nodes, count = in_chunk);
        levels = ALL_LEVELS;
    }
    if (threadIdx.x < NODE_VECTORS) id[threadIdx.x] = nodes[threadIdx.x];
}

#define KERNEL(name, copies)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(TILE, BLOCKS_PER_SM)                                                            \
        name(const Range *ranges, u32 range_count, u64 address, u64 length, u64 destination, uint4 *scratch, u32 first_chunk,    \
             uint4 *ids)                                                                                                         \
    {                                                                                                                            \
        u32 here = blockIdx.x / TILES_PER_CHUNK, number = first_chunk + here, tile = blockIdx.x % TILES_PER_CHUNK;               \
        Range range = {address, length, destination, 0};                                                                         \
        if (ranges) range = ranges[range_of(ranges, range_count, number)];                                                       \
        Chunk chunk = chunk_of(range, number);                                                                                   \
        if (tile * TILE * LEAF >= chunk.length) return;                                                                          \
        uint4 *nodes = scratch + LAUNCH_CHUNKS / 4 + (u64)here * NODE_VECTORS * NODES_PER_CHUNK;                                 \
        hash_tile<copies>(chunk, tile, (u32 *)scratch + here, nodes, ids + NODE_VECTORS * (u64)number);                          \
    }

KERNEL(vgpu_blake3_chunks, false)
KERNEL(vgpu_blake3_chunks_copy, true)
