"""Contenders that run graphs of trained models on the CPU: ONNX Runtime and OpenVINO, forward, in float32.

Both get as many threads as there are cores, which do not spin between calls: they would take the cores from whoever is
timed next.
"""

from __future__ import annotations

import functools
import importlib
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from . import environment
from .cases import Case
from .contender import Absent, Contender, refuse
from .inputs import Inputs

ONNX_OPSET, CONTRIB_OPSET, IR_VERSION = 23, 1, 10  # the first opset with Attention
TRIALS = 3  # of each operator of ONNX Runtime, of which the fastest is timed
OPERATORS = ("Attention", "MultiHeadAttention", "GroupQueryAttention")


def _check(case: Case, inputs: Inputs) -> None:
    refuse(case)
    if inputs.xp.__name__ != "numpy":
        raise Absent("needs NumPy arrays")
    if case.dtype != "float32":
        raise Absent("is run in float32")
    if case.seqlen_q != case.seqlen_k or case.head_dim_v != case.head_dim or case.group_size > 1:
        raise Absent("is run with as many queries as keys, one head dimension and no grouped heads")


def _rows_of_heads(x: Any) -> Any:
    """(batch, heads, seqlen, dim) as (batch, seqlen, heads * dim), in memory too."""
    batch, heads, seqlen, dim = x.shape
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(batch, seqlen, heads * dim)


def _onnx_model(case: Case, operator: str) -> tuple[bytes, bool]:
    """A graph of one operator, and whether its arrays are rows of heads."""
    onnx: Any = importlib.import_module("onnx")
    make, floats, integers = onnx.helper, onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
    scale, of_heads = case.head_dim**-0.5, operator != "Attention"
    shape = (case.batch, case.seqlen_q, case.num_heads * case.head_dim) if of_heads else case.q_shape
    arrays = [make.make_tensor_value_info(name, floats, shape) for name in "qkv"]
    names, results, domain = list("qkv"), ["out"], "com.microsoft"
    attributes: dict[str, Any] = {"num_heads": case.num_heads, "scale": scale}
    if operator == "Attention":
        domain, attributes = "", {"is_causal": int(case.causal), "scale": scale}
    elif operator == "MultiHeadAttention":
        attributes |= {"unidirectional": int(case.causal)}
    else:
        attributes |= {"kv_num_heads": case.num_heads}
        names += ["", "", "last_keys", "most_keys"]
        results += ["present_k", "present_v"]
        arrays += [make.make_tensor_value_info("last_keys", integers, (case.batch,))]
        arrays += [make.make_tensor_value_info("most_keys", integers, (1,))]
    node = make.make_node(operator, names, results, domain=domain, **attributes)
    outputs = [make.make_tensor_value_info(name, floats, None) for name in results]
    opsets = [make.make_opsetid("", ONNX_OPSET), make.make_opsetid("com.microsoft", CONTRIB_OPSET)]
    graph = make.make_graph([node], "attention", arrays, outputs)
    return make.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION).SerializeToString(), of_heads


def _onnx_call(library: Any, case: Case, inputs: Inputs, operator: str) -> Callable[[], tuple[Any, ...]]:
    """A call into an array made once, by one operator."""
    model, of_heads = _onnx_model(case, operator)
    options = library.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = environment.cores(), 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = library.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name in "qkv":
        x = getattr(inputs, name)
        binding.bind_cpu_input(name, _rows_of_heads(x) if of_heads else np.ascontiguousarray(x))
    if operator == "GroupQueryAttention":
        binding.bind_cpu_input("last_keys", np.full(case.batch, case.seqlen_k - 1, np.int32))
        binding.bind_cpu_input("most_keys", np.full(1, case.seqlen_k, np.int32))
    out = np.empty(_rows_of_heads(inputs.q).shape if of_heads else case.out_shape, np.float32)
    binding.bind_output("out", "cpu", 0, np.float32, out.shape, out.ctypes.data)
    if operator == "GroupQueryAttention":  # it appends k and v to a cache, whatever is asked for
        for name in ("present_k", "present_v"):
            binding.bind_output(name)
    shape = (case.batch, case.seqlen_q, case.num_heads, case.head_dim)
    result = out.reshape(shape).transpose(0, 2, 1, 3) if of_heads else out

    def forward() -> tuple[Any, ...]:
        session.run_with_iobinding(binding)
        return (result,)

    return forward


def onnxruntime(case: Case, inputs: Inputs) -> Contender:
    """ONNX Runtime, by the fastest of its operators for attention."""
    _check(case, inputs)
    try:
        library: Any = importlib.import_module("onnxruntime")
        importlib.import_module("onnx")
    except ImportError as error:
        raise Absent(f"onnxruntime: {error}") from None
    library.set_default_logger_severity(3)
    operators = [name for name in OPERATORS if case.causal or name != "GroupQueryAttention"]
    calls = {name: _onnx_call(library, case, inputs, name) for name in operators}

    def seconds(call: Callable[[], object]) -> float:
        call()
        taken = math.inf
        for _ in range(TRIALS):
            start = time.perf_counter()
            call()
            taken = min(taken, time.perf_counter() - start)
        return taken

    best = min(calls, key=lambda name: seconds(calls[name]))
    return Contender({"forward": calls[best]}, plans={"forward": best})


@functools.cache
def _openvino_core() -> Any:
    return importlib.import_module("openvino").Core()


def openvino(case: Case, inputs: Inputs) -> Contender:
    """OpenVINO's scaled_dot_product_attention, in float32 on processors with fewer bits, too."""
    _check(case, inputs)
    try:
        library: Any = importlib.import_module("openvino")
        operators: Any = importlib.import_module("openvino.opset13")
    except ImportError as error:
        raise Absent(f"openvino: {error}") from None
    parameters = [operators.parameter(list(case.q_shape), np.float32, name=name) for name in "qkv"]
    attention = operators.scaled_dot_product_attention(*parameters, causal=case.causal)
    config = {
        "INFERENCE_NUM_THREADS": environment.cores(),
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": "f32",
        "ENABLE_CPU_PINNING": False,
    }
    compiled = _openvino_core().compile_model(library.Model([attention], parameters), "CPU", config)
    request = compiled.create_infer_request()
    operands = [np.ascontiguousarray(getattr(inputs, name)) for name in "qkv"]
    for index, x in enumerate(operands):
        request.set_input_tensor(index, library.Tensor(x, shared_memory=True))
    out = np.empty(case.out_shape, np.float32)
    request.set_output_tensor(0, library.Tensor(out, shared_memory=True))

    def forward() -> tuple[Any, ...]:
        request.infer()
        return (out,)

    return Contender({"forward": forward}, plans={"forward": "scaled_dot_product_attention"})
