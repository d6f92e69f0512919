"""Attention over sequences that are longer than one device: each rank has a shard of the queries and of the keys.

>>> import numpy as np, cuflash.distributed as cd
>>> (comm,) = cd.threads(1)
>>> attn = cd.ContextParallel(comm, split="contiguous", causal=True)
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 100, 64))
>>> attn.forward(q, k, v).out.shape
(8, 100, 64)
"""

from cuflash.distributed.context import ContextParallel
from cuflash.distributed.mpi import Mpi
from cuflash.distributed.schedule import Schedule
from cuflash.distributed.split import Split, contiguous, zigzag
from cuflash.distributed.transports import Transport, threads

__all__ = ["ContextParallel", "Mpi", "Schedule", "Split", "Transport", "contiguous", "threads", "zigzag"]
