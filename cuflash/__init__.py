"""Exact attention and its gradients for CuPy and NumPy arrays, in memory linear in the sequence length.

>>> import numpy as np, cuflash
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 1000, 64), np.float32)
>>> cuflash.attention(q, k, v, causal=True).shape
(8, 1000, 64)
"""

from cuflash import block_masks
from cuflash.arrays.fp8 import fp8
from cuflash.bound import BoundForward
from cuflash.cpu import cpu_threads
from cuflash.flash_attention import FlashAttention
from cuflash.functional import attention, double_backward, hessian_vector_product, jvp_backward, logsumexp
from cuflash.score_mod import Score
from cuflash.score_mod.functions import abs, clip, cos, exp, floor, log, maximum, minimum, sin, sqrt, tanh, where
from cuflash.shards.merge import merge, merge_backward
from cuflash.spec.dropout import dropout_mask
from cuflash.spec.quantization import Quantized, dequantize, quantize, rotate
from cuflash.spec.results import (
    DoubleGradients,
    ForwardResult,
    Gradients,
    GradientTangents,
    JvpGradients,
    JvpResult,
    MergeGradients,
    MergeGradientTangents,
    MergeResult,
    TopKeys,
)
from cuflash.spec.streamed import streamed

__version__ = "0.3.0"

__all__ = [
    "BoundForward",
    "DoubleGradients",
    "FlashAttention",
    "ForwardResult",
    "GradientTangents",
    "Gradients",
    "JvpGradients",
    "JvpResult",
    "MergeGradientTangents",
    "MergeGradients",
    "MergeResult",
    "Quantized",
    "Score",
    "TopKeys",
    "abs",
    "attention",
    "block_masks",
    "clip",
    "cos",
    "cpu_threads",
    "dequantize",
    "double_backward",
    "dropout_mask",
    "exp",
    "floor",
    "fp8",
    "hessian_vector_product",
    "jvp_backward",
    "log",
    "logsumexp",
    "maximum",
    "merge",
    "merge_backward",
    "minimum",
    "quantize",
    "rotate",
    "sin",
    "sqrt",
    "streamed",
    "tanh",
    "where",
]


def __dir__() -> list[str]:
    """What is public, for tab completion; modules that happen to be imported are not."""
    return sorted(name for name in globals() if name in (*__all__, "testing") or name.startswith("__"))
