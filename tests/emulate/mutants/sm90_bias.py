"""Mistakes in the gradient of a bias of pairs on compute capability 9.0."""

from tests.emulate.mutants.planting import mutant

BIAS = "sm90/backward_bias.cu"

# fmt: off
MUTANTS = (
    mutant("operands are overwritten", BIAS, "        shared.ring.empty(at).wait(at.parity ^ 1);\n        full.arrive",
           "        full.arrive", "dbias sm90"),
    mutant("a tile of bias is overwritten", BIAS, "        shared.bias_ring.empty(bias_at).wait(bias_at.parity ^ 1);\n",
           "", "dbias sm90"),
    mutant("each tile of pairs brings its bias", BIAS, "        has_bias = true;\n", "", "dbias sm90"),
    mutant("the bias is given back at once", BIAS, "if (last) arrive_as_warp", "if (first) arrive_as_warp",
           "dbias sm90"),
    mutant("nobody waits for the bias", BIAS,
           "    if (first) shared.bias_ring.full(bias_at).wait(bias_at.parity);\n", "", "dbias sm90"),
    mutant("numbers of another tile", BIAS, "shared.numbers + stage * kBytesNumbers", "shared.numbers", "dbias sm90"),
    mutant("boxes lie on each other", BIAS, "tile + (c * rows + row) * kLineBytes", "tile + c * rows * kLineBytes",
           "dbias sm90"),
    mutant("key/value heads alternate", BIAS, "now.head / (common.num_heads / common.num_heads_kv)",
           "now.head % common.num_heads_kv", "dbias sm90"),
    mutant("both consumers have the same queries", BIAS, "descriptor_of(stage + index * 64 * kLineBytes)",
           "descriptor_of(stage)", "dbias sm90", "dbias float32"),
    mutant("parts of queries lie on each other", BIAS, "stage + part * kPartA, of", "stage, of", "dbias float32"),
    mutant("parts of keys lie on each other", BIAS, "stage + kBytesA + part * kPartB, of", "stage + kBytesA, of",
           "dbias float32"),
    mutant("one part for all", BIAS, "const int entry = part * common.batch + batch;", "const int entry = batch;",
           "dbias float32"),
    mutant("parts meet the same parts of the other factor", BIAS, "b + part_product(i).b", "b + part_product(i).a",
           "dbias float32"),
    mutant("lse of the upper row for both, of float32", BIAS, "score.factor) - lse[i / 2])", "score.factor) - lse[0])",
           "dbias float32"),
    mutant("delta of the upper row for both", BIAS, "kept_scale, delta[i / 2]);", "kept_scale, delta[0]);",
           "dbias sm90"),
    mutant("lse of the upper row for both", BIAS, "plus_addend(-lse[i / 2])", "plus_addend(-lse[0])", "dbias sm90"),
    mutant("what is hidden has weights", BIAS, "          if (is_hidden(n, i)) s[0][n][i] = 0.0f;\n", "          ;\n",
           "dbias sm90 shared"),
    mutant("all columns drop alike", BIAS, "dropout.of(row, key, n)", "dropout.of(row, key)", "dbias sm90"),
    mutant("every block sums the first share", BIAS, "take_share(params, split(params),", "take_share(params, 0,",
           "dbias sm90 shared"),
    mutant("blocks leave tiles out", BIAS, "index += params.resident_blocks;", "index += params.resident_blocks + 1;",
           "dbias sm90"),
    mutant("rows of a part are neighbours", BIAS, "(part + 8 * half * kBlockN + 8 * n)",
           "(part + half * kBlockN + 8 * n)", "dbias sm90 shared"),
    mutant("rows behind the last one are stored", BIAS, "is_whole && dbias.key_stride", "dbias.key_stride",
           "dbias sm90"),
    mutant("tiles of one head", "common/score_gradients.cuh",
           "(kSumsHeads ? 1 : params.num_heads) *\n           (kSums", "(kSums", "dbias sm90"),
)
# fmt: on
