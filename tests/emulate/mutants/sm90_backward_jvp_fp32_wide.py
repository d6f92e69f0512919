"""Mutants of the tangents of gradients in float32 at head dimensions 65 to 128 on compute capability 9.0."""

from tests.emulate.mutants.mutant import mutant

TILES = "sm90/term_tiles.cuh"
KERNEL = "sm90/backward_jvp_fp32_wide.cu"
PLAIN, OPTIONS, LARGE = (f"wide tangents float32{what}" for what in ("", " of pairs", " of large scores"))

# fmt: off
MUTANTS = (
    # ---- the producers
    mutant("a box is loaded over what is read", TILES, "    barriers.empty(at).wait(at.parity ^ 1);\n", "",
           PLAIN),
    mutant("tK with the terms of K", KERNEL, "term < (1 + kMovesK) * kBf16Terms; ++term)",
           "term < kBf16Terms; ++term)", PLAIN),
    mutant("tQ with the terms of Q", KERNEL, "c, first_row, m_tile.head, batch_of(kBf16Terms + term));",
           "c, first_row, m_tile.head, batch_of(term));", PLAIN),
    mutant("tV with the terms of V", KERNEL, "tile.first_key, tile.head_kv, batch_of(first + term));",
           "tile.first_key, tile.head_kv, batch_of(term));", PLAIN),
    mutant("one chunk for all", TILES, "full.address, c * kChunk, row, head, batch);",
           "full.address, 0, row, head, batch);", PLAIN),
    mutant("dO is loaded over what is read", KERNEL,
           "      shared.do_ring.empty(at).wait(at.parity ^ 1);\n", "", PLAIN),
    mutant("tQ for tdX', Q for dX'", KERNEL,
           "for (int first = kMovesQ * kBf16Terms; first >= 0; first -= kBf16Terms)",
           "for (int first = 0; first <= kMovesQ * kBf16Terms; first += kBf16Terms)", PLAIN),
    # ---- products with boxes
    mutant("a box before it is there", TILES, "    ring.barriers.full(at).wait(at.parity);\n", "", PLAIN),
    mutant("boxes are given back before their products are done", TILES, "    ptx::wgmma_wait<1>();\n", "", PLAIN),
    mutant("one warp gives a box back for all", TILES, "arrive_as_warp(ring.barriers.empty(oldest));",
           "if (ptx::thread_index() % 128 == 0) for (int w = 0; w < 4; ++w) ring.barriers.empty(oldest).arrive();",
           PLAIN),
    mutant("a sum begins with what was there", TILES, "begins && c == 0 && k == 0);", "false);", PLAIN),
    mutant("products of the high terms alone", TILES, "kOthers = kBf16Terms - term,", "kOthers = 1,", PLAIN),
    mutant("every chunk begins a sum", TILES, "begins && c == 0 && k == 0);", "begins && k == 0);", PLAIN),
    # ---- dX', tdX' and tdV
    mutant("tK Q' is forgotten", KERNEL, "      if constexpr (kMovesK)\n", "      if constexpr (false)\n", PLAIN),
    mutant("dX' without delta", KERNEL, " - delta[i % 2];", ";", PLAIN),
    mutant("tdX' without the tangent of delta", KERNEL, " - tdelta[i % 2];", ";", PLAIN),
    mutant("tdX' by u' and dP'", KERNEL, "u[n][i] *= kHasDerivative ? dp : dx[n][i];", "u[n][i] *= dp;", PLAIN),
    mutant("dropped pairs by their marks", KERNEL, "kHasDropout ? fabsf(p) : p;", "p;", OPTIONS),
    mutant("dP' of pairs that dropout drops", KERNEL, "(is_dropped(p) ? 0.0f : dp) * kept_scale", "dp * kept_scale",
           OPTIONS),
    mutant("the tangent of the scale of dX'", KERNEL, "          scaled.apply(dx[n][i], u[n][i]);\n", "",
           OPTIONS),
    mutant("P' (tdP' - tdelta) is in no unit", KERNEL, "weight_of_pair(p[n][i]) * scaled.unit,",
           "weight_of_pair(p[n][i]),", OPTIONS),
    mutant("dX' replaces what others read", KERNEL, "    if constexpr (kReadsDx) wait_for_space();\n", "", PLAIN),
    mutant("tdX' replaces dX' before it is read", KERNEL, "    wait_for_space();\n    store_terms(tdx,",
           "    store_terms(tdx,", PLAIN),
    mutant("products read dX' before it is stored", KERNEL, "    ptx::fence_async_proxy();\n", "", PLAIN),
    mutant("tdV of dX'", KERNEL, "dx[n][i] = made[n % 2][i];", ";", PLAIN),
    mutant("no pair is hidden", KERNEL, "const bool masked = m_tile.needs_mask(tile.queries);",
           "const bool masked = false;", PLAIN),
    mutant("no row is large", KERNEL,
           "const bool large = is_of_large(ptx::float_of(ptx::load_shared_b32(shared.stats)));",
           "const bool large = false;", LARGE),
    # ---- tdK and tdQ
    mutant("tdK without dX' tQ", KERNEL, "if constexpr (kReadsDx) serve<kNeedsDk && kMovesQ>();",
           "if constexpr (kReadsDx) serve<false>();", PLAIN),
    mutant("tdK without the scale", KERNEL, "thread, tdk, factor);", "thread, tdk, 1.0f);", PLAIN),
    mutant("tdQ without dX tK", KERNEL, "serve(Constant<kSumsTdqOfDx>{}, shared.tk, sum);",
           "serve(Constant<false>{}, shared.tk, sum);", PLAIN),
    mutant("tdQ of K alone", KERNEL, "shared.tk, sum);", "shared.k, sum);", PLAIN),
    mutant("tdQ before its products are done", KERNEL, "      wait_for<0>(tdq);\n", "", PLAIN),
    mutant("tdQ before dX' is there", KERNEL, "    shared.dx_ring.full(at).wait(at.parity);\n", "", PLAIN),
    mutant("tdQ of the first tile", KERNEL, "tile.index_of(common, m_tile) * (kRows * kDim)", "0", PLAIN),
)
# fmt: on
