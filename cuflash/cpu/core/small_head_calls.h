// Which calls have small heads, which are computed whole, and what a head costs in addition to multiplications.
#pragma once

#include "call.h"

namespace {

constexpr int64_t SMALL_LENGTH = 128;  // queries and keys of a small head at most
constexpr int64_t SMALL_DIM = 256;     // and its dimensions
constexpr int64_t MANY_ROWS = 5;       // queries that are worth a vector, where there are more keys than SINGLE_KEYS
constexpr int64_t SINGLE_KEYS = 16;

inline bool is_small(const Call &call) {
    constexpr Array NOT_SERVED[] = {BIAS, MASK, BLOCK_MASK, BLOCK_TABLE, ALIBI_SLOPES, CU_SEQLENS_Q, DSCALE, ROW_SUMS};
    for (Array array : NOT_SERVED)
        if (call.sizes[array]) return false;
    // Other entries of a call may be longer, and then none of them is computed so.
    return !call.batch_invariant && !has_cap(call) && !has_float8(call) && call.scale > 0 && !call.dropout_steps &&
           call.num_heads > 0 && call.seqlen_q > 0 && call.seqlen_q <= SMALL_LENGTH && call.seqlen_k <= SMALL_LENGTH &&
           call.head_dim <= SMALL_DIM && call.head_dim_v <= SMALL_DIM &&
           (call.seqlen_q >= MANY_ROWS || call.seqlen_k <= SINGLE_KEYS);
}

// In nanoseconds, as measured with AVX-512.
inline double overhead_of_head_ns(const Call &call) {
    const double forward = is_small(call) ? 20 + 10 * double(call.seqlen_q) : 500;
    return forward * (call.is_backward ? 2.5 : 1);
}

}  // namespace
