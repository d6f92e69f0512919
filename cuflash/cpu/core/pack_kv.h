// Tiles of keys in the layout that products of the forward pass read: k transposed, v as rows, or both as bf16x2.
#pragma once

#include "softmax.h"

namespace {

template <class T> struct Tile {
    const T *k_t, *v;
    int64_t v_stride;
    const T *low_v;  // the low terms of v, where numbers have two
};

// Loads keys of a tile, transposed; `rows` has space for them as they are.
template <class T> inline void load_transposed_keys(const KeySlice &keys, T *rows, T *k_t, int64_t keys_stride) {
    const int64_t padded = round_up(keys.count, LANES<T>), dim = round_up(keys.dim(), LANES<T>);
    const T *k = rows;
    int64_t k_stride = dim;
    if (has_whole_rows<T>(keys.call, K, keys.dim()) && keys.count == padded) {
        k = (const T *)keys.row(0);
        k_stride = keys.call.strides[K][2];
    } else {
        load_keys(keys, rows, dim, padded);
    }
    transpose(k, k_stride, padded, dim, k_t, keys_stride);
}

// Rows of v of a tile, of stride `v_stride`: where they lie, or copied to v. They are read again and again, so they are
// copied where rows have large strides, which fall into the same few sets of the cache. Vectors may straddle lines of
// the cache: the second line costs nothing next to the products of a vector.
template <class T> inline bool has_near_values(const Call &call) {
    const int64_t stride = call.strides[V][2], dim = call.head_dim_v;
    return (stride == dim || stride == -dim) && has_whole_rows<T>(call, V, dim);
}
template <class T> inline const T *find_values(const KeySlice &values, T *v, int64_t &v_stride) {
    if (has_near_values<T>(values.call)) {
        v_stride = values.call.strides[V][2];
        return (const T *)values.row(0);
    }
    v_stride = round_up(values.dim(), LANES<T>);
    load_keys(values, v, v_stride, values.count);
    return v;
}

constexpr int64_t NARROW_WINDOW = 512;  // few blocks read a tile of narrower windows

// Each thread packs the tiles of a head for itself, and holds them for the next blocks of that head, which it takes if
// any are left. What another core packs takes longer to come from there than to pack.
constexpr bool MAY_HOLD_TILES = !HAS_BF16X2 && !HAS_LANE_PRODUCTS;
constexpr int64_t HELD_BYTES = 5 << 19;  // of a thread, at most

// Where the tiles are: k, transposed, and after it rows of v, whose stride is not a power of two, unless they are read
// where they lie.
template <class T> struct PackedTiles {
    const Work &work;
    bool has_values;
    int64_t keys_stride, v_stride, count_k, count;  // numbers of k, and of a tile

    explicit PackedTiles(const Work &work)
        : work(work), has_values(!has_near_values<T>(work.call)), keys_stride(keys_stride_of<T>(work)) {
        const Sizes<T> sizes(work.call);
        v_stride = sizes.dim_v + 64 / int64_t(sizeof(T));
        count_k = sizes.dim * keys_stride;
        count = count_k + (has_values ? work.keys_per_tile * v_stride : 0);
    }
    void pack(const KeySlice &keys, T *rows, T *packed) const {
        load_transposed_keys(keys, rows, packed, keys_stride);
        if (has_values)
            load_keys({keys.call, V, keys.entry, keys.head_kv, keys.first, keys.count}, packed + count_k, v_stride,
                      keys.count);
    }
    Tile<T> tile(const Entry &entry, int64_t head_kv, int64_t first, const T *packed) const {
        if (has_values) return {packed, packed + count_k, v_stride, nullptr};
        return {packed, (const T *)key_address(work.call, V, entry, head_kv, first), work.call.strides[V][2], nullptr};
    }
};

// Whether there are several blocks for each KV head, and all tiles are read. Finds how many a head has.
inline bool read_tiles_again(Work &work, int64_t num_blocks) {
    const Call &call = work.call;
    const bool is_narrow = call.window_left + call.window_right < NARROW_WINDOW;
    for (int64_t e = 0; e < work.num_entries; ++e)
        work.packed.tiles_per_head =
            larger(work.packed.tiles_per_head, ceil_div(work.entries[e].seqlen_k, work.keys_per_tile));
    return !call.arrays[BLOCK_MASK] && !call.arrays[MASK] && !is_narrow &&
           num_blocks >= 2 * work.num_entries * call.num_heads_kv;
}

// Has threads hold the tiles of a head, if they are read again and are few.
template <class T> inline void hold_tiles(Work &work, int64_t num_blocks) {
    const PackedTiles<T> tiles(work);
    work.packed.elements_per_tile = tiles.count;
    const bool again = read_tiles_again(work, num_blocks);
    work.packed.are_held = again && work.packed.tiles_per_head * tiles.count * int64_t(sizeof(T)) <= HELD_BYTES;
}

// A tile that the thread holds, or packs now.
template <class T>
inline Tile<T> held_tile(const Work &work, const Entry &entry, int64_t head_kv, int64_t first,
                         ForwardBuffers<T> &buffers) {
    const PackedTiles<T> tiles(work);
    const int64_t index = first / work.keys_per_tile, count = smaller(work.keys_per_tile, entry.seqlen_k - first);
    T *packed = buffers.held + index * tiles.count;
    if (!buffers.is_held[index]) tiles.pack({work.call, K, entry, head_kv, first, count}, buffers.rows, packed);
    buffers.is_held[index] = true;
    return tiles.tile(entry, head_kv, first, packed);
}

template <class T>
NOINLINE Tile<T> load_tile(const Work &work, const Entry &entry, int64_t head_kv, int64_t first, int64_t count,
                           int64_t terms, ForwardBuffers<T> &buffers) {
    const Call &call = work.call;
    const Sizes<T> &sizes = buffers.sizes;
    T *rows = buffers.rows, *k_t = buffers.k_t, *v = buffers.v;
    const KeySlice keys = {call, K, entry, head_kv, first, count}, values = {call, V, entry, head_kv, first, count};
    if (MAY_HOLD_TILES && work.packed.are_held) return held_tile(work, entry, head_kv, first, buffers);
    if constexpr (MAY_USE_TILES<T>)
        if (terms == 2) {
            T *low_v = v + work.keys_per_tile / 2 * sizes.dim_v;
            load_split_keys(keys, rows, k_t, buffers.keys_stride);
            load_split_values(values, v, low_v);
            return {k_t, v, sizes.dim_v, low_v};
        }
    if (terms == 1) {
        load_keys_bf16x2(keys, rows, k_t, buffers.keys_stride);
        interleave_keys(values, v);
        return {k_t, v, sizes.dim_v, nullptr};
    }
    load_transposed_keys(keys, rows, k_t, buffers.keys_stride);
    Tile<T> tile = {k_t, nullptr, 0, nullptr};
    tile.v = find_values(values, v, tile.v_stride);
    return tile;
}

}  // namespace
