"""Other libraries' arrays in host memory: through DLPack in and out, without a copy, as their own type."""

import gc
import importlib.util
import re
import sys
import weakref
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.arrays import dlpack
from cuflash.cpu.backend import CpuPlan
from cuflash.spec import array_imports
from tests.sampling import examples

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed")


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------

DTYPES = ["float16", "bfloat16", "float32", "float64"]


def tensors(torch, dtype, *shapes):
    return [torch.from_numpy(normal(*shape, seed=n)).to(getattr(torch, dtype)) for n, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_tensors_give_torch_tensors(torch, dtype):
    q, k, v, dout = tensors(torch, dtype, (2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 3), (2, 4, 5, 3))
    attn = cuflash.FlashAttention(causal=True)
    out, lse = attn.forward(q, k, v)
    gradients = attn.backward(dout, q, k, v, out, lse)
    assert {type(x) for x in (out, lse, *gradients)} == {torch.Tensor}
    assert out.dtype == q.dtype
    assert lse.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in (q, k, v)]
    if dtype != "bfloat16":
        expected = attn.forward(q.numpy(), k.numpy(), v.numpy())
        np.testing.assert_array_equal(out.numpy(), expected.out)
    out += 1  # an ordinary tensor, free to be written to
    assert type(cuflash.attention(q, k, v, causal=True)) is torch.Tensor


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_agrees_with_its_own_attention(torch, dtype):
    q, k, v, dout = (x.requires_grad_() for x in tensors(torch, dtype, *[(1, 2, 9, 8)] * 4))
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    right.backward(dout)
    attn = cuflash.FlashAttention(causal=True)
    inputs = q.detach(), k.detach(), v.detach()
    out, lse = attn.forward(*inputs)
    gradients = attn.backward(dout.detach(), *inputs, out, lse)
    tolerance = {"float16": 1e-2, "bfloat16": 1e-1, "float32": 1e-5, "float64": 1e-12}[dtype]
    for got, expected in zip((out, *gradients), (right, q.grad, k.grad, v.grad), strict=True):
        torch.testing.assert_close(got, expected.detach(), atol=tolerance, rtol=tolerance)


@settings(max_examples=examples(60))
@given(ct.cases(max_seqlen=33, max_head_dim=40, max_scores=2**11, strides=("contiguous", "padded", "transposed")))
def test_torch_tensors_obey_the_oracle(case):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    arrays = case.arrays(ct.through_dlpack(torch.from_dlpack))
    assert all(isinstance(x, torch.Tensor) for x in arrays.values())
    q, k, v, dout, optional = arrays["q"], arrays["k"], arrays["v"], arrays["dout"], ct.optional(arrays)
    attn = cuflash.FlashAttention(**case.keywords)
    out, lse = attn.forward(q, k, v, **optional)
    ct.assert_forward(case, out, lse)
    ct.assert_backward(case, *attn.backward(dout, q, k, v, out, lse, **optional))


@pytest.mark.parametrize("dtype", [*DTYPES, "bool", "int32", "int64"])
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.mT, lambda x: x[::2, 1:, 1::2], lambda x: x[:0]])
def test_an_import_is_no_copy(torch, dtype, view):
    x = view(torch.arange(5 * 6 * 7).reshape(5, 6, 7).to(getattr(torch, dtype)))
    imported = array_imports.import_arguments({"x": x}, required=["x"])
    array = imported.arrays["x"]
    assert imported.backend == "numpy"
    assert array.dtype == (BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype))
    assert array.shape == tuple(x.shape)
    if x.numel():
        assert array.ctypes.data == x.data_ptr()
        assert array.strides == tuple(n * x.element_size() for n in x.stride())
    assert array.astype(np.float64).tolist() == x.double().tolist()
    back = imported.export(array, None)
    assert type(back) is torch.Tensor
    assert back.dtype == x.dtype
    assert torch.equal(back, x)
    assert not x.numel() or back.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_outlives_whoever_lent_it(torch, dtype):
    x = torch.full((1000, 1000), 3.0, dtype=getattr(torch, dtype))
    alive = weakref.ref(x)
    array = array_imports.import_arguments({"x": x}, required=["x"]).arrays["x"]
    del x
    gc.collect()
    others = [torch.zeros(1000, 1000, dtype=getattr(torch, dtype)) for _ in range(4)]
    assert (array == 3).all(), "the import keeps the memory, if not the tensor object"
    del array, others

    array = np.full((1000, 1000), 5.0, ct.numpy_dtype(dtype))
    alive = weakref.ref(array)
    tensor = ct.through_dlpack(torch.from_dlpack)(array)
    del array
    gc.collect()
    assert alive() is not None
    assert (tensor == 5).all()
    del tensor
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_given_torch_tensors_are_written_and_returned(torch, dtype):
    q, k, v = tensors(torch, dtype, *[(2, 5, 4)] * 3)
    attn = cuflash.FlashAttention()
    expected = attn.forward(q, k, v)
    out = torch.full((2, 4, 5), torch.nan, dtype=q.dtype).mT
    lse = torch.full_like(expected.lse, torch.nan)
    result = attn.forward(q, k, v, out=out, lse=lse)
    assert result.out is out
    assert result.lse is lse
    assert torch.equal(out, expected.out)
    assert torch.equal(lse, expected.lse)
    given_gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    gradients = attn.backward(out, q, k, v, out, lse, **dict(zip(("dq", "dk", "dv"), given_gradients, strict=True)))
    for got, given_tensor, right in zip(gradients, given_gradients, attn.backward(out, q, k, v, out, lse), strict=True):
        assert got is given_tensor
        assert torch.equal(got, right)


def test_torch_terms(torch):
    q, k, v, bias = tensors(torch, "float32", (2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 3), (4, 1, 6))
    mask = torch.from_numpy(normal(5, 6) > 0)
    optional = {"bias": bias, "mask": mask, "kv_lengths": torch.tensor([6, 3]), "alibi_slopes": torch.rand(4)}
    out = cuflash.attention(q, k, v, **optional)
    expected = cuflash.attention(*(x.numpy() for x in (q, k, v)), **{name: x.numpy() for name, x in optional.items()})
    np.testing.assert_array_equal(out.numpy(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_sinks_and_gradients_of_lse(torch, dtype):
    q, dout = tensors(torch, dtype, (2, 4, 5, 8), (2, 4, 5, 8))
    sinks, dlse = tensors(torch, "float64" if dtype == "float64" else "float32", (4,), (2, 4, 5))
    attn = cuflash.FlashAttention()
    out, lse = attn.forward(q, q, q, sinks=sinks)
    gradients = attn.backward(dout, q, q, q, out, lse, sinks=sinks, dlse=dlse, need=("dk", "dscale", "dsinks"))
    assert {type(x) for x in gradients} == {torch.Tensor}
    assert (gradients.dk.shape, gradients.dscale.shape, gradients.dscale.dtype) == (q.shape, (), sinks.dtype)
    assert (gradients.dsinks.shape, gradients.dsinks.dtype) == (sinks.shape, sinks.dtype)
    dsinks = torch.full_like(sinks, torch.nan)
    assert attn.backward(dout, q, q, q, out, lse, sinks=sinks, dlse=dlse, dsinks=dsinks).dsinks is dsinks
    assert torch.equal(dsinks, gradients.dsinks)


def test_torch_parameters_and_other_subclasses(torch):
    (q,) = tensors(torch, "float32", (5, 4))
    parameter = torch.nn.Parameter(q, requires_grad=False)
    assert torch.equal(cuflash.attention(parameter, q, q), cuflash.attention(q, q, q))


@pytest.mark.parametrize(
    ("change", "got", "expected"),
    [
        (lambda t, x: x.requires_grad_(), r"torch\.Tensor of dtype torch\.float32, .*gradient", r".*k\.detach\(\) "),
        (lambda t, x: x.to_sparse(), r"torch\.Tensor .*layout", "an array that DLPack can export"),
        (lambda t, x: x.to("meta"), r"torch\.Tensor .*meta", "an array that DLPack can export"),
        (lambda t, x: t._neg_view(x), r"torch\.Tensor with is_neg\(\) True", r"one whose .*: k\.resolve_neg\(\)"),
        (lambda t, x: t.complex(x, x).conj().imag, r"torch\.Tensor with is_neg\(\) True", r".*: k\.resolve_neg\(\)"),
        (lambda t, x: t.complex(x, x).conj(), r"torch\.Tensor with is_conj\(\) True", r".*: k\.resolve_conj\(\)"),
        (lambda t, x: t._efficientzerotensor((3, 4)), r"torch\.Tensor with _is_zerotensor\(\) True", r".*k\.clone\(\)"),
        (lambda t, x: x.int(), "dtype int32", "float32 as q has, or float8_e4m3fn or float8_e5m2"),
        (lambda t, x: x.double(), "dtype float64", "float32 as q has"),
        (lambda t, x: x.numpy(), r"numpy\.ndarray", "an array of torch as q is"),
        (lambda t, x: x.tolist(), "list", "a NumPy or CuPy array"),
    ],
)
def test_torch_tensors_that_cannot_be_lent(torch, change, got, expected):
    q, k, v = tensors(torch, "float32", *[(3, 4)] * 3)
    with pytest.raises(TypeError, match=f"^k: got {got}.*, expected {expected}"):
        cuflash.attention(q, change(torch, k), v)


@pytest.mark.parametrize("lazy", [lambda t, x: t._neg_view(x), lambda t, x: t.complex(x, x).conj().imag])
def test_torch_tensors_are_as_right_as_they_look(torch, lazy):
    """What the messages ask for works; and nothing is written through a bit that the memory knows nothing of."""
    q, k, v = tensors(torch, "float32", *[(3, 4)] * 3)
    expected = cuflash.attention(q, -k, v)
    assert torch.equal(cuflash.attention(q, lazy(torch, k).resolve_neg(), v), expected)
    out = lazy(torch, torch.full((3, 4), 7.0))
    with pytest.raises(TypeError, match=r"^out: got torch\.Tensor with is_neg\(\) True.* memory holds its values$"):
        cuflash.attention(q, k, v, out=out)
    assert (out == -7).all()


def test_a_torch_mask_for_numpy_arrays_is_refused(torch):
    q = normal(3, 4)
    with pytest.raises(TypeError, match=r"^mask: got torch\.Tensor, expected an array of numpy as q is"):
        cuflash.attention(q, q, q, mask=torch.ones(3, 3, dtype=torch.bool))


def test_plan_of_torch_tensors(torch):
    (q,) = tensors(torch, "bfloat16", (3, 4))
    plan = cuflash.FlashAttention().plan(q, q, q)
    assert isinstance(plan, CpuPlan) and plan.problem.dtype == "bfloat16"


# ---- others ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_jax_arrays_give_jax_arrays(dtype):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    q = jax.numpy.asarray(normal(2, 5, 4)).astype(dtype)
    out, lse = cuflash.FlashAttention().forward(q, q, q)
    assert isinstance(out, jax.Array)
    assert isinstance(lse, jax.Array)
    assert out.dtype == q.dtype
    with pytest.raises(ValueError, match=r"^out: got a read-only jaxlib array, expected a writable one"):
        cuflash.attention(q, q, q, out=out)


def test_jax_tracers_are_sent_to_the_module_for_jax():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    q = jax.numpy.asarray(normal(2, 5, 4))

    def attend(x):
        return cuflash.attention(x, x, x)

    for transformed in (jax.jit(attend), jax.vmap(attend), jax.grad(lambda x: attend(x).sum())):
        with pytest.raises(TypeError, match=r"^q: got jax\.\w*Tracer, which JAX traces.* call cuflash\.jax\.attention"):
            transformed(q)
    with pytest.raises(TypeError, match=r"^mask: got jax\.\w*Tracer.* call cuflash\.jax\.attention"):
        jax.jit(lambda x: cuflash.attention(q, q, q, mask=x))(q[0] > 0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_arrays_of_the_array_api_standard(dtype):
    xp = pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")
    q = xp.asarray(normal(2, 5, 4), dtype=getattr(xp, dtype))
    out, lse = cuflash.FlashAttention().forward(q, q, q)
    assert type(out) is type(lse) is type(q)
    assert out.dtype == q.dtype


class Exporter:
    """The least that DLPack asks for, of the version before 1.0."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, *, stream=None):
        return self.array.__dlpack__()


class VersionedExporter(Exporter):
    def __dlpack__(self, *, stream=None, **how):
        return self.array.__dlpack__(stream=stream, **how)


class PinnedExporter(Exporter):
    """Page-locked host memory, which is host memory."""

    def __dlpack_device__(self):
        return (3, 0)


class Bfloat16Exporter(Exporter):
    def __dlpack__(self, *, stream=None, **how):
        return dlpack._Bfloat16Export(self.array).__dlpack__(stream=stream, **how)


class NegativeExporter(VersionedExporter):
    """Memory of the other sign, as with the negative bit of a PyTorch tensor."""

    def is_conj(self):
        return False

    def is_neg(self):
        return True


class LongErrorExporter(Exporter):
    """A library whose errors are long."""

    def __dlpack__(self, *, stream=None, **how):
        raise BufferError("it is not to be had, " * 30)


class PropertyExporter(VersionedExporter):
    """Another library's word of the same name."""

    is_neg = True


@pytest.mark.parametrize("exporter", [Exporter, VersionedExporter, PinnedExporter])
def test_a_class_with_nothing_but_dlpack_gets_numpy_arrays(exporter):
    q, k, v = normal(5, 4), normal(6, 4), normal(6, 3)
    out, lse = cuflash.FlashAttention().forward(exporter(q), exporter(k), exporter(v))
    assert type(out) is type(lse) is np.ndarray
    np.testing.assert_array_equal(out, cuflash.attention(q, k, v))
    arrays = array_imports.import_arguments({"q": exporter(q), "k": None}, required=["q"]).arrays
    assert arrays["q"].ctypes.data == q.ctypes.data
    assert arrays["k"] is None


def test_bfloat16_of_a_class_with_nothing_but_dlpack():
    q = normal(5, 4).astype(BFLOAT16)
    out = cuflash.attention(Bfloat16Exporter(q), Bfloat16Exporter(q), Bfloat16Exporter(q))
    assert isinstance(out, np.ndarray) and out.dtype == BFLOAT16
    np.testing.assert_array_equal(out, cuflash.attention(q, q, q))


@pytest.mark.parametrize("name", ["q", "bias", "out"])
def test_memory_that_holds_other_numbers_is_refused(name):
    shapes = {"q": (5, 4), "k": (5, 4), "v": (5, 4), "out": (5, 4), "bias": (5, 5)}
    arrays: dict[str, Any] = {name: VersionedExporter(normal(*shape)) for name, shape in shapes.items()}
    arrays[name] = NegativeExporter(arrays[name].array)
    before = arrays["out"].array.copy()
    remedy = "" if name == "out" else rf": {name}\.resolve_neg\(\)"
    got, expected = (
        r"test_interop\.NegativeExporter with is_neg\(\) True",
        rf"one whose memory holds its values{remedy}",
    )
    with pytest.raises(TypeError, match=rf"^{name}: got {got}.*, expected {expected}$"):
        cuflash.attention(**arrays)
    np.testing.assert_array_equal(arrays["out"].array, before)
    plain = PropertyExporter(normal(5, 4))
    assert ct.to_numpy(cuflash.attention(plain, plain, plain)).shape == (5, 4)


def test_results_written_to_what_was_lent():
    q, out = normal(5, 4), np.empty((5, 4), np.float32)
    given_out = VersionedExporter(out)
    assert cuflash.attention(*[VersionedExporter(q)] * 3, out=given_out) is given_out
    np.testing.assert_array_equal(out, cuflash.attention(q, q, q))
    out.flags.writeable = False
    with pytest.raises(ValueError, match=r"^out: got a read-only .* array, expected a writable one"):
        cuflash.attention(*[VersionedExporter(q)] * 3, out=given_out)


def test_a_long_error_of_another_library_is_cut_between_words():
    q = LongErrorExporter(normal(5, 4))
    message = r"through DLPack \(it is not to be had, [\w, ]+ \.\.\.\), expected an array that DLPack can export$"
    with pytest.raises(TypeError, match=message):
        cuflash.attention(q, q, q)


def test_overlap_of_what_was_lent():
    q = normal(5, 4)
    with pytest.raises(ValueError, match=r"^out: got memory shared with v, expected memory of its own"):
        cuflash.attention(
            VersionedExporter(q.copy()), VersionedExporter(q.copy()), VersionedExporter(q), out=VersionedExporter(q)
        )


def test_libraries_do_not_mix(monkeypatch):
    class Foreign(Exporter):
        __module__ = "elsewhere.arrays"

    monkeypatch.setitem(sys.modules, "elsewhere", ModuleType("elsewhere"))
    q = normal(5, 4)
    with pytest.raises(TypeError, match=r"^k: got elsewhere\.Foreign, expected an array of test_interop as q is"):
        cuflash.attention(Exporter(q), Foreign(q), Exporter(q))
    result: Any = cuflash.attention(*[Foreign(q)] * 3)
    assert type(result) is np.ndarray


def test_host_and_device_memory_of_one_library_do_not_mix():
    class OnDevice(Exporter):
        def __dlpack_device__(self):
            return (2, 0)

    q = normal(5, 4)
    with pytest.raises(TypeError, match=r"^v: got an array in CUDA memory, expected one in host memory as q is"):
        cuflash.attention(Exporter(q), Exporter(q), OnDevice(q))
    with pytest.raises(TypeError, match=r"^k: got an array in host memory, expected one in CUDA memory as q is"):
        cuflash.attention(OnDevice(q), Exporter(q), Exporter(q))


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_cuda_memory_without_cupy():
    class OnDevice(Exporter):
        def __dlpack_device__(self):
            return (2, 0)

    q = OnDevice(normal(5, 4))
    attn = cuflash.FlashAttention()
    message = r"^q: got test_interop\.OnDevice in CUDA memory, expected CuPy: pip install \"cupy-cuda13x\["
    for call in (cuflash.attention, attn.forward, attn.plan, attn.compile):
        with pytest.raises(ImportError, match=message):
            call(q, q, q)
    with pytest.raises(ImportError, match=message):
        attn.backward(q, q, q, q, q, q)


@pytest.mark.parametrize("name", ["attention", "forward", "backward", "plan", "compile", "tune"])
def test_every_exception_of_a_call_is_documented(name):
    function = cuflash.attention if name == "attention" else getattr(cuflash.FlashAttention, name)
    (raises,) = re.findall(r"Raises\n +------\n(.*?)(?=\n\n|\Z)", function.__doc__ or "", re.DOTALL)
    assert {"TypeError", "ValueError", "NotImplementedError", "ImportError"} <= set(re.findall(r"\w+Error", raises))


def test_a_refused_call_frees_its_imports():
    wrong = Bfloat16Exporter(np.ones(20, BFLOAT16))
    alive = weakref.ref(wrong.array)
    with pytest.raises(ValueError, match=r"^k: got 1-D shape"):
        cuflash.attention(Bfloat16Exporter(np.ones((3, 4), BFLOAT16)), wrong, wrong)
    del wrong
    gc.collect()
    assert alive() is None


# ---- overlap ---------------------------------------------------------------------------------------------------------


def test_overlap_by_address():
    x = np.zeros((4, 5, 3, 8), np.float32)
    assert dlpack.overlap(x, x)
    assert dlpack.overlap(x[:2], x[1:])
    assert not dlpack.overlap(x[:2], x[2:])
    assert not dlpack.overlap(x[:, :, 0], x[:, :, 1])
    assert dlpack.overlap(x[:, :, :2], x[:, ::-1, 1:])
    assert not dlpack.overlap(x[..., ::2], x[..., 1::2])
    assert not dlpack.overlap(x[:0], x)
    assert not dlpack.overlap(x, np.zeros_like(x))


def test_overlap_of_device_arrays_reads_nothing():
    class Memory:
        def __init__(self, x):
            self.shape, self.strides, self.dtype = x.shape, x.strides, x.dtype
            self.data = type("Pointer", (), {"ptr": 4096 + x.ctypes.data - base.ctypes.data})

    base = np.zeros((4, 3, 8), BFLOAT16)
    assert dlpack.overlap(Memory(base), Memory(base[1:]))
    assert not dlpack.overlap(Memory(base[:, 0]), Memory(base[:, 2]))


class Strided(NamedTuple):
    """What an array of any library says of itself."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any


@settings(max_examples=examples(500))
@given(st.data(), st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), max_size=4), st.sampled_from([1, 2, 4]))
def test_overlap_with_itself_is_found_exactly(data, axes, itemsize):
    shape, strides = [n for n, _ in axes], [step for _, step in axes]
    starts = [sum(i * step for i, step in zip(index, strides, strict=True)) for index in np.ndindex(*shape)]
    occupied = [start + byte for start in starts for byte in range(itemsize)]
    array = Strided((*shape,), (*strides,), np.dtype(f"V{itemsize}"))
    assert dlpack.overlaps_itself(array) == (len(set(occupied)) < len(occupied))


def test_arrays_too_entangled_to_tell_overlap_with_themselves(monkeypatch):
    array = Strided((7, 8, 9, 10), (331, 197, 101, 67), np.dtype(np.uint8))
    monkeypatch.setattr(dlpack, "OVERLAP_WORK", 1)
    assert dlpack.overlaps_itself(array)
    assert not dlpack.overlaps_itself(Strided((2**20, 2**15, 2), (4, 2**23, 2**60), np.dtype(np.float32)))


def test_arrays_too_entangled_to_tell_count_as_overlapping(monkeypatch):
    monkeypatch.setattr(dlpack, "OVERLAP_WORK", 1)
    memory = np.zeros(10_000, np.uint8)
    views = [np.lib.stride_tricks.as_strided(memory[start:], (7, 8, 9, 10), (331, 197, 101, 67)) for start in (0, 13)]
    assert dlpack.overlap(*views)
