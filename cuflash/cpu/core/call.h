// One call, as Python fills it in: sizes, strides in elements, options and addresses. `cuflash/cpu/core.py` mirrors it.
#pragma once

#include <cstdint>

enum Dtype : int64_t { FLOAT16, BFLOAT16, FLOAT32, FLOAT64, FLOAT8_E4M3FN, FLOAT8_E5M2 };

// clang-format off
enum Array {
    Q, K, V, OUT, DOUT, DQ, DK, DV, LSE, DLSE, MAX, DMAX, ENTROPY, DENTROPY, BIAS, MASK, BLOCK_MASK, ALIBI_SLOPES,
    KV_LENGTHS, SINKS, CU_SEQLENS_Q, CU_SEQLENS_K, BLOCK_TABLE, Q_SCALE, K_SCALE, V_SCALE, ROW_SUMS, DBIAS,
    DALIBI_SLOPES, DSCALE, DSOFTCAP, DSINKS, COLUMN_SUMS, COLUMN_MAX, KEY_INDICES, KEY_WEIGHTS,
    SCALE, SOFTCAP,  // numbers of a call; their tangents are arrays
    NUM_ARRAYS
};
// clang-format on

constexpr int64_t NO_BOUND = INT64_C(1) << 40;  // the bound of a window without one; larger than any length

// A pass with tangents has another of these structs after the first, with the same sizes and options: its arrays are
// the tangents of arrays, each under the name of what it is the tangent of.
struct Call {
    int64_t bytes;  // of this struct, as a check
    int64_t is_backward;
    int64_t has_tangents;
    int64_t finds_row_sums;  // only: ROW_SUMS is the result of a backward pass, not an operand
    int64_t dtype, kv_dtype, bias_dtype;
    int64_t batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v;
    int64_t diagonal, window_left, window_right;
    int64_t has_own_diagonals;  // of packed sequences, or of entries by kv_lengths: each ends at its own last key
    int64_t page_size;          // 0 without pages
    int64_t block_rows, block_keys;
    int64_t lengths_are_64_bit;                    // kv_lengths
    int64_t dropout_steps;                         // the dropout probability, in steps of 1 / 65536
    int64_t dropout_row, dropout_column;           // of the first query and the first key
    int64_t dropout_head, dropout_heads;           // of the first head; the step from one batch entry to the next
    int64_t batch_invariant;                       // the bits of an entry's results depend on nothing but the entry
    int64_t num_top_keys;                          // of a row, whose indices and weights are wanted
    int64_t num_given;                             // how many arrays are given
    double scale, softcap, kept_scale;             // softcap is 0 without one
    int64_t sizes[NUM_ARRAYS];                     // of an element in bytes; 0 where there is no array
    int64_t strides[NUM_ARRAYS][4];                // 0 on axes that are broadcast or of length 1
    int64_t begins[NUM_ARRAYS], ends[NUM_ARRAYS];  // of the memory of an array, in bytes from its address
    int64_t given[NUM_ARRAYS];                     // which arrays these are, in the order in which Python gives them
    // The rest changes from call to call.
    uint64_t seed, offset;
    char *arrays[NUM_ARRAYS];  // null where there is none
};

// How many heads of q share a head of k.
inline int64_t group_of(const Call &call) { return call.num_heads_kv ? call.num_heads / call.num_heads_kv : 0; }
// How long the batch axis of the arrays is: packed sequences share one.
inline int64_t batch_of_arrays(const Call &call) { return call.arrays[CU_SEQLENS_Q] ? 1 : call.batch; }
// The queries of all heads and batch entries.
inline int64_t num_rows_of(const Call &call) { return batch_of_arrays(call) * call.num_heads * call.seqlen_q; }
// Whether k and v are fp8.
inline bool has_float8(const Call &call) { return call.kv_dtype >= FLOAT8_E4M3FN; }
inline bool has_cap(const Call &call) { return call.softcap != 0; }
inline bool has_row_reductions(const Call &call) { return call.arrays[MAX] || call.arrays[ENTROPY]; }
// Whether the call reduces the weights, which it computes again from lse.
inline bool reduces_weights(const Call &call) {
    return call.sizes[COLUMN_SUMS] || call.sizes[COLUMN_MAX] || call.sizes[KEY_INDICES];
}
