// Tiles of keys as products of the forward pass want them: k transposed, v as rows, or both as pairs. All tiles of a call
// are made once, by jobs before those of queries, where there is room for them; elsewhere each job makes its own.
#pragma once

#include "forward_rows.h"

namespace {

constexpr long PACKED_BYTES = 24 << 20;  // of all tiles of a call, at most

template <class T> struct Tile {
    const T *k_t, *v;
    long v_stride;
    const T *low_v;  // the lower parts of v, where numbers have two
};

// Whether rows of v are used where they lie: rows that are far apart fall into the same few sets of the cache, so those
// are copied, which are read again and again.
template <class T> inline bool uses_v_as_it_lies(const Call &call) {
    return has_whole_rows<T>(call, V, call.head_dim_v) &&
           (call.strides[V][2] == call.head_dim_v || call.strides[V][2] == -call.head_dim_v);
}

// Makes a tile in the memory given; `rows` is room for rows of k.
template <class T>
inline Tile<T> make_tile(const Work &work, const Entry &entry, long head_kv, long first, long count, long parts,
                         T *rows, T *k_t, T *v) {
    const Call &call = work.call;
    const Sizes<T> sizes(call);
    T *low_v = v + work.keys_per_tile / 2 * sizes.dim_v;
#if HAS_TILES
    if (parts == 2) {
        load_split_keys(call, entry, head_kv, first, count, (float *)rows, (float *)k_t);
        load_split_values(call, entry, head_kv, first, count, (float *)v, (float *)low_v);
        return {k_t, v, sizes.dim_v, low_v};
    }
#endif
    if (parts == 1) {
        load_key_pairs(call, K, entry, head_kv, first, count, call.head_dim, rows, k_t);
        interleave_keys(call, V, entry, head_kv, first, count, call.head_dim_v, v);
        return {k_t, v, sizes.dim_v, nullptr};
    }
    const long padded = round_up(count, LANES<T>);
    const T *k = rows;
    long k_stride = sizes.dim;
    if (has_whole_rows<T>(call, K, call.head_dim) && count == padded) {
        k = (const T *)key_address(call, K, entry, head_kv, first);
        k_stride = call.strides[K][2];
    } else {
        load_keys(call, K, entry, head_kv, first, count, call.head_dim, rows, sizes.dim, padded);
    }
    transpose(k, k_stride, padded, sizes.dim, k_t, SCORES_STRIDE<T>);
    if (uses_v_as_it_lies<T>(call))
        return {k_t, (const T *)key_address(call, V, entry, head_kv, first), call.strides[V][2], nullptr};
    load_keys(call, V, entry, head_kv, first, count, call.head_dim_v, v, sizes.dim_v, count);
    return {k_t, v, sizes.dim_v, nullptr};
}

// ---- tiles that all jobs share ---------------------------------------------------------------------------------------

// Numbers of k and of v in a tile; numbers in two parts may turn out to be none.
template <class T> inline long packed_k(const Call &call) {
    const long parts = most_parts<T>(call), of_pairs = parts * pair_stride<T>(call.head_dim);
    return (parts == 1 ? of_pairs : larger(Sizes<T>(call).dim, of_pairs)) * SCORES_STRIDE<T>;
}
template <class T> inline long packed_v(const Work &work) {
    if (uses_v_as_it_lies<T>(work.call) && !most_parts<T>(work.call)) return 0;
    return work.keys_per_tile / (most_parts<T>(work.call) == 1 ? 2 : 1) * Sizes<T>(work.call).dim_v;
}

inline long tiles_of_head(const Work &work) { return ceil_div(work.call.seqlen_k, work.keys_per_tile); }

template <class T> inline T *packed_tile(const Work &work, const Entry &entry, long head_kv, long first) {
    const long tile =
        (entry.index * work.call.num_heads_kv + head_kv) * tiles_of_head(work) + first / work.keys_per_tile;
    return (T *)work.packed + tile * (packed_k<T>(work.call) + packed_v<T>(work));
}

// A tile, which is made in the buffers of a job where jobs do not share tiles.
template <class T>
inline Tile<T> tile_of(const Work &work, const Entry &entry, long head_kv, long first, long count, long parts,
                       ForwardBuffers<T> &buffers) {
    if (!work.packed)
        return make_tile<T>(work, entry, head_kv, first, count, parts, buffers.rows, buffers.k_t, buffers.v);
    const Call &call = work.call;
    const T *k_t = packed_tile<T>(work, entry, head_kv, first), *v = k_t + packed_k<T>(call);
    if (!parts && uses_v_as_it_lies<T>(call))
        return {k_t, (const T *)key_address(call, V, entry, head_kv, first), call.strides[V][2], nullptr};
    return {k_t, v, buffers.sizes.dim_v, v + work.keys_per_tile / 2 * buffers.sizes.dim_v};
}

template <class T> void pack_job(Work &work, char *memory, long job) {
    const Call &call = work.call;
    const long tiles = tiles_of_head(work), first = job % tiles * work.keys_per_tile, head = job / tiles;
    const Entry &entry = work.entries[head / call.num_heads_kv];
    const long head_kv = head % call.num_heads_kv, count = smaller(work.keys_per_tile, entry.seqlen_k - first);
    if (count <= 0) return;
    ForwardBuffers<T> buffers(work, memory);
    T *k_t = packed_tile<T>(work, entry, head_kv, first);
    make_tile<T>(work, entry, head_kv, first, count, parts_of_numbers<T>(work), buffers.rows, k_t,
                 k_t + packed_k<T>(call));
}

// Whether tiles are worth to be shared, and can be: all jobs have to begin with the same ones.
template <class T> inline bool shares_tiles(const Work &work, long blocks_of_head) {
    const Call &call = work.call;
    if (blocks_of_head < 2 || call.window_left < NO_BOUND || call.arrays[CU_SEQLENS_Q]) return false;
    const double tiles = double(call.batch) * call.num_heads_kv * tiles_of_head(work);
    return tiles * (packed_k<T>(call) + packed_v<T>(work)) * sizeof(T) <= PACKED_BYTES;
}

// Fetches a share of the rows of k and v of the next tile into the second level of the cache, while there is work to do:
// that of rows from `begin` to `end` of `rows`. Tiles that are made before lie in one piece, which processors foresee.
inline void prefetch_next_keys(const Work &work, const Entry &entry, long head_kv, long first, long begin, long end,
                               long rows) {
    const Call &call = work.call;
    const long size = size_of(call.kv_dtype), count = smaller(work.keys_per_tile, entry.seqlen_k - first);
    if (work.packed || count <= 0 || call.strides[K][3] != 1 || call.strides[V][3] != 1) return;
    for (long j = first + begin * count / rows; j < first + end * count / rows; ++j) {
        const char *k = key_address(call, K, entry, head_kv, j), *v = key_address(call, V, entry, head_kv, j);
        for (long x = 0; x < call.head_dim * size; x += 64) __builtin_prefetch(k + x, 0, 2);
        for (long x = 0; x < call.head_dim_v * size; x += 64) __builtin_prefetch(v + x, 0, 2);
    }
}

}  // namespace
