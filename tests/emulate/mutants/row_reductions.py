"""Mutants of the row reductions and of their gradients."""

from tests.emulate.mutants.mutant import mutant

ROWS = "common/softmax/row_reductions.cuh"
GRADIENTS = "common/softmax/row_reduction_gradients.cuh"
PREPROCESS = "helpers/backward_preprocess.cu"
ROW_SUMS = "helpers/row_sums.cuh"

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
    mutant("the maximum is of base 2", ROWS, "natural || kWide ? largest", "true ? largest", "row reductions"),
    mutant("every row has the first entropy", ROWS, "[row * params.entropy.row_stride]",
           "[0]", "row reductions"),
    # ---- common/softmax/row_reduction_gradients.cuh
    mutant("the logarithm of no weight", GRADIENTS, "max_of(weight, (float)kLeastWeight)", "weight", "row reductions"),
    mutant("the gradient of entropy without its logarithm", GRADIENTS,
           "return ptx::fused(dentropy[row], log_of_weight(weight), "
           "delta);",
           "return delta;", "row reductions", "row reductions sm90"),
    mutant("the logarithm of float32 has no steps", GRADIENTS, "fmaf((float)steps, kLn2, log_m)", "log_m",
           "row reductions float32"),
    mutant("all keys have the gradient of the maximum", GRADIENTS, "key == first_max[row] ?", "first_max[row] >= 0 ?",
           "row reductions", "row reductions deterministic"),
    mutant("statistics of the first head", GRADIENTS, "row_dentropy + first_stats_row(params, batch, head);",
           "row_dentropy + first_stats_row(params, batch, 0);",
           "row reductions"),
    # ---- sm90/backward.cu
    mutant("dentropy of the first rows of a tile", "sm90/backward.cu", "s_dentropy + n * 32",
           "s_dentropy", "row reductions sm90"),
    mutant("dentropy of the first tile", "sm90/backward_dq.cuh", "next.head) + row, kBytesDentropy,",
           "next.head), kBytesDentropy,", "row reductions sm90"),
    # ---- helpers/backward_preprocess.cu
    mutant("the entropy is no part of delta", PREPROCESS,
           "      delta += row_dentropy * entropy[row * params.entropy.row_stride];\n", "", "row reductions"),
    mutant("dentropy of base e", PREPROCESS, "row_dentropy * (kWide ? (Real)1 : (Real)kLn2)", "row_dentropy",
           "row reductions"),
    mutant("rows that do not exist keep what memory had", PREPROCESS, "      reductions.dentropy[row] = 0;\n",
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
