"""jvp and backward_jvp of ranks on threads: as one device, and what stops all ranks."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.distributed as cd
from cuflash.testing.tangents import Moved
from tests.pure.test_distributed import CASE, SPLITS
from tests.ranks import Shards, Whole, on_threads
from tests.sampling import examples


def gamma_score(s, i, j, *, gamma, x, head):
    return cuflash.where(x[i] > 0, s * x[j], cuflash.tanh(gamma[head] * s))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_functions_and_batch_axes(dtype, deterministic):
    """As one device: the tangents of gradients of arrays that functions read are complete on all ranks."""
    random = np.random.default_rng(7)
    point: dict[str, Any] = {"q": random.standard_normal((2, 3, 2, 32, 8))}
    point |= {name: random.standard_normal((3, 2, 32, 8)) for name in ("k", "v")}
    point |= {"gamma": random.standard_normal(2), "x": random.standard_normal(32)}
    t = {f"t{name}": random.standard_normal(x.shape).astype(dtype) for name, x in point.items()}
    point = {name: x.astype(dtype) for name, x in point.items()}
    dout = random.standard_normal((2, 3, 2, 32, 8)).astype(dtype)
    need = tuple(f"td{name}" for name in point)
    whole: Any = cuflash.FlashAttention(causal=True, score=gamma_score)
    expected = whole.jvp(**point, **t)._asdict()
    expected |= whole.backward_jvp(dout, **point, **expected, need=need, **t)._asdict()
    split = cd.zigzag(32, 2)
    axes = {"lse": -1, "tlse": -1}
    of_rows = ("q", "k", "v", "tq", "tk", "tv", "dout", "out", "tout", "lse", "tlse", "tdq", "tdk", "tdv")

    def work(comm):
        own = {
            name: split.part(x, comm.rank, axes.get(name, -2)) if name in of_rows else x
            for name, x in (point | t | {"dout": dout}).items()
        }
        attn: Any = cd.ContextParallel(
            comm, split=split, causal=True, score=gamma_score, deterministic=deterministic, timeout=30
        )
        of_dout = own.pop("dout")
        results = attn.jvp(**own)
        return results._asdict() | attn.backward_jvp(of_dout, **own, **results._asdict(), need=need)._asdict()

    found = on_threads(2, work)
    bound = 1e-11 if dtype == "float64" else 2e-2
    for name, y in expected.items():
        shards = [own[name] for own in found]
        x = split.whole(shards, axes.get(name, -2)) if name in of_rows else shards[0]
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(
            x.astype(float), y.astype(float), rtol=bound, atol=bound * np.abs(y.astype(float)).max(), err_msg=name
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda own: own.update(tq=own["tq"][:, :, 1:]), r"^tq: got shape .*, expected "),
        (lambda own: own.pop("tv"), r"arrays: got .* on rank 1, expected .* as on rank 0"),
        (lambda own: own.update(tscale=np.array(2.0)), r"^tscale: got .* on rank 1, expected .* as on rank 0"),
        (lambda own: own.update(tcolour=own["tq"]), r"jvp\(\) got an unexpected keyword argument 'tcolour'"),
        (lambda own: own.update(tbias=own["tq"]), r"^arrays: got .*, tbias.* on rank 1, expected "),
    ],
)
def test_tangents_that_do_not_agree_stop_all_ranks(change, message):
    case = replace(CASE, dtype="float64")
    shards = Shards(Whole.of(case), **SPLITS)
    arrays = case.arrays() | Moved(names=("q", "k", "v", "scale")).arrays(case)
    del arrays["dout"]

    def work(comm):
        attn: Any = cd.ContextParallel(comm, split="zigzag", causal=True, timeout=30)
        own = shards.of(comm.rank, arrays)
        if comm.rank == 1:
            change(own)
        with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
            attn.jvp(**own)
        return str(error.value)

    assert any(re.search(message, found) for found in on_threads(2, work))


@settings(max_examples=examples(15), deadline=None)
@given(
    ranks=st.integers(1, 4),
    causal=st.booleans(),
    dropout=st.sampled_from((0.0, 0.3)),
    has_score=st.booleans(),
    names=st.lists(st.sampled_from(("q", "k", "v", "gamma", "x")), min_size=1, unique=True),
    seed=st.integers(0, 2**16),
)
def test_functions_of_second_order_take_an_attention_over_ranks(ranks, causal, dropout, has_score, names, seed):
    """As one device."""
    random = np.random.default_rng(seed)
    point: dict[str, Any] = {name: random.standard_normal((2, 40, 8)) for name in ("q", "k", "v")}
    point |= {"gamma": random.standard_normal(2), "x": random.standard_normal(40)} if has_score else {}
    names = [name for name in names if name in point] or ["q"]
    moved = {name: random.standard_normal(point[name].shape) for name in names}
    rows: dict[str, Any] = {name: random.standard_normal((2, 40, 8)) for name in ("dout", "dtout")}
    of_lse: dict[str, Any] = {name: random.standard_normal((2, 40)) for name in ("dlse", "dtlse")}
    options: dict[str, Any] = {"causal": causal, "dropout": dropout, "score": gamma_score if has_score else None}
    how = {"seed": 5, "offset": 7} if dropout else {}
    need = tuple(f"td{name}" for name in point)
    split, whole = cd.zigzag(40, ranks), cuflash.FlashAttention(**options)

    def results_of(attn: Any, part: Callable[..., Any]) -> dict[str, Any]:
        own = {name: part(x) if name in "qkv" else x for name, x in point.items()}
        tangents = {f"t{name}": part(x) if name in "qkv" else x for name, x in moved.items()}
        dout, dtout = map(part, rows.values())
        dlse, dtlse = (part(x, -1) for x in of_lse.values())
        product = cuflash.hessian_vector_product(attn, dout, **own, **tangents, need=need, dlse=dlse, **how)
        cotangents = {f"d{name[1:]}": x for name, x in tangents.items()}
        double = cuflash.double_backward(attn, cotangents, dout, **own, need=need, dlse=dlse, **how)
        forward = attn.jvp(**own, **tangents, **how)._asdict()
        backward = cuflash.jvp_backward(
            attn, dtout, **own, **tangents, **forward, dout=dout, dlse=dlse, dtlse=dtlse, need=need, **how
        )
        found: dict[str, Any] = {"product": product, "double": double.gradients}
        found |= {"jvp": backward.gradients, "of tangents": backward.of_tangents}
        named = {f"{of} {name}": x for of, result in found.items() for name, x in result._asdict().items()}
        return named | {"double dout": double.ddout, "double dlse": double.ddlse}

    def work(comm):
        attn = cd.ContextParallel(comm, split=split, timeout=30, **options)
        return results_of(attn, lambda x, axis=-2: split.part(x, comm.rank, axis))

    found = on_threads(ranks, work)
    for name, y in results_of(whole, lambda x, axis=-2: x).items():
        shards = [own[name] for own in found]
        axis = {"dlse": -1}.get(name.split()[-1], -2)
        of_rows = name[-1] in "qkv" or name.endswith(("dout", "dlse"))
        x = split.whole(shards, axis) if of_rows else shards[0]
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-10 * max(1, np.abs(y).max()), err_msg=name)


def test_errors_over_ranks_name_a_cotangent_as_the_caller_does():
    x = np.ones((2, 4, 8))

    def work(cotangents):
        def of_rank(comm):
            attn = cd.ContextParallel(comm, split="contiguous", timeout=30)
            with pytest.raises((ValueError, RuntimeError)) as error:
                cuflash.double_backward(attn, cotangents[comm.rank], x, x, x, x)
            return str(error.value)

        return on_threads(2, of_rank)

    for message in work(({"dq": x}, {"dk": x})):
        assert 'got q, k, v, cotangents["dk"] of numpy on rank 1, expected q, k, v, cotangents["dq"] of' in message
    own, other = work(({"dq": x[0]}, {"dq": x}))
    assert own.startswith('cotangents["dq"]: got shape (4, 8), expected (2, 4, 8): numpy.broadcast_to(cotangents["dq"]')
    assert other == f"rank 0 failed: ValueError: {own}"
