"""Mutants of the kernels that reduce the attention weights."""

from tests.emulate.mutants.mutant import mutant

COLUMNS = "common/softmax/columns.cuh"
SM80 = "sm80/column_sums.cu"
SM90 = "sm90/column_sums.cu"
TOP = "sm80/top_keys.cu"

# fmt: off
MUTANTS = (
    # ---- common/softmax/columns.cuh
    mutant("a sum has the sign of the statistic", COLUMNS, "x - weight * negative", "x + weight * negative", "columns"),
    mutant("the maximum is the last weight", COLUMNS, "max_of(x, weight)", "weight", "columns"),
    mutant("two of four lanes meet", COLUMNS, "mask <= 2; mask *= 2", "mask <= 1; mask *= 2", "columns"),
    mutant("rows of a key take turns", COLUMNS, "Real& x = value[m][i / 2];", "Real& x = value[m][i % 2];", "columns"),
    mutant("weights of hidden pairs", COLUMNS, "  weights.hide_products(p, masked, row_of, key_of);\n", "", "columns"),
    mutant("factors of the other query", COLUMNS, "stats[2 + i % 2]);", "stats[2 + i / 2]);", "columns"),
    mutant("large rows are taken for others", COLUMNS, "const bool large = is_of_large(first[0]);",
           "const bool large = false;", "columns large"),
    # ---- sm80/column_sums.cu
    mutant("no wait before a product", SM80, "    ptx::copy_async_wait<kNumStages - 1>();\n", "", "columns"),
    mutant("no barrier before a product", SM80, "wait<kNumStages - 1>();\n    ptx::sync_block();\n",
           "wait<kNumStages - 1>();\n", "columns"),
    mutant("no barrier before the next load", SM80, "first_key + warp_key + fragment_row(), columns);\n"
           "    ptx::sync_block();\n", "first_key + warp_key + fragment_row(), columns);\n", "columns"),
    mutant("the loop does not advance", SM80, "    current.advance(tiles);\n", "", "columns"),
    mutant("keys past the last are stored", SM80, "fragment_column() == 0 && key < stop", "fragment_column() == 0",
           "columns"),
    mutant("statistics of the first tile", SM80, "batch, head) + first_row * 2 +", "batch, head) +", "columns"),
    # ---- sm90/column_sums.cu
    mutant("keys of the first consumer", SM90, "rows_k = shared.k + index * 64 * kLineBytes", "rows_k = shared.k",
           "columns sm90"),
    mutant("no wait for K", SM90, "  if (work.num_steps > 0) shared.k_full.wait(0);\n", "", "columns sm90"),
    mutant("no wait for Q", SM90, "    shared.ring.full(at).wait(at.parity);\n", "", "columns sm90"),
    mutant("stages are not given back", SM90, "    arrive_as_warp(shared.ring.empty(at));\n", "", "columns sm90"),
    mutant("a stage is filled too early", SM90, "shared.ring.empty(at).wait(at.parity ^ 1);\n",
           "shared.ring.empty(at).wait(at.parity);\n", "columns sm90"),
    mutant("rows of the first group", SM90, "tile.m_block * kBlockM + kFirst + fragment_column()",
           "tile.m_block * kBlockM + fragment_column()", "columns sm90"),
    mutant("statistics of the first group", SM90, "at.stage * kBytesStats + kFirst * 8", "at.stage * kBytesStats",
           "columns sm90"),
    # ---- sm80/top_keys.cu
    mutant("no wait for keys", TOP, "    ptx::copy_async_wait<kNumStages - 1>();\n", "", "top"),
    mutant("keys are replaced too early", TOP, "stage * kBytesK));\n    ptx::sync_block();\n", "stage * kBytesK));\n",
           "top"),
    mutant("of equal scores a later key", TOP, "key < other.key)", "key > other.key)", "top ties"),
    mutant("no space is made", TOP, "    rows.make_space(s_buffers, warp_row, count);\n", "", "top"),
    mutant("what is sorted is not cut", TOP, "      sort(half, s_buffers, warp_row, count, kMost);\n", "", "top equal"),
    mutant("lanes append at one place", TOP, "int at = size[half] + sum_before(found);", "int at = size[half];", "top"),
    mutant("buffers do not grow", TOP, "      size[half] += row_sum(found);\n", "", "top"),
    mutant("lanes keep at one place", TOP, "int at = sum_before(kept);", "int at = 0;", "top"),
    mutant("fewer than are wanted reach a threshold", TOP, "if (found >= count)", "if (found > 0)", "top"),
    mutant("the threshold is no candidate", TOP, "kept += x.score >= least", "kept += x.score > least", "top equal"),
    mutant("sequences are ascending", TOP, "((at & distance) == 0) == ((at & length) == 0)", "(at & distance) == 0",
           "top"),
    mutant("a lane exchanges nothing", TOP, "        if (length > 32) exchange_in_lane<32>(length);\n", "", "top many"),
    mutant("a lane exchanges half", TOP, "        if (length > 64) exchange_in_lane<64>(length);\n", "", "top equal"),
    mutant("keys of a sequence", TOP, "(i32)sorted.own[j].key + first_key", "(i32)sorted.own[j].key", "top packed"),
    mutant("places without a key keep their index", TOP, "at < size ? (i32)sorted", "true ? (i32)sorted", "top packed"),
    mutant("a row in the warp's place", TOP, "write_row<decltype(capacity)::value>(buffer, size,",
           "write_row<decltype(capacity)::value>(Buffer(s_buffers, warp_row), size,", "top"),
)
# fmt: on
