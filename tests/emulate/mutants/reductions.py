"""Mutants of the kernels that reduce the attention weights."""

from tests.emulate.mutants.mutant import mutant

COLUMNS = "common/softmax/columns.cuh"
SM80 = "sm80/column_sums.cu"
SM90 = "sm90/column_sums.cu"
CANDIDATES = "common/softmax/candidates.cuh"
TOP = "sm80/top_keys.cu"
TOP_SM90 = "sm90/top_keys.cu"
SCAN_SM90 = "sm90/key_scan.cuh"

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
    mutant("no barrier before the next load", SM80, "lane_key, columns);\n    ptx::sync_block();\n",
           "lane_key, columns);\n", "columns"),
    mutant("the loop does not advance", SM80, "    current.advance(tiles);\n", "", "columns"),
    mutant("keys past the last are stored", SM80, "fragment_column() == 0 && key < stop", "fragment_column() == 0",
           "columns"),
    mutant("statistics of the first tile", SM80, "batch, head) + first_row * 2 +", "batch, head) +", "columns"),
    # ---- sm90/column_sums.cu
    mutant("keys of the first consumer", SM90, "rows_k = shared.k + index * 64 * kLineBytes", "rows_k = shared.k",
           "columns sm90"),
    mutant("no wait for K", SM90, "  if (work.num_steps > 0) shared.k_full.wait(0);\n", "", "columns sm90"),
    mutant("no wait for Q", SM90, "    shared.ring.full(at).wait(at.parity);\n", "", "columns sm90"),
    mutant("stages are not given back", SM90, "    arrive_after_reads(shared.ring.empty(at));\n", "", "columns sm90"),
    mutant("a stage is filled too early", SM90, "shared.ring.empty(at).wait(at.parity ^ 1);\n",
           "shared.ring.empty(at).wait(at.parity);\n", "columns sm90"),
    mutant("rows of the first group", SM90, "tile.m_block * kBlockM + kFirst + fragment_column()",
           "tile.m_block * kBlockM + fragment_column()", "columns sm90"),
    mutant("statistics of the first group", SM90, "at.stage * kBytesStats + kFirst * 8", "at.stage * kBytesStats",
           "columns sm90"),
    # ---- common/softmax/candidates.cuh
    mutant("of equal scores a later key", CANDIDATES, "key < other.key)", "key > other.key)", "top ties"),
    mutant("maxima of one key of two", CANDIDATES, "max_of(largest, max_of(s[n][2 * half], s[n][2 * half + 1]))",
           "max_of(largest, s[n][2 * half])", "top",
           escapes="fewer keys reach the threshold for certain, and no fewer than are wanted"),
    mutant("groups share one place", CANDIDATES, "if (++next_maxima == kMaxima) next_maxima = 0;", "", "top",
           escapes="no threshold is found, and buffers are sorted more often"),
    mutant("places of maxima are not cleared", TOP, "    candidates.clear_maxima();\n", "", "top"),
    mutant("fewer than are wanted reach a threshold", CANDIDATES, "if (above >= count)", "if (above > 0)", "top"),
    mutant("the threshold does not pass", CANDIDATES,
           "found - (max_of(found, -found) * kOfThreshold + kLeastOfThreshold)", "found", "top equal"),
    mutant("what found no space is lost", CANDIDATES, "    if (!ptx::any_lane(next[0] ==",
           "    if (true || !ptx::any_lane(next[0] ==", "top near"),
    mutant("a tile is appended twice", CANDIDATES, "    next[0] = before[0], next[1] = before[1];\n", "", "top near"),
    mutant("n-tiles do not move", CANDIDATES, "left[next - 1][i] = left[next][i]", "left[next][i] = left[next][i]",
           "top near"),
    mutant("no space is made", CANDIDATES, "      make_space();\n", "", "top near"),
    mutant("rows are sorted before all of it is there", CANDIDATES, "void make_space() {\n    ptx::sync_warp();",
           "void make_space() {", "top near", escapes="lanes meet in the ballot, too"),
    mutant("what is sorted is stored while it is read", CANDIDATES, "of_row(row); });\n      ptx::sync_warp();",
           "of_row(row); });", "top near", escapes="lanes meet while they sort, too"),
    mutant("a lane keeps what others have", CANDIDATES, "(count - (int)lane_index() % 4 + 3) / 4", "count / 4",
           "top near"),
    mutant("a list ends later", CANDIDATES, "if (list == j && i >= size[j])", "if (list == j && i > size[j])", "top"),
    mutant("sequences are ascending", CANDIDATES, "((at & distance) == 0) == ((at & length) == 0)",
           "(at & distance) == 0",
           "top"),
    mutant("a lane exchanges nothing", CANDIDATES, "        if (length > 32) exchange_in_lane<32>(length);\n", "",
           "top many"),
    mutant("a lane exchanges half", CANDIDATES, "        if (length > 64) exchange_in_lane<64>(length);\n", "",
           "top many"),
    mutant("rows are written before all of it is there", CANDIDATES, "(Write write) const {\n    ptx::sync_warp();",
           "(Write write) const {", "top", escapes="lanes meet when they exchange sizes, too"),
    mutant("keys of a sequence", CANDIDATES, "(i32)x.key + first_of_keys", "(i32)x.key", "top packed"),
    mutant("places without a key keep their index", CANDIDATES, "indices[place] = is_key ?", "indices[place] = true ?",
           "top packed"),
    mutant("rows past the last are written", CANDIDATES, "    if (first_row + row >= seqlen_q) return;\n", "", "top"),
    # ---- sm80/top_keys.cu
    mutant("no wait for keys", TOP, "      ptx::copy_async_wait<kNumStages - 1>();\n", "", "top"),
    mutant("keys are replaced too early", TOP, "stage * kBytesK));\n      ptx::sync_block();\n", "stage * kBytesK));\n",
           "top"),
    mutant("warps share candidates", TOP, " + warp_index() * kBytesCandidates", "", "top"),
    mutant("rows of the first warp", TOP, "tile.first_row + scan.warp_row,", "tile.first_row,", "top"),
    # ---- sm90/top_keys.cu
    mutant("queries of the first consumer", TOP_SM90, "shared.q + index * 64 * kLineBytes", "shared.q", "top sm90"),
    mutant("no wait for Q", TOP_SM90, "  if (tile.keys.start < tile.keys.stop) shared.q_full.wait(0);\n", "",
           "top sm90"),
    mutant("no wait for K", TOP_SM90, "      shared.ring.full(at).wait(at.parity);\n", "", "top sm90"),
    mutant("stages are not given back", SCAN_SM90, "    arrive_as_warp(shared.ring.empty(at));\n", "", "top sm90"),
    mutant("a stage is filled too early", TOP_SM90, "shared.ring.empty(at).wait(at.parity ^ 1);\n",
           "shared.ring.empty(at).wait(at.parity);\n", "top sm90"),
    mutant("keys come once", TOP_SM90, "; pass < 2; ++pass)", "; pass < 1; ++pass)", "top sm90"),
    mutant("warps share candidates", TOP_SM90, " + warp_index() * kBytesCandidates", "", "top sm90"),
    mutant("queries of the first sequence", TOP_SM90, "query_start_of(tile.work.batch) + tile.first_row",
           "tile.first_row",
           "top sm90 packed"),
    mutant("keys of the first sequence", TOP_SM90,
           "tile.key_stop,\n                         key_start_of(tile.work.batch))",
           "tile.key_stop)", "top sm90 packed"),
)
# fmt: on
