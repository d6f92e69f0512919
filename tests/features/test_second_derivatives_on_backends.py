"""jvp and backward_jvp on every backend: every option, and functions of a caller, by the oracle rule."""

from dataclasses import replace

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from cuflash.arrays.array_info import DTYPES
from cuflash.emulator import passes
from cuflash.spec.passes import JVP
from cuflash.testing.tangents import Moved, assert_tangents, everything, movable, tangents_by
from tests.backends import CORE, DEVICE, FALLBACK, on_backends
from tests.cuda_scores import CUDA_SCORES
from tests.emulate.tangents import check, check_functions, movable_of
from tests.scored import few_tiles
from tests.second_derivatives import CASES, NAMES, judge_functions, moves_of

OF_ALL = dict(zip(NAMES, CASES, strict=True))
OF_MOVES = {
    f"{name}, {', '.join(moved.names)}": (case, moved) for name, case in OF_ALL.items() for moved in moves_of(case)
}
OPTIONS = {
    **dict.fromkeys((CORE, FALLBACK, "emulated 8.0", "emulated 9.0"), tuple(OF_ALL)),
    "emulated 7.5": tuple(name for name, case in OF_ALL.items() if case.dtype != "float64"),
}


def judge(backend, case, moved, deterministic=False):
    if backend.device:
        check(case, moved, backend.device, deterministic)
    else:
        attn = cuflash.FlashAttention(**case.keywords, deterministic=deterministic)
        assert_tangents(case, moved, tangents_by(attn, case, moved, convert=backend.convert))


@on_backends(OPTIONS, of="name", emulated=18)
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_option(backend, name, deterministic):
    judge(backend, OF_ALL[name], everything(OF_ALL[name]), deterministic)


@on_backends({DEVICE: tuple(OF_MOVES)}, of="name", device=1)
def test_every_option_with_single_tangents(backend, name):
    judge(backend, *OF_MOVES[name])


@on_backends((CORE, FALLBACK, DEVICE))
def test_what_keys_have_in_common_is_taken_out(backend):
    judge(backend, CASES[0], Moved(names=tuple(movable(CASES[0])), common=10.0))


@on_backends({name: DTYPES for name in (CORE, FALLBACK, "emulated 8.0", "emulated 9.0", DEVICE)})
@pytest.mark.parametrize("names", [("sinks",), ("v", "sinks")], ids=str)
def test_weights_that_lse_alone_moves(backend, dtype, names):
    """Sinks act through lse alone: a call without them gets the same gradients, by the lse and tlse of all."""
    case, moved = ct.Case(seqlen_q=20, seqlen_k=70, head_dim=16, sinks=True, dtype=dtype), Moved(names=names)
    arrays, tangents = case.arrays(backend.convert), moved.arrays(case, backend.convert)
    dout, need = arrays.pop("dout"), ("tdq", "tdk", "tdv")

    def without(name):
        return {key: x for key, x in (arrays | tangents).items() if name not in key}

    if backend.device:
        whole = passes.jvp(case.problem, arrays | tangents, arch=backend.device)
        given = {**without("sinks"), **dict(zip(JVP.default, whole, strict=True)), "dout": dout}
        found = passes.backward_jvp(replace(case.problem, sinks=None), given, need=need, arch=backend.device)
        results = dict(zip(need, found, strict=True))
    else:
        attn = cuflash.FlashAttention()
        whole = attn.jvp(**arrays, **tangents)._asdict()
        results = attn.backward_jvp(dout, **without("sinks"), **whole, need=need)._asdict()
    assert_tangents(case, moved, results)


SCORES = ("distance", "capped", "gated", "with_pairs", "gathered", "fade", "of_rows", *CUDA_SCORES)


@on_backends({"emulated 8.0": DTYPES, DEVICE: DTYPES}, emulated=64, device=6)
@pytest.mark.parametrize("moved", ["all", "arrays", "q"])
@pytest.mark.parametrize("mask", [None, "documents"])
@pytest.mark.parametrize("score", SCORES)
def test_functions(backend, score, mask, dtype, moved):
    """Also where arrays that the score reads, or q alone, have tangents."""
    case = few_tiles((score, mask), dtype)
    names = movable_of(case)
    of_case = {"all": names, "arrays": names[4:], "q": names[:1]}[moved]
    if backend.device:
        check_functions(case, of_case)
        return
    random = np.random.default_rng(3)
    arrays = {name: case.arrays.get(name, np.zeros((), case.problem.softmax_dtype)) for name in of_case}
    tangents = {f"t{name}": np.asarray(random.standard_normal(x.shape), x.dtype) for name, x in arrays.items()}
    given, own = ({name: backend.convert(x) for name, x in xs.items()} for xs in (case.arrays, tangents))
    dout = given.pop("dout")
    results = case.attention.jvp(**given, **own)
    need = tuple(f"td{name}" for name in names)
    gradients = case.attention.backward_jvp(dout, **given, **results._asdict(), **own, need=need)
    judge_functions(case, tangents, results._asdict() | gradients._asdict())
