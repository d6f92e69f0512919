"""A contender that multiplies in fp8: cuDNN, by its own Python interface, which PyTorch does not reach."""

from __future__ import annotations

import importlib
from typing import Any

from .cases import Case
from .contender import Absent, Contender, refuse
from .inputs import Inputs

LARGEST = 448.0  # of float8_e4m3fn
COARSER = (
    2.0**3
)  # of rounding numbers to 4 digits of base 2, compared with 8 of bfloat16 and of the weights of the formula


def cudnn(case: Case, inputs: Inputs) -> Contender:
    """cuDNN's fused attention in fp8, with one scale for each array, as it knows them.

    On compute capability 9.0 its output is fp8, too: it is multiplied by what makes the largest value
    the largest number, since no mean of values is larger.
    """
    refuse(case)
    xp = inputs.xp
    if xp.__name__ != "cupy":
        raise Absent("needs CuPy arrays")
    if case.dtype != "bfloat16":
        raise Absent("needs bfloat16")
    try:
        library: Any = importlib.import_module("cudnn")
    except ImportError as error:
        raise Absent(f"nvidia-cudnn-frontend: {error}") from None
    from cuflash import quantize
    from cuflash.arrays.fp8 import decode, float8_dtype

    data_types = library.data_type
    handle = library.create_handle()
    library.set_stream(handle=handle, stream=xp.cuda.get_current_stream().ptr)
    graph = library.pygraph(
        io_data_type=data_types.FP8_E4M3,
        intermediate_data_type=data_types.FLOAT,
        compute_data_type=data_types.FLOAT,
        handle=handle,
    )
    memory: dict[Any, Any] = {}  # of the tensors of the graph
    operands, numbers = {}, {}
    for name in "qkv":
        quantized = quantize(getattr(inputs, name), per="tensor")
        bits = quantized.array.bits
        operands[name] = graph.tensor(
            name=name, dim=list(bits.shape), stride=list(bits.strides), data_type=data_types.FP8_E4M3
        )
        memory[operands[name]] = bits
        numbers[f"descale_{name}"] = quantized.scale
    out_scale = 1 / numbers["descale_v"]
    numbers |= {"descale_s": xp.float32(1 / LARGEST), "scale_s": xp.float32(LARGEST), "scale_o": out_scale}
    one = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1]}
    for name, number in numbers.items():
        operands[name] = graph.tensor(name=name, **one, data_type=data_types.FLOAT)
        memory[operands[name]] = xp.asarray(number, "float32").reshape(1, 1, 1, 1)
    causal = {"use_causal_mask": True} if case.causal else {}
    out, _, *largest = graph.sdpa_fp8(
        **operands, attn_scale=case.head_dim**-0.5, generate_stats=False, **causal, name="attention"
    )
    bits = xp.full(case.out_shape, 0xFF, "uint8")
    out.set_output(True).set_dim(list(bits.shape)).set_stride(list(bits.strides)).set_data_type(data_types.FP8_E4M3)
    memory[out] = bits
    for tensor in largest:
        tensor.set_output(True).set_dim(one["dim"]).set_stride(one["stride"]).set_data_type(data_types.FLOAT)
        memory[tensor] = xp.empty((1, 1, 1, 1), "float32")
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([library.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    workspace = xp.empty(max(1, graph.get_workspace_size()), "uint8")

    def forward() -> tuple[Any]:
        graph.execute(memory, workspace, handle=handle)
        return (bits,)

    def numbers_of(codes: Any) -> Any:
        return decode(xp, codes, float8_dtype("e4m3")) / out_scale

    return Contender(
        {"forward": forward},
        to_array=numbers_of,
        plans={"forward": f"cuDNN {library.backend_version()}, frontend {library.__version__}"},
        coarser=COARSER,
    )
