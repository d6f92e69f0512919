"""Cases of the benchmark, the work that they are, and the check."""

import subprocess
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from bench import environment, peers, report
from bench.cases import Case
from bench.check import Check
from bench.functions import DOCUMENTS
from bench.inputs import RANDOM, Inputs, make_inputs, problem_of
from bench.suites import FA2, GROUPED, SUITES
from cuflash.arrays.array_info import numpy_dtype
from cuflash.testing import reference
from tests.bench_records import ALL_CASES, BIASED, OPTIONAL, PLAIN, SMALL, abstract

# Cases


def test_fa2_is_the_usual_table():
    assert len(FA2) == len(set(FA2)) == 18
    for case in FA2:
        assert case.batch * case.seqlen_q == 16384
        assert case.num_heads * case.head_dim == 2048
        assert case.dtype == "bfloat16"
    assert {(c.head_dim, c.seqlen_q, c.causal) for c in FA2} == {
        (d, n, causal) for d in (64, 128, 256) for n in (1024, 4096, 16384) for causal in (False, True)
    }
    assert SUITES["targets"].cases == FA2 + GROUPED


def test_names_are_unique():
    assert len({case.name for case in ALL_CASES}) == len(ALL_CASES)
    assert SMALL.name == "fp32-d8x12-b2-h4kv2-s24-causal"


@pytest.mark.parametrize("case", [case for case in ALL_CASES if not case.lengths], ids=lambda case: case.name)
def test_work_agrees_with_the_problem(case):
    q, k, v = (abstract(shape, case.dtype) for shape in (case.q_shape, case.k_shape, case.v_shape))
    terms = {name: abstract(*term) for name, term in case.terms.items()}
    problem = problem_of(case, q, k, v, terms)
    # A problem counts keys that no query attends to, and an array for each operand.
    whole = replace(case, window=0, blocks_kept=0.0, v_in_k=False)
    assert whole.ideal_bytes("forward") == problem.forward_bytes
    assert whole.ideal_bytes("backward") == problem.backward_bytes
    assert case.scores_bytes == problem.naive_bytes
    assert case.out_shape == problem.out_shape
    for pass_, exact in (("forward", problem.forward_flops), ("backward", problem.backward_flops)):
        if case.function == "documents":  # of whose pairs the problem knows nothing
            exact //= DOCUMENTS
        if case.causal and not case.window:  # half of the square leaves out half of the diagonal
            assert case.flops(pass_) == pytest.approx(exact, rel=1.01 / case.seqlen_q)
        elif case.blocks_kept:
            assert case.flops(pass_) == exact * case.block_mask().mean()
        else:
            assert case.flops(pass_) == exact


def test_keys_that_nobody_sees_are_not_read():
    few = Case(head_dim=64, seqlen_q=2, seqlen_k=1000, batch=3, num_heads=4, causal=True, window=300)
    row_bytes = 3 * 4 * 2 * 64 * 2  # of k and v
    assert replace(few, window=0).ideal_bytes("forward") - few.ideal_bytes("forward") == (1000 - 301) * row_bytes
    blocks = Case(head_dim=64, seqlen_q=2, seqlen_k=1000, batch=3, num_heads=4, blocks_kept=0.5)
    seen = np.repeat(blocks.block_mask().any(axis=0), 128)[:1000]
    assert 0 < seen.sum() < 1000
    hidden = 1000 - int(seen.sum())
    whole = replace(blocks, blocks_kept=0.0)
    assert whole.ideal_bytes("forward") - blocks.ideal_bytes("forward") == hidden * row_bytes
    assert whole.ideal_bytes("backward") - blocks.ideal_bytes("backward") == 2 * hidden * row_bytes
    assert Case.of_record({**vars(few), "lengths": []}) == few


def test_values_in_the_columns_of_keys():
    """They are the same memory, which is read once, and what is computed is checked with them."""
    separate = Case(head_dim=12, head_dim_v=8, seqlen_q=3, seqlen_k=40, batch=2, num_heads=4, num_heads_kv=1)
    case = replace(separate, dtype="float32", v_in_k=True)
    assert replace(case, v_in_k=False).ideal_bytes("forward") - case.ideal_bytes("forward") == 2 * 40 * 8 * 4
    assert case.name == "fp32-d12x8ink-b2-h4kv1-s3k40-full"
    assert case.flops("forward") == separate.flops("forward")
    inputs = make_inputs(np, case)
    assert np.shares_memory(inputs.k, inputs.v) and inputs.v.shape == case.v_shape
    np.testing.assert_array_equal(inputs.v, inputs.k[..., :8])
    out = peers.cuflash(case, inputs).calls["forward"]()
    assert Check(case, inputs).errors("forward", out)["out"].within_rule
    with pytest.raises(ValueError, match=r"^v_in_k: got a v of 13 columns, expected at most 12, as k has$"):
        replace(case, head_dim_v=13)


def test_a_number_of_operations_worked_out_by_hand():
    case = Case(head_dim=128, seqlen_q=4096, batch=4, num_heads=16)
    assert case.flops("forward") == 2 * 4 * 16 * 4096 * 4096 * 256
    assert case.flops("backward") == 2 * 4 * 16 * 4096 * 4096 * 640


def test_cases_that_peers_disagree_on_are_refused():
    with pytest.raises(ValueError, match="num_heads_kv"):
        Case(head_dim=8, seqlen_q=4, batch=1, num_heads=3, num_heads_kv=2)
    with pytest.raises(ValueError, match="function: got seqlen_q != seqlen_k"):
        Case(head_dim=8, seqlen_q=4, seqlen_k=5, batch=1, num_heads=1, function="distance")
    rectangle = Case(head_dim=8, seqlen_q=4, seqlen_k=5, batch=1, num_heads=1)
    for case in (replace(rectangle, causal=True), replace(rectangle, alibi=True)):
        assert "is_aligned" in case.options  # which contenders refuse that align otherwise
        assert "is_aligned" not in (*replace(case, seqlen_k=4).options, *rectangle.options)
    with pytest.raises(ValueError, match="window: got no causal"):
        replace(PLAIN, window=4)
    for changes in ({"causal": True, "mask": "qk"}, {"causal": True, "blocks_kept": 0.5}, {"mask": "q"}):
        with pytest.raises(ValueError, match=r"rows (might|would) attend to nothing"):
            replace(PLAIN, **changes)


# The check


@pytest.mark.parametrize("case", [SMALL, PLAIN, *BIASED, *OPTIONAL], ids=lambda case: case.name)
def test_the_check_is_the_oracle(case, monkeypatch):
    """Of the first head and of the last one, whose rows come in chunks."""
    monkeypatch.setattr("bench.check.ROWS_AT_ONCE", 7)
    inputs = make_inputs(np, case)
    problem = problem_of(case, inputs.q, inputs.k, inputs.v, inputs.terms)
    given = RANDOM | dict(inputs.terms)
    out, _ = reference.forward(problem, inputs.q, inputs.k, inputs.v, **given)
    dq, dk, dv = reference.backward(problem, inputs.dout, inputs.q, inputs.k, inputs.v, **given)
    check = Check(case, inputs)
    for n, (b, h) in enumerate(((0, 0), (1, 1))):
        heads = slice(h * case.group_size, (h + 1) * case.group_size)
        expected = {"out": out[b, heads], "dq": dq[b, heads], "dk": dk[b, h], "dv": dv[b, h]}
        assert check.exact.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(check.exact[name][n], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_past_the_lengths_are_not_checked(causal):
    case = replace(PLAIN, causal=causal, lengths=(24, 10))
    inputs = make_inputs(np, case)
    check, contender = Check(case, inputs), peers.cuflash_packed(case, inputs)
    for pass_, call in contender.calls.items():
        for name, error in check.errors(pass_, tuple(contender.to_array(x) for x in call())).items():
            assert error.within_rule, name
    (out,) = check.exact["out"][1]
    q, k, v = (x[1:, 1:, :10] for x in (inputs.q, inputs.k, inputs.v))
    alone, _ = reference.forward(problem_of(replace(case, lengths=()), q, k, v, {}), q, k, v)
    np.testing.assert_allclose(out, alone[0, 0], rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_check_tells_right_from_wrong(dtype):
    case = Case(head_dim=16, seqlen_q=40, batch=2, num_heads=2, causal=True, dtype=dtype)
    inputs = make_inputs(np, case)
    assert {x.dtype for x in (inputs.q, inputs.k, inputs.v, inputs.dout)} == {numpy_dtype(dtype)}
    check = Check(case, inputs)
    contender = peers.naive(case, inputs)
    (out,) = contender.calls["forward"]()
    (error,) = check.errors("forward", (out,)).values()
    assert error.within_rule and not error.wrong
    gradients = contender.calls["backward"]()
    assert not any(error.wrong for error in check.errors("backward", gradients).values())

    for spoil in (np.nan, 3.0):
        wrong = out.copy()
        wrong[1, 1, -1, -1] = spoil
        (error,) = check.errors("forward", (wrong,)).values()
        assert error.wrong and not error.within_rule
    future = Inputs(np, *(x[:, :, ::-1] for x in (inputs.q, inputs.k, inputs.v, inputs.dout)))
    assert check.errors("forward", (peers.naive(case, future).calls["forward"]()[0][:, :, ::-1],))["out"].wrong


def test_poison_is_not_a_number_in_every_dtype():
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        array = peers._poisoned(np, (2, 3), dtype)
        assert array.dtype == numpy_dtype(dtype)
        assert np.isnan(array.astype("float64")).all()


def test_bfloat16_is_the_one_of_ml_dtypes():
    assert numpy_dtype("bfloat16") == ml_dtypes.bfloat16


# Pages


@pytest.mark.parametrize(
    ("kind", "folder", "note"),
    [
        ({"device": "an H200"}, "kernels", "kernels changed since"),
        ({}, "cuflash/cpu/core", "the core changed since"),
    ],
)
def test_tables_say_that_they_are_older_than_what_they_measure(kind, folder, note, tmp_path, monkeypatch):
    def git(*arguments):
        name = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        done = subprocess.run(("git", *name, *arguments), cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def committed(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        git("add", ".")
        git("commit", "-qm", path)
        return git("rev-parse", "--short=12", "HEAD")

    monkeypatch.setattr(environment, "ROOT", tmp_path)
    git("init", "-q")
    file = f"{folder}/file"
    old, new = committed(file, "1"), committed(file, "2")
    committed("README.md", "no kernel")
    committed(file, "// a comment\n2")
    run = {**kind, "time": "2026-11-30T10:00:00+00:00"}
    is_new = f"revision {new}, 2026-11-30"
    assert report.revision_of(run | {"revision": new}) == is_new
    for revision in (old, f"{new}+", "unknown"):
        assert report.revision_of(run | {"revision": revision}) == f"revision {revision}, 2026-11-30; {note}"
    for path in (file, f"{folder}/another"):
        (tmp_path / path).write_text("3")
        assert report.revision_of(run | {"revision": new}) == f"{is_new}; {note}", "changed before it is committed"
        git("stash", "--include-untracked")
