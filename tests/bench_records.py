"""Small cases of the benchmark, what a suite of them is, and records as a run leaves them."""

import json
import types
from dataclasses import replace

import numpy as np

from bench.cases import Case
from bench.functions import FUNCTIONS
from bench.suites import FA2, SUITES, Suite
from cuflash.arrays.array_info import numpy_dtype

SMALL = Case(head_dim=8, head_dim_v=12, seqlen_q=24, batch=2, num_heads=4, num_heads_kv=2, causal=True, dtype="float32")
PLAIN = Case(head_dim=8, seqlen_q=24, batch=2, num_heads=2, dtype="float32")
BIASED = [replace(PLAIN, bias="hqk"), replace(PLAIN, bias="bq"), replace(PLAIN, bias="k")]
OPTIONAL = [
    replace(PLAIN, softcap=0.5),
    replace(SMALL, alibi=True),
    *(replace(PLAIN, mask=axes) for axes in ("qk", "bk", "bhqk")),
    *(replace(SMALL, window=window) for window in (5, 24, 1000)),
    replace(PLAIN, dropout=0.4),
    replace(SMALL, sinks=True),
    replace(PLAIN, kv_lengths=True),
    *(replace(PLAIN, function=name) for name in FUNCTIONS),
    replace(PLAIN, function="box", mask="qk", dropout=0.3, sinks=True),
    replace(SMALL, softcap=0.5, alibi=True, bias="hqk", window=9, dropout=0.3, sinks=True, kv_lengths=True),
    replace(PLAIN, softcap=0.5, alibi=True, bias="bk", mask="qk", dropout=0.3, sinks=True, kv_lengths=True),
]
ALL_CASES = sorted({case for suite in SUITES.values() for case in suite.cases}, key=lambda case: case.name)


def abstract(shape, dtype):
    """Something with shape, strides and dtype, without the memory."""
    dtype = numpy_dtype(dtype)
    strides = tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) * dtype.itemsize for i in range(len(shape)))
    return types.SimpleNamespace(shape=shape, strides=strides, dtype=dtype)


def tiny_suite(kind="cpu", peers=("naive", "torch-cpu", "cudnn")):
    return Suite(kind=kind, cases=(PLAIN, SMALL), peers=peers, about="two tiny cases")


def by_contender(records, case, pass_):
    return {
        r["contender"]: r for r in records if r["record"] == "result" and (r["case"], r["pass"]) == (case.name, pass_)
    }


def synthetic(run_id="r1", *, speed=300.0, cases=FA2, ended=True, matched=""):
    """Records of a run of `cases`: cuDNN at 400, FlashAttention-2 at 250 TFLOP/s, cuflash at `speed`."""
    ceilings = {"product": "torch bfloat16 8192^3", "product_tflops": 790.0, "copy_tbytes_per_s": 4.2}
    base = {"run": run_id, "suite": "fa2"}
    contenders = ["cuflash", "cudnn", "fa2", "flex"]
    records = [
        base
        | {"record": "run", "kind": "gpu", "about": "bfloat16", "filter": matched, "contenders": contenders}
        | {"time": "2026-11-20T10:00:00+00:00", "revision": "abc", "device": "NVIDIA H200", "driver": "580"}
        | {"cuda": "13.0", "cpu": "x", "cores": 16, "versions": {"numpy": "2.5"}, "ceiling": ceilings}
    ]
    for case in cases:
        problem = {name: getattr(case, name) for name in case.__dataclass_fields__}
        for pass_ in ("forward", "backward"):
            row = base | {"record": "result", "case": case.name, "pass": pass_, "problem": problem}
            for name, tflops in (("cuflash", speed), ("cudnn", 400.0), ("fa2", 250.0)):
                us = case.flops(pass_) / tflops / 1e6
                errors = {"out": {"error": 2e-3, "formula_error": 1.6e-3, "ulp": 1e-2}}
                times = {"median_us": us, "p10_us": us * 0.98, "p90_us": us * 1.03, "repeats": 20}
                ok = {"contender": name, "status": "ok", "within_rule": True, "errors": errors}
                records.append(row | ok | times | {"tflops": tflops, "gbytes_per_s": 5.0})
            records.append(row | {"contender": "flex", "status": "absent", "reason": "torch: not here"})
    return records + ([base | {"record": "end"}] if ended else [])


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
