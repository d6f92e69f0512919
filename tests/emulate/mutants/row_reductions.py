"""Mutants of the row reductions and of their gradients."""

from tests.emulate.mutants.mutant import mutant

ROWS = "common/softmax/row_reductions.cuh"
GRADIENTS = "common/softmax/row_reduction_gradients.cuh"
PREPROCESS = "helpers/backward_preprocess.cu"
ROW_SUMS = "helpers/row_sums.cuh"
FIRST_MAXIMA = "sm90/first_maxima.cu"
MAIN, DQ = "sm90/backward.cu", "sm90/backward_dq.cuh"

# fmt: off
MUTANTS = (
    # ---- common/softmax/row_reductions.cuh
    mutant("terms of hidden pairs count", ROWS, "may_be_hidden ? max_of(exponent, kLeastExponent) : exponent",
           "exponent",
           "row reductions"),
    mutant("the moment is not rescaled", ROWS, "factor == 0 ? 0 : factor * ptx::fused(exponent, row_sum, "
           "moment[m][half])",
           "moment[m][half]", "row reductions"),
    mutant("the moment keeps its row max", ROWS, "factor * ptx::fused(exponent, row_sum, moment[m][half])",
           "factor * moment[m][half]", "row reductions"),
    mutant("the largest weight is not rescaled", ROWS, "ptx::float_of((u32)weight_bits[m][half]) * factor",
           "ptx::float_of((u32)weight_bits[m][half])", "row reductions sm90 spread"),
    mutant("the second of two weights is left out", ROWS, ", (i32)ptx::bits_of(second)", ", (i32)ptx::bits_of(first)",
           "row reductions sm90 spread"),
    mutant("the maxima of tiles are left out", ROWS, "max_of(largest[m][half], tile_max)", "tile_max",
           "row reductions"),
    mutant("the moment of a tile is left out", ROWS, "moment[m][half] += tile.moment[m][half];", "",
           "row reductions sm90 spread"),
    mutant("half of the lanes of a row have its maximum", ROWS, "for (int mask = 1; mask < 4;",
           "for (int mask = 1; mask < 2;",
           "row reductions"),
    mutant("the entropy is of base 2", ROWS, "(kWide ? (Real)1 : (Real)kLn2);", "(Real)1;", "row reductions"),
    mutant("the maximum is of base 2", ROWS, "natural || kWide ? own", "true ? own", "row reductions"),
    mutant("every row has the first entropy", ROWS, "[row * params.entropy.row_stride]",
           "[0]", "row reductions"),
    # ---- common/softmax/row_reduction_gradients.cuh
    mutant("the logarithm of no weight", GRADIENTS, "weight + (float)kLeastWeight", "weight", "row reductions"),
    mutant("the gradient of entropy without its logarithm", GRADIENTS,
           "return ptx::fused(dentropy[row], log_of_weight(weight), "
           "delta);",
           "return delta;", "row reductions", "row reductions sm90"),
    mutant("the logarithm of float32 has no steps", GRADIENTS, "fmaf((float)steps, kLn2, log_m)", "log_m",
           "row reductions float32"),
    mutant("all keys have the gradient of the maximum", GRADIENTS, "key == first_max[row] ?", "first_max[row] >= 0 ?",
           "row reductions", "row reductions deterministic"),
    mutant("statistics of the first head", GRADIENTS, "const i64 first = first_stats_row(params, batch, head);",
           "const i64 first = first_stats_row(params, batch, 0);",
           "row reductions"),
    # ---- sm90/backward.cu
    mutant("dentropy of the first rows of a tile", MAIN, "s_dh + n * 32", "s_dh", "row reductions sm90"),
    mutant("dentropy of the first rows, with dropout", MAIN, "s_dentropy + n * 32", "s_dentropy",
           "row reductions sm90 dropout"),
    mutant("dP replaces what it begins with", MAIN, "rows_v, s_do, kEntropyInDp", "rows_v, s_do",
           "row reductions sm90"),
    mutant("infinite values of keys make infinite exponents", "sm90/backward_weights.cuh", "kClampsExponents || ", "",
           "row reductions sm90 keys"),
    mutant("hidden pairs have infinite exponents", "sm90/backward_weights.cuh", "if (!may_be_hidden) return;",
           "return;", "row reductions sm90"),
    mutant("rows without weights have infinite exponents", GRADIENTS, "kTakesDentropy && kPairsStats", "false",
           "row reductions sm90"),
    mutant("dentropy of the first tile", DQ, "of_head.dentropy + row",
           "of_head.dentropy", "row reductions sm90"),
    mutant("dmax of the first rows of a tile", MAIN, "ptx::load_shared_x2(s_dmax + n * 32, dmax);",
           "ptx::load_shared_x2(s_dmax, dmax);", "first maxima"),
    mutant("the second key of a lane never has the maximum", MAIN, "lane_key + i / 2 * 8) ds[n][i] += dmax",
           "lane_key) ds[n][i] += dmax", "first maxima"),
    mutant("only every other query is looked at", MAIN, "(u32)(keys[0] - own) < 16 || ", "", "first maxima few"),
    mutant("maxima of the first tile", DQ, "of_head.first_max + row", "of_head.first_max", "first maxima"),
    mutant("dmax of the first tile", DQ, "of_head.dmax + row", "of_head.dmax", "first maxima"),
    # ---- sm90/first_maxima.cu
    mutant("the last of equal scores of a lane", FIRST_MAXIMA, "for (int n = kNTiles - 1; n >= 0; --n)",
           "for (int n = 0; n < kNTiles; ++n)", "first maxima ties"),
    mutant("two lanes of four have the maximum", FIRST_MAXIMA, "mask < 4;", "mask < 2;", "first maxima"),
    mutant("the last of lanes with equal scores", FIRST_MAXIMA, "other_key < key", "other_key > key",
           "first maxima ties"),
    mutant("negative scores in the order of integers", FIRST_MAXIMA, "bits < 0 && score < 0", "false",
           "first maxima few"),
    mutant("every consumer has the first queries", FIRST_MAXIMA, "shared.q + index * kBytesOwnQ", "shared.q",
           "first maxima"),
    mutant("every box has the same keys", FIRST_MAXIMA, "n_block * kBlockN + i * kBoxKeys", "n_block * kBlockN",
           "first maxima boxes"),
    mutant("keys after a query have its maximum", FIRST_MAXIMA, "|| n_block >= own.full_stop", "", "first maxima long"),
    mutant("keys of hidden blocks have the maximum", FIRST_MAXIMA, "kHasBlockMask || n_block", "n_block",
           "first maxima blocks"),
    mutant("K is given back before it is read", "sm90/key_scan.cuh",
           "    wait_for<0>(s[0]);\n    arrive_as_warp(shared.ring.empty(at));",
           "    arrive_as_warp(shared.ring.empty(at));\n    wait_for<0>(s[0]);", "first maxima long"),
    mutant("tiles that a consumer skips are kept", FIRST_MAXIMA,
           "      arrive_as_warp(shared.ring.empty(at));\n      continue;", "      continue;", "first maxima long"),
    # ---- helpers/backward_preprocess.cu
    mutant("the entropy is no part of delta", PREPROCESS,
           "      delta += row_dentropy * entropy[row * params.entropy.row_stride];\n", "", "row reductions"),
    mutant("dentropy of base e", PREPROCESS, "row_dentropy * (kWide ? (Real)1 : (Real)kLn2)", "row_dentropy",
           "row reductions"),
    mutant("rows that do not exist keep what memory had", PREPROCESS, "      stored.dentropy[row] = 0;\n",
           "      ;\n",
           "row reductions"),
    # ---- helpers/row_sums.cuh
    mutant("the last of the largest scores", ROW_SUMS, "if (s[0][n][i] > largest[i / 2])",
           "if (s[0][n][i] < largest[i / 2])",
           "row reductions"),
    mutant("lanes do not compare their largest scores", ROW_SUMS,
           "for (int mask = 1; mask < 4; mask *= 2) {\n      const Real other =",
           "for (int mask = 4; mask < 4; mask *= 2) {\n      const Real other =", "row reductions"),
    mutant("the first columns again", ROW_SUMS, "const int column = 32 * i + 4 * fragment_column();",
           "const int column = 4 * fragment_column();", "row reductions"),
    mutant("keys have other columns", ROW_SUMS, "keys[i][n].word[word], keys[i][n].word[word + 1]",
           "keys[i][n].word[word + 1], keys[i][n].word[word]", "row reductions"),
)
# fmt: on
