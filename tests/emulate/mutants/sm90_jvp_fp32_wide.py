"""Mutants of jvp in float32 at head dimensions 65 to 128 on compute capability 9.0."""

from tests.emulate.mutants.mutant import mutant

KERNEL, TERMS, TILES = "sm90/jvp_fp32_wide.cu", "sm90/jvp_terms.cuh", "sm90/term_tiles.cuh"
PLAIN, OPTIONS, SUMS = "wide jvp float32", "wide jvp float32 of options", "wide jvp float32 of long sums"

# fmt: off
MUTANTS = (
    # ---- the producers
    mutant("tK with the terms of K", KERNEL,
           "                                      batch_of(tile, kBf16Terms + term));\n                }\n",
           "                                      batch_of(tile, term));\n                }\n", PLAIN),
    # ---- weights
    mutant("Q tK' replaces tQ K'", KERNEL, "box, kMovesQ || !first);", "box, !first);", PLAIN),
    mutant("small products of tK after the highest terms of K", TILES, "  if constexpr (term != kHigh) {",
           "  if constexpr (true) {", SUMS),
    mutant("tQ K' is forgotten", KERNEL, "term_of(tq, other, kTermQ)", "term_of(q, other, kTermQ)", PLAIN),
    mutant("Q is given back with the first tile of keys", KERNEL,
           "if (n_block == tile.keys.start) arrive_as_warp(empty);",
           "if (n_block == tile.keys.stop - 1) arrive_as_warp(empty);", PLAIN),
    mutant("nothing is hidden", TERMS, "      softmax_step(s, ts, o, a, n_block, Constant<true>{});",
           "      softmax_step(s, ts, o, a, n_block, Constant<false>{});", PLAIN),
    mutant("factors of the tile before", KERNEL, "    begin_factors();\n    softmax_step(", "    softmax_step(", PLAIN),
    mutant("P is written over what is read", KERNEL, "    shared.p_ring.empty(p_at).wait(p_at.parity ^ 1);\n", "",
           PLAIN),
    mutant("P is read before it is there", KERNEL, "    ptx::fence_async_proxy();\n", "", PLAIN),
    mutant("sums without the mean", KERNEL, "    take_out_mean(softmax, of_o, of_a);\n", "", OPTIONS),
    mutant("sinks are left out", KERNEL, "if constexpr (kHasSinks) softmax.add_sink(of_o, of_a);", "", OPTIONS),
    mutant("sums are not divided by l", KERNEL, "of_o[0][0][i] *= inverse, of_a[0][0][i] *= inverse;", ";", PLAIN),
    # ---- O and A
    mutant("A without what O adds to it", KERNEL, "ptx::fused(factor[1], o[n][i], ", "(", PLAIN),
    mutant("O is not rescaled", KERNEL, "= ptx::fused(factor[0], o[n][i], sum_o[n][i]);",
           "= o[n][i] + sum_o[n][i];", PLAIN),
    mutant("factors of the tile before or after", KERNEL,
           "    load_factors(factors);\n    reader.finish();\n    arrive_as_warp(shared.p_ring.empty(p_at));\n",
           "    reader.finish();\n    arrive_as_warp(shared.p_ring.empty(p_at));\n    load_factors(factors);\n", PLAIN),
    mutant("A without P (tS - c) V", KERNEL, "if constexpr (kMovesScores) add_products(sum_a, tp,",
           "if constexpr (false) add_products(sum_a, tp,", PLAIN),
    mutant("products of the high terms alone", KERNEL, "for (int other = kLast - term; other >= 0; --other)",
           "for (int other = 0; other >= 0; --other)", PLAIN),
    mutant("O begins with what was there", KERNEL, "set_zero((float (&)[1][kColumns / 8][4]) o);", ";", PLAIN),
    mutant("all columns in the first chunk", KERNEL, "row * result.row_stride + chunk * kChunk, sum,",
           "row * result.row_stride, sum,", PLAIN),
    mutant("values of the first chunk", KERNEL, "Producer{params, shared}.produce_values(1);", "", PLAIN),
)
# fmt: on
