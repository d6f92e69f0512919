// The forward pass by products of pairs: scores of the next rows, and what values add to those before, are multiplied
// while rows are weighed.
#pragma once

#include "key_tiles.h"

namespace {

#if defined(__AVX512BF16__)

// Rows of a block, and the keys of a tile that they see.
struct Group {
    long first, count;  // of the tile
    Tile<float> tile;
    long r0, num_rows;  // no rows: none is left
    Keys keys;
};

// All tiles of keys from `first` to `stop`, or the one tile that there is room for.
inline void forward_tiles_of_pairs(const Work &work, const Block &block, const Entry &entry,
                                   const Scaling<float> &scaling, ForwardBuffers<float> &buffers, long first,
                                   long stop) {
    constexpr long STRIDE = SCORES_STRIDE<float>;
    const Call &call = work.call;
    const long all_rows = rows_of(block), dim = buffers.sizes.dim_v, parts = parts_of_numbers<float>(work);
    const long width = pair_stride<float>(call.head_dim), q_stride = parts * width, p_stride = parts * KEY_PAIRS;
    // The first group that sees any keys, of rows behind those of this one, or of the next tiles.
    auto group_behind = [&](Group group) {
        for (;;) {
            for (long r0 = group.r0 + group.num_rows, n; r0 < all_rows; r0 += n) {
                n = rows_of_group(call, block, r0, GROUP);
                const Keys keys = keys_of_group<float>(call, entry, block, r0, n, group.first, group.count);
                if (keys.stop > keys.first) return Group{group.first, group.count, group.tile, r0, n, keys};
            }
            do {
                group.first += group.count;
                group.count = smaller(work.keys_per_tile, stop - group.first);
                if (group.count <= 0 || work.stopped.load(std::memory_order_relaxed)) return Group{};
            } while (!any_visible(call, entry, block, group.first, group.count));
            group.tile = tile_of<float>(work, entry, block.head_kv, group.first, group.count, parts, buffers);
            group.r0 = group.num_rows = 0;
        }
    };
    auto scores_of = [&](const Group &group, float *s) {
        const float *q = buffers.q + group.r0 * q_stride, *k_t = group.tile.k_t + group.keys.first;
        const long columns = round_up(group.keys.stop - group.keys.first, LANES<float>);
        ProductOfPairs scores{group.num_rows,
                              columns,
                              parts == 1 ? pairs_of(call.head_dim) : width,
                              q,
                              q_stride,
                              k_t,
                              STRIDE,
                              s + group.keys.first,
                              STRIDE,
                              false};
        if (parts == 2) {  // these are exact: all four
            scores.add(q + width, k_t);
            scores.add(q, k_t + width * STRIDE);
            scores.add(q + width, k_t + width * STRIDE);
        }
        return scores;
    };
    ProductOfPairs scores, values;
    Group group = group_behind(Group{first, 0, {}, all_rows, 0, {}});
    scores = scores_of(group, buffers.s);
    scores.finish();
    long dropped = -1;  // the tile of which it is known what dropout keeps
    for (long turn = 0; group.num_rows; turn = 1 - turn) {
        const Group next = group_behind(group);
        float *pairs = buffers.p + turn * GROUP * p_stride;
        scores = scores_of(next, buffers.s + (1 - turn) * GROUP * STRIDE);
        if (call.dropout_steps && dropped != group.first) {
            load_kept(call, entry, block, group.first, group.count, buffers.kept);
            dropped = group.first;
        }
        long row = 0;
        weigh_rows(call, scaling, entry, block, buffers, group.r0, group.num_rows, group.first, group.keys,
                   buffers.s + turn * GROUP * STRIDE, pairs, parts, [&] {
                       prefetch_next_keys(work, entry, block.head_kv, group.first + work.keys_per_tile, group.r0 + row,
                                          group.r0 + row + 1, all_rows);
                       if (++row % STEP_ROWS == 0) (row / STEP_ROWS % 2 ? scores : values).step();
                   });
        scores.finish();
        values.finish();
        const long pair = group.keys.first / 2;
        const float *v = group.tile.v + pair * dim;
        values = ProductOfPairs{group.num_rows,
                                dim,
                                pairs_of(group.keys.stop - group.keys.first),
                                pairs,
                                p_stride,
                                v,
                                dim,
                                buffers.o + group.r0 * dim,
                                dim,
                                true};
        if (parts == 2) {  // the product of both lower parts is below what weights are rounded by
            values.add(pairs + KEY_PAIRS, v);
            values.add(pairs, group.tile.low_v + pair * dim);
        }
        // Sums of the rows that are weighed next are to be complete: they may be rescaled.
        if (next.r0 == group.r0) {
            values.finish();
            values = {};
        }
        group = next;
    }
    values.finish();
}
#endif

}  // namespace
