"""The model of docs/training.md: its gradients against differences, its loss by both attentions."""

import functools

import ml_dtypes
import numpy as np
import pytest

import cuflash.testing as ct
from bench.examples import run_page
from bench.training import PAGE

page = functools.cache(functools.partial(run_page, PAGE))
LIBRARIES = ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)]
ATTENTIONS = pytest.mark.parametrize("attention", ["Formula", "Cuflash"])


@ATTENTIONS
@pytest.mark.parametrize("library", LIBRARIES)
def test_gradients_of_the_whole_model_in_float64(library, attention):
    """Of every parameter, along a direction."""
    pytest.importorskip(library)
    names, rng = page(library), np.random.default_rng(0)
    attend = names[attention]()
    p = names["new_parameters"](1, width=16, blocks=2, length=12, dtype=np.float64)
    p = {name: x + names["xp"].asarray(0.1 * rng.standard_normal(x.shape)) for name, x in p.items()}
    tokens = names["draw"](rng, names["training"], 3, 10)
    gradients = names["loss_and_gradients"](p, tokens, attend)[1]
    assert gradients.keys() == p.keys()
    for name in p:
        direction = names["xp"].asarray(rng.standard_normal(p[name].shape))
        steps = ({**p, name: p[name] + h * direction} for h in (1e-5, -1e-5))
        above, below = (float(names["loss_and_gradients"](moved, tokens, attend)[0]) for moved in steps)
        slope = float((gradients[name] * direction).sum())
        np.testing.assert_allclose(slope, (above - below) / 2e-5, rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("library", LIBRARIES)
def test_losses_fall_alike(library):
    """Far less apart than those of two seeds, in float32; in bfloat16 less, too."""
    pytest.importorskip(library)
    names = page(library)
    sizes = {"steps": 40, "batch": 4, "length": 32, "width": 32, "rate": 5e-3}

    def losses(attention, seed=0):
        return np.array(names["train"](attention, seed=seed, **sizes)[0])

    formula, rounded = losses(names["Formula"]()), losses(names["Cuflash"](ml_dtypes.bfloat16))
    of_seeds = np.abs(losses(names["Formula"](), seed=1) - formula).max()
    assert formula[-1] < formula[0] - 0.8
    assert np.abs(losses(names["Cuflash"]()) - formula).max() < of_seeds / 1000
    assert 0 < np.abs(rounded - formula).max() < of_seeds / 4


@ATTENTIONS
def test_attention_of_the_page(attention):
    """Both passes, against the oracle rule."""
    case = ct.Case(batch=2, num_heads=3, seqlen_q=40, seqlen_k=40, head_dim=8, dtype="float64", causal=True)
    arrays = case.arrays()
    attend = page()[attention]()
    out, saved = attend.forward(*(x.swapaxes(1, 2) for x in ct.qkv(arrays)))
    gradients = attend.backward(arrays["dout"].swapaxes(1, 2), saved)
    results = dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))
    expected = ct.yardsticks(case.problem, arrays)
    measurements = [ct.measure(name, x.swapaxes(1, 2), expected[name]) for name, x in results.items()]
    assert not [str(measurement) for measurement in measurements if measurement.failure]
