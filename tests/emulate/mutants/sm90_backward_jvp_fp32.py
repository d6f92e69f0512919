"""Mutants of the tangents of gradients in float32 on compute capability 9.0."""

from tests.emulate.mutants.mutant import mutant

KERNEL = "sm90/backward_jvp_fp32.cu"
TERMS = "sm90/backward_jvp_terms.cuh"
COPIES = "common/io/copies.cuh"

PLAIN, OPTIONS, LARGE, LONE = (
    *("tangents float32", "tangents float32 of pairs", "tangents float32 of large scores"),
    "tangents float32 with one stage",
)

# fmt: off
MUTANTS = (
    # ---- the producers
    mutant("tK with the terms of K", KERNEL, "load(to + kTerms, map, full, tile.first_key, tile.head_kv, kBf16Terms);",
           "load(to + kTerms, map, full, tile.first_key, tile.head_kv);", PLAIN),
    mutant("tQ with the terms of Q", KERNEL, "first_row, m_tile.head, kBf16Terms, 2 * kTerm);",
           "first_row, m_tile.head, 0, 2 * kTerm);", PLAIN),
    mutant("tQ is not announced", KERNEL, "full.arrive_expect((1 + kMovesQ) * kTerms);", "full.arrive_expect(kTerms);",
           PLAIN),
    mutant("Q is loaded over what is read", KERNEL,
           "      const Barrier full = shared.q_ring.full(at);\n      shared.q_ring.empty(at).wait(at.parity ^ 1);\n",
           "      const Barrier full = shared.q_ring.full(at);\n", LONE),
    mutant("dO is loaded over what is read", KERNEL, "      shared.do_ring.empty(at).wait(at.parity ^ 1);\n", "",
           PLAIN),
    mutant("tangents of statistics of the first rows", TERMS,
           "row_tangents_of(params, tile.work.batch, m_tile.head) + first,",
           "row_tangents_of(params, tile.work.batch, m_tile.head),", PLAIN),
    # ---- P', u' and tdV
    mutant("the terms of Q lie next to each other", KERNEL, "term_of(queries, i.value, 2 * kTerm)",
           "term_of(queries, i.value)", PLAIN),
    mutant("tK Q' is forgotten", KERNEL, "tx[n][i] = kMovesK ? ktq + tx[n][i] : ktq;", "tx[n][i] = ktq;", PLAIN),
    mutant("K tQ' is forgotten", KERNEL, "tx[n][i] = kMovesK ? ktq + tx[n][i] : ktq;", ";", PLAIN),
    mutant("scores before their products are done", KERNEL, "    wait_for<0>(s_and_ktq);\n", "", PLAIN),
    mutant("P' is written over V", KERNEL, "    shared.handed.dx_empty(buffer).wait(buffer.parity);\n", "", PLAIN),
    mutant("no pair is hidden", KERNEL, "const bool masked = m_tile.needs_mask(tile.queries);",
           "const bool masked = false;", PLAIN),
    mutant("u' without tlse", TERMS, "tangent * pairs.weights.score.scale - tlse[i % 2];",
           "tangent * pairs.weights.score.scale;", PLAIN),
    mutant("tdV of P'", TERMS, "pu[i] = p[i] * u[i];", "pu[i] = p[i];", PLAIN),
    mutant("tdV of pairs that dropout drops", TERMS, "pu[i] = keeps ? pu[i] * kept_scale : 0.0f;",
           "pu[i] = pu[i] * kept_scale;", OPTIONS),
    mutant("dropout drops nothing", TERMS, "p[i] = keeps ? p[i] : -p[i];", ";", OPTIONS),
    mutant("large rows by their lse", TERMS,
           "make_relative(s[n], n, row_sums + row_of(0, 0), pairs.weights.exponent_scale);", ";", LARGE),
    mutant("large rows of pairs by their lse", TERMS, "if (large) return RowStats(common, batch, head, query);", "",
           "tangents float32 of pairs of large scores"),
    mutant("statistics of other rows", TERMS, "ptx::load_shared_x2(s_stats + n * 64, lse);",
           "ptx::load_shared_x2(s_stats, lse);", PLAIN),
    mutant("P' is handed over before all have written it", KERNEL, "arrive_as_warp(shared.handed.p_full(buffer));",
           "if (thread % 32 == 0) shared.handed.p_full(buffer).arrive();", PLAIN),
    mutant("tdV replaces that of the tile before", TERMS, "    add(total, sum);\n",
           "    set_zero((float (&)[1][sizeof(total) / sizeof(total[0])][4])total);\n    add(total, sum);\n", PLAIN),
    mutant("dO is given back before tdV is made", TERMS, "    wait_for<0>(sum);\n    add(total, sum);\n",
           "    add(total, sum);\n", PLAIN),
    mutant("tdV of the first chunk of dO", TERMS, "s_dout + c * kTerm);", "s_dout);", "wide tangents float32"),
    # ---- dX', tdX' and tdK
    mutant("tV with V", KERNEL, "load(tv, shared.tdx_at({}));", "load(tv, shared.dx_at({}));", PLAIN),
    mutant("V is given back before it is read", KERNEL, "      dx_empty({i}).init(8);\n",
           "      dx_empty({i}).init(1);\n", PLAIN),
    mutant("dX' without delta", KERNEL, "        dp -= delta[i % 2];\n", "", PLAIN),
    mutant("tdX' without the tangent of delta", KERNEL, "weight * (tdp - tdelta[i % 2]);", "weight * tdp;", PLAIN),
    mutant("tdX' by u' and dP'", KERNEL, "(kHasDerivative ? dp : dx[n][i])", "dp", PLAIN),
    mutant("dP' of pairs that dropout drops", KERNEL, "dp = (drops ? 0.0f : dp) * kept_scale,", "dp = dp * kept_scale,",
           OPTIONS),
    mutant("the tangent of the scale of dX'", KERNEL, "        scaled.apply(dx[n][i], tdx[n][i]);\n", "",
           OPTIONS),
    mutant("P' before it is there", KERNEL, "    shared.handed.p_full(buffer).wait(buffer.parity);\n", "", PLAIN),
    mutant("dX' replaces what others read", KERNEL, "    sync();  // all threads", "    // all threads", PLAIN),
    mutant("products read dX' before it is stored", KERNEL, "    ptx::fence_async_proxy();\n    sync();\n",
           "    sync();\n", PLAIN),
    mutant("tdQ begins before dX' is stored", KERNEL, "    ptx::fence_async_proxy();\n    sync();\n",
           "    ptx::fence_async_proxy();\n", PLAIN),
    mutant("tdK without dX' tQ", KERNEL, "if constexpr (kMovesQ) multiply(dx, tq, index > 0);",
           "if constexpr (kMovesQ) multiply(tdx, q, index > 0);", PLAIN),
    mutant("tdX' Q replaces dX' tQ", KERNEL, "multiply(tdx, q, kMovesQ || index > 0);", "multiply(tdx, q, index > 0);",
           PLAIN),
    mutant("Q is given back before tdK is made", KERNEL, "    wait_for<0>(sum);\n    add(tdk, sum);\n",
           "    add(tdk, sum);\n", PLAIN),
    mutant("one warp gives dX' back for all", KERNEL,
           "    arrive_as_warp(shared.q_ring.empty(q_at));\n    arrive_as_warp(shared.handed.dx_empty(buffer));\n",
           "    arrive_as_warp(shared.q_ring.empty(q_at));\n"
           "    for (int i = 0; i < 4 && thread == 0; ++i) shared.handed.dx_empty(buffer).arrive();\n", PLAIN),
    mutant("one warp of tdQ gives dX' back for all", KERNEL,
           "      arrive_as_warp(shared.handed.dx_empty(buffer));\n      float* sum",
           "      for (int i = 0; i < 4 && thread == 0; ++i) shared.handed.dx_empty(buffer).arrive();\n"
           "      float* sum", PLAIN),
    mutant("tdK without the scale", KERNEL, "tile, thread, tdk, factor);", "tile, thread, tdk, 1.0f);", PLAIN),
    mutant("keys past the last one", TERMS, "    if (key >= params.seqlen_k) continue;\n", "", PLAIN),
    # ---- tdQ
    mutant("tdQ without dX tK", KERNEL, "if constexpr (kMovesK) multiply(dx, tk, index > 0);",
           "if constexpr (kMovesK) multiply(tdx, k, index > 0);", PLAIN),
    mutant("tdX K replaces dX tK", KERNEL, "multiply(tdx, k, kMovesK || index > 0);", "multiply(tdx, k, index > 0);",
           PLAIN),
    mutant("tdQ before dX' is there", KERNEL, "    shared.handed.dx_full(buffer).wait(buffer.parity);\n", "", PLAIN),
    mutant("tdQ before its products are done", KERNEL, "      wait_for<0>(tdq);\n", "", PLAIN),
    mutant("tdQ of the first tile", KERNEL, "tile.index_of(common, m_tile) * (kRows * kDim)", "0", PLAIN),
    # ---- common/io/copies.cuh
    mutant("dout is not copied", COPIES, "copying.template serve<false, kHeadDimV>(8, params.dout, params.dout_copy);",
           "", PLAIN),
)
# fmt: on
