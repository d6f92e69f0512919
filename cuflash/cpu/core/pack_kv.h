// Tiles of keys in the layout that products of the forward pass read: k transposed, v as rows, or both as bf16x2.
#pragma once

#include "softmax.h"

namespace {

template <class T> struct Tile {
    const T *k_t, *v;
    long v_stride;
    const T *low_v;  // the low terms of v, where numbers have two
};

// Loads keys of a tile, transposed; `rows` has space for them as they are.
template <class T>
inline void load_transposed_keys(const Call &call, const Entry &entry, long head_kv, long first, long count, long dim,
                                 T *rows, T *k_t, long keys_stride) {
    const long padded = round_up(count, LANES<T>);
    const T *k = rows;
    long k_stride = dim;
    if (has_whole_rows<T>(call, K, call.head_dim) && count == padded) {
        k = (const T *)key_address(call, K, entry, head_kv, first);
        k_stride = call.strides[K][2];
    } else {
        load_keys(call, K, entry, head_kv, first, count, call.head_dim, rows, dim, padded);
    }
    transpose(k, k_stride, padded, dim, k_t, keys_stride);
}

// Rows of v of a tile, of stride `v_stride`: where they lie, or copied to v. They are read again and again, so they are
// copied where rows have large strides, which fall into the same few sets of the cache, or where their vectors straddle
// lines of the cache, of which each load then reads two.
template <class T>
inline const T *find_values(const Call &call, const Entry &entry, long head_kv, long first, long count, T *v,
                            long &v_stride) {
    const long stride = call.strides[V][2];
    const char *values = key_address(call, V, entry, head_kv, first);
    const bool lie_well = (stride == call.head_dim_v || stride == -call.head_dim_v) && (uintptr_t)values % 64 == 0;
    if (lie_well && has_whole_rows<T>(call, V, call.head_dim_v)) {
        v_stride = stride;
        return (const T *)values;
    }
    v_stride = round_up(call.head_dim_v, LANES<T>);
    load_keys(call, V, entry, head_kv, first, count, call.head_dim_v, v, v_stride, count);
    return v;
}

template <class T>
inline Tile<T> load_tile(const Work &work, const Entry &entry, long head_kv, long first, long count, long terms,
                         ForwardBuffers<T> &buffers) {
    const Call &call = work.call;
    const Sizes<T> &sizes = buffers.sizes;
    T *rows = buffers.rows, *k_t = buffers.k_t, *v = buffers.v;
#if HAS_TILES
    if (terms == 2) {
        T *low_v = v + work.keys_per_tile / 2 * sizes.dim_v;
        load_split_keys(call, entry, head_kv, first, count, (float *)rows, (float *)k_t, buffers.keys_stride);
        load_split_values(call, entry, head_kv, first, count, (float *)v, (float *)low_v);
        return {k_t, v, sizes.dim_v, low_v};
    }
#endif
    if (terms == 1) {
        load_keys_bf16x2(call, K, entry, head_kv, first, count, call.head_dim, rows, k_t, buffers.keys_stride);
        interleave_keys(call, V, entry, head_kv, first, count, call.head_dim_v, v);
        return {k_t, v, sizes.dim_v, nullptr};
    }
    load_transposed_keys(call, entry, head_kv, first, count, sizes.dim, rows, k_t, buffers.keys_stride);
    Tile<T> tile = {k_t, nullptr, 0, nullptr};
    tile.v = find_values(call, entry, head_kv, first, count, v, tile.v_stride);
    return tile;
}

// Fetches a slice of the rows of k and v of the next tile into the second level of the cache, while there is work to
// do: the slice of rows `begin` to `end` among `rows` rows.
inline void prefetch_next_keys(const Work &work, const Entry &entry, long head_kv, long first, long begin, long end,
                               long rows) {
    const Call &call = work.call;
    const long size = size_of(call.kv_dtype), count = smaller(work.keys_per_tile, entry.seqlen_k - first);
    if (count <= 0 || call.strides[K][3] != 1 || call.strides[V][3] != 1) return;
    for (long j = first + begin * count / rows; j < first + end * count / rows; ++j) {
        const char *k = key_address(call, K, entry, head_kv, j), *v = key_address(call, V, entry, head_kv, j);
        for (long x = 0; x < call.head_dim * size; x += 64) __builtin_prefetch(k + x, 0, 2);
        for (long x = 0; x < call.head_dim_v * size; x += 64) __builtin_prefetch(v + x, 0, 2);
    }
}

}  // namespace
