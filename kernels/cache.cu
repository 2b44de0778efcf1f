// Rotary positions, writes of K and V to the cache, and block moves.
#include "cache.cuh"

// Rotates a head. The lanes of a warp divide the pairs.
__device__ void rotate(float *head /* [dim] */, const Rotation &rotation) {
    for (u32 i = lane_in_warp(); i < rotation.rotated / 2; i += WARP) {
        Pair pair = pair_of(i, rotation);
        float2 rotated = rotated_pair(make_float2(head[pair.first], head[pair.second]), rotation.angle(i));
        head[pair.first] = rotated.x;
        head[pair.second] = rotated.y;
    }
}

// out[r] = [cosines, sines] of positions[r] * frequencies, times `amplitude`. Grid: rows.
extern "C" __global__ void angles(float *out /* [rows, 2 * count] */, const u32 *positions /* [rows] */, const float *frequencies /* [count] */,
                                  u32 count, float amplitude) {
    start_next_kernel();
    wait_for_previous_kernel();
    float *row = out + u64(blockIdx.x) * 2 * count;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
        float angle = float(positions[blockIdx.x]) * frequencies[i];
        row[i] = cosf(angle) * amplitude;
        row[i + count] = sinf(angle) * amplitude;
    }
}

// Rotates heads of `dim` numbers, starting at `first`, with one warp per head. Grid: rows, heads.
extern "C" __global__ void rope(float *x /* [rows, stride] */, const float *angles /* [rows, rotated] */, u32 first, u32 dim, u32 stride,
                                u32 rotated, u32 pairs) {
    start_next_kernel();
    wait_for_previous_kernel();
    rotate(x + u64(blockIdx.x) * stride + first + u64(blockIdx.y) * dim, {angles + u64(blockIdx.x) * rotated, rotated, pairs});
}

// Rotates queries and keys of a row, if there are angles, and writes its keys and values to its
// slot. Each warp processes one head. Grid: rows, heads / warps of a block.
template <class T>
__device__ void store_kv(u8 *kv, float *qkv, const float *angles, const u32 *slots, u32 heads, u32 kv_heads, u32 halves, u32 dim, u32 rotated,
                         u32 pairs, u32 block_shift, u32 table_groups, u32 table_group) {
    u32 row = blockIdx.x, slot = slots[u64(row) * table_groups + table_group], block_size = 1u << block_shift;
    u32 all = heads + halves * kv_heads, head_bytes = Stored<T>::head_bytes(block_size, dim);
    u8 *block = kv + u64(slot >> block_shift) * halves * kv_heads * head_bytes;
    u32 head = blockIdx.y * (blockDim.x / WARP) + warp_in_block();
    float *numbers = qkv + (u64(row) * all + head) * dim;
    if (angles && head < heads + kv_heads) rotate(numbers, {angles + u64(row) * rotated, rotated, pairs});
    __syncwarp(); // other lanes read the rotated numbers
    if (heads <= head && head < all && slot != NO_SLOT)
        Stored<T>::write(block + u64(head - heads) * head_bytes, numbers, slot & (block_size - 1), block_size, dim);
}

#define STORE_KV(name, T)                                                                                                                       \
    extern "C" __global__ void store_kv_##name(u8 *kv /* blocks */, float *qkv /* [rows, heads + halves * kv_heads, dim] */,                    \
                                               const float *angles /* [rows, rotated] or null */, const u32 *slots /* [rows, table_groups] */,  \
                                               u32 heads, u32 kv_heads, u32 halves, u32 dim, u32 rotated, u32 pairs, u32 block_shift,           \
                                               u32 table_groups, u32 table_group) {                                                             \
        start_next_kernel();                                                                                                                    \
        wait_for_previous_kernel();                                                                                                             \
        store_kv<T>(kv, qkv, angles, slots, heads, kv_heads, halves, dim, rotated, pairs, block_shift, table_groups, table_group);              \
    }
STORE_KV(f32, float)
STORE_KV(bf16, bf16)
STORE_KV(int8, signed char)
STORE_KV(f16, f16)
STORE_KV(fp8, e4m3)

// Copies whole blocks, with all their levels, between tiers or within one. Level l of a tier begins
// at bases[l], with strides[l] bytes between blocks. Sizes are multiples of 4. Grid: moves, levels.
extern "C" __global__ void move_blocks(u8 *const *to_bases /* [levels] */, const u64 *to_strides /* [levels] */,
                                       u8 *const *from_bases /* [levels] */, const u64 *from_strides /* [levels] */,
                                       const u64 *bytes /* [levels] */, const u32 *moves /* [moves, (from, to)] */) {
    wait_for_previous_kernel();
    u32 level = blockIdx.y, from = moves[2 * blockIdx.x], to = moves[2 * blockIdx.x + 1];
    u8 *target = to_bases[level] + u64(to) * to_strides[level];
    const u8 *source = from_bases[level] + u64(from) * from_strides[level];
    if ((reinterpret_cast<u64>(target) | reinterpret_cast<u64>(source) | bytes[level]) % sizeof(uint4) == 0) {
        for (u64 i = threadIdx.x; i < bytes[level] / sizeof(uint4); i += blockDim.x)
            reinterpret_cast<uint4 *>(target)[i] = reinterpret_cast<const uint4 *>(source)[i];
    } else {
        for (u64 i = threadIdx.x; i < bytes[level] / sizeof(u32); i += blockDim.x)
            reinterpret_cast<u32 *>(target)[i] = reinterpret_cast<const u32 *>(source)[i];
    }
}
