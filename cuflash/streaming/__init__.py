"""Attention over keys and values in host memory, which pass through the device chunk by chunk.

>>> import numpy as np, cuflash
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 1000, 64), np.float32)
>>> cuflash.FlashAttention(causal=True).forward(q, *cuflash.streamed(k, v, chunk=256)).out.shape
(8, 1000, 64)
"""

from cuflash.streaming.chunks import StreamPlan

__all__ = ["StreamPlan"]
