// The forward pass by products of bf16x2. While the scores of one group of rows become weights, the scores of the next
// group and the values of the group before are multiplied.
#pragma once

#include "gemm_bf16x2.h"
#include "pack_kv.h"

namespace {

// Rows of a block, and the keys of a tile that they attend to.
struct Group {
    int64_t r0, num_rows;  // num_rows is 0 if no group is left
    Keys keys;
};

inline void forward_tile_bf16(const Work &work, const Block &block, const Entry &entry, const Scaling<float> &scaling,
                              ForwardBuffers<float> &buffers, int64_t first, int64_t count) {
    constexpr int64_t STRIDE = SCORES_STRIDE<float>;
    const Call &call = work.call;
    const int64_t all_rows = rows_of(block), dim = buffers.sizes.dim_v, terms = num_terms<float>(work);
    const int64_t width = bf16x2_stride<float>(call.head_dim), q_stride = terms * width,
                  p_stride = terms * KEYS_BF16X2_STRIDE;
    const Tile<float> tile = load_tile(work, entry, block.head_kv, first, count, terms, buffers);
    if (call.dropout_steps) load_kept(call, entry, block, first, count, buffers.kept);
    // The first group from a row on that attends to any of these keys.
    auto group_from = [&](int64_t r0) {
        for (int64_t n; r0 < all_rows; r0 += n) {
            n = rows_of_group(call, block, r0, GROUP);
            const Keys keys = keys_of_group<float>(call, entry, block, r0, n, first, count);
            if (keys.stop > keys.first) return Group{r0, n, keys};
        }
        return Group{all_rows, 0, Keys{0, 0}};
    };
    auto scores_of = [&](const Group &group, float *s) {
        const float *q = buffers.q + group.r0 * q_stride, *k_t = tile.k_t + group.keys.first;
        const float *low_q = q + width, *low_k_t = k_t + width * buffers.keys_stride;
        const int64_t columns = round_up(group.keys.stop - group.keys.first, LANES<float>);
        Bf16x2Product scores{group.num_rows,
                             columns,
                             terms == 1 ? bf16x2_count(call.head_dim) : width,
                             terms == 1 ? q : low_q,
                             q_stride,
                             terms == 1 ? k_t : low_k_t,
                             buffers.keys_stride,
                             s + group.keys.first,
                             STRIDE,
                             false};
        if (terms == 2) {  // q and k are split exactly, so all four products count; sums of large ones are rounded most
            scores.add(low_q, k_t);
            scores.add(q, low_k_t);
            scores.add(q, k_t);
        }
        return scores;
    };
    Bf16x2Product scores, values;
    Group group = group_from(0);
    scores = scores_of(group, buffers.s);
    scores.finish();
    for (int64_t turn = 0; group.num_rows; turn = 1 - turn) {
        const Group next = group_from(group.r0 + group.num_rows);
        float *p = buffers.p + turn * GROUP * p_stride;
        scores = scores_of(next, buffers.s + (1 - turn) * GROUP * STRIDE);
        int64_t row = 0;
        const int64_t here = group.keys.stop - group.keys.first;
        const ScoreTile tile_of_group = {
            call, entry, block, group.r0, group.num_rows, first + group.keys.first, here, round_up(here, LANES<float>),
            here};
        softmax_rows(scaling, tile_of_group, group.keys.first, buffers, buffers.s + turn * GROUP * STRIDE, p, terms,
                     [&] {
                         if (++row % STEP_ROWS == 0) (row / STEP_ROWS % 2 ? scores : values).step();
                     });
        scores.finish();
        values.finish();
        const int64_t first_pair = group.keys.first / 2;
        const float *v = tile.v + first_pair * dim;
        values = Bf16x2Product{group.num_rows,
                               dim,
                               bf16x2_count(group.keys.stop - group.keys.first),
                               p,
                               p_stride,
                               v,
                               dim,
                               buffers.o + group.r0 * dim,
                               dim,
                               true};
        if (terms == 2) {  // the product of both low terms is below the rounding errors of weights
            values.add(p + KEYS_BF16X2_STRIDE, v);
            values.add(p, tile.low_v + first_pair * dim);
        }
        group = next;
    }
    values.finish();
}

}  // namespace
