"""Tangents of attention and of its gradients by NumPy: `jvp` and `backward_jvp` of `cuflash.cpu.fallback`'s tiles.

Letters are those of `cuflash.testing.reference_tangents`. The forward pass has two more sums for each row,

    A = sum_j exp(S - m) (Z (tS - c) V + Z tV),  r = sum_j exp(S - m) (tS - c),

which are rescaled where the row max m rises, as O and the row sum l are. The shift c takes out of the tangents what all
keys of a row have in common, before they are summed: it moves to their mean so far wherever m rises. At the end
tlse = c + r / l, and tout = (A - (r / l) O) / l.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.arrays.cached import cached_property
from cuflash.cpu import fallback
from cuflash.cpu.fallback import (
    Job,
    JobGradients,
    OnlineSoftmax,
    Tile,
    argument_of_cap,
    derivative_by_softcap,
    entries,
    sums_of_entries,
)
from cuflash.cpu.gemm import product
from cuflash.score_mod.evaluation import evaluate

Array = NDArray[Any]


class TangentJob(Job):
    """Some rows of some heads, over all of their keys, with tangents."""

    def has(self, *names: str) -> bool:
        """Whether any of these arrays and numbers has a tangent."""
        return not self.call.moved.isdisjoint(names)

    def number(self, name: str) -> Any:
        """The tangent of a number."""
        return self.dtype.type(self.call.numbers[name][()] if self.has(name) else 0)

    @property
    def moves_scores(self) -> bool:
        """Whether scores or the sink have tangents."""
        return not self.call.moved <= {"v", "out", "lse"}

    @cached_property
    def scaled_q_tangent(self) -> Array:
        """The tangent of ``scale * q``."""
        found = np.zeros_like(self.q)
        if self.has("q"):
            found += self.of_rows("tq") * self.dtype.type(self.problem.scale)
        if self.has("scale"):
            found += self.q * self.number("scale")
        return found

    @property
    def sink_tangents(self) -> Array:
        """The tangent of the sink of each row, 0 without one."""
        tangents = np.zeros(self.shape, self.dtype)
        if self.has("sinks"):
            tangents[...] = self.call.arrays["tsinks"][self.at_heads][..., None]
        return self.folded(tangents[..., None])

    def product_tangents(self, tile: Tile) -> Array:
        """The tangents of the scaled products of a tile, in the shape of these."""
        found = np.zeros((*self.q.shape[:3], len(tile.keys)), self.dtype)
        if self.has("q", "scale"):
            found += product(self.scaled_q_tangent, self.of_keys("k", tile).swapaxes(2, 3))
        if self.has("k"):
            found += product(self.scaled_q, self.of_keys("tk", tile).swapaxes(2, 3))
        return found.reshape(*self.shape, len(tile.keys))

    def score_tangents(self, tile: Tile, s: Array, ts: Array, scores: Array) -> Array:
        """The tangents of scores, from the scaled products s, their tangents and the scores; 0 of hidden pairs."""
        call, found = self.call, ts
        if call.program.score is not None:
            inputs = {**tile.inputs, "s": s, "ts": ts}
            (found,) = evaluate([call.tangents.score], inputs, call.score_args, self.dtype)
        if self.problem.softcap is not None:
            x = argument_of_cap(s, self.dtype.type(self.problem.softcap))
            tanh = np.tanh(x)
            found = found * (1 - tanh * tanh)
            if self.has("softcap"):
                found = found + derivative_by_softcap(x, tanh) * self.number("softcap")
        if self.has("alibi_slopes"):
            found = found - call.arrays["talibi_slopes"][self.at_heads][..., None, None] * self.distances(tile)
        if self.has("bias"):
            found = found + self.of_pairs("tbias", tile.keys).astype(self.dtype, copy=False)
        return np.where(scores == -np.inf, self.dtype.type(0), found)

    # ---- jvp ---------------------------------------------------------------------------------------------------------

    def forward(self) -> None:
        """Write out, lse and their tangents."""
        softmax = OnlineSoftmax(self.sinks)
        o = np.zeros((*self.q.shape[:3], self.problem.head_dim_v), self.dtype)
        a, r = np.zeros_like(o), self.sink_tangents  # the weight of the sink is 1 at first
        shift = np.zeros_like(r)
        for tile in self.tiles():
            s, scores = self.scores(tile)
            u = None
            if self.moves_scores:
                u = self.folded(self.score_tangents(tile, s, self.product_tangents(tile), scores))
            before = softmax.row_sum
            weights, factor = softmax.step(self.folded(scores))
            o, a, r = o * factor, a * factor, r * factor
            if u is not None:
                u -= shift
                np.copyto(u, 0, where=weights == 0)
                gain = r + (weights * u).sum(axis=-1, keepdims=True)
                is_moved = (factor < 1) & (softmax.row_sum > 0)
                gain = np.where(is_moved, gain / np.where(is_moved, softmax.row_sum, 1), 0)
                shift, a, r = shift + gain, a - gain * o, r - gain * (before * factor)
                u -= gain
                r += (weights * u).sum(axis=-1, keepdims=True)
            v = self.of_keys("v", tile)
            kept = weights * self.kept(tile) if self.problem.dropout else weights
            o += product(kept, v)
            if u is not None:
                a += product(kept * u, v)
            if self.has("v"):
                a += product(kept, self.of_keys("tv", tile))
        row_sum = np.where(softmax.row_sum == 0, 1, softmax.row_sum)
        mean = r / row_sum
        self.write("out", o / row_sum)
        self.write("lse", softmax.row_max + np.log(softmax.row_sum))
        self.write("tout", (a - mean * o) / row_sum)
        self.write("tlse", shift + mean)

    # ---- backward_jvp ------------------------------------------------------------------------------------------------

    def deltas(self, dO: Array, O: Array, tdO: Array | None, is_empty: Array) -> tuple[Array, Array]:  # noqa: E741
        """``rowsum(dO * O) - dlse``, and its tangent."""
        delta = (dO * O).sum(axis=-1, keepdims=True)
        tdelta = (dO * self.of_rows("tout")).sum(axis=-1, keepdims=True)
        if tdO is not None:
            tdelta += (tdO * O).sum(axis=-1, keepdims=True)
        for total, name in ((delta, "dlse"), (tdelta, "tdlse")):
            if name in self.call.arrays:
                total -= np.where(is_empty, 0, self.of_rows(name))
        return delta, tdelta

    def weight_gradients(self, tile: Tile, dO: Array, tdO: Array | None, kept: Array | None) -> tuple[Array, Array]:
        """The gradient of the weights of a tile, with dropout, and its tangent."""
        dp = product(dO, self.of_keys("v", tile).swapaxes(2, 3))
        tdp = np.zeros_like(dp)
        if self.has("v"):
            tdp += product(dO, self.of_keys("tv", tile).swapaxes(2, 3))
        if tdO is not None:
            tdp += product(tdO, self.of_keys("v", tile).swapaxes(2, 3))
        return (dp, tdp) if kept is None else (dp * kept, tdp * kept)

    def backward(self, wanted: Mapping[str, Array]) -> JobGradients:
        """Write the tangent of dq, if it is wanted, and return what the job adds to those of the other gradients."""
        lse, dO, O = (self.of_rows(name) for name in ("lse", "dout", "out"))  # noqa: E741 (the paper's letter)
        weights, is_empty = self.weights_of(lse), lse == -np.inf
        tlse = np.where(is_empty, 0, self.of_rows("tlse"))
        tdO = self.of_rows("tdout") if self.has("dout") else None
        delta, tdelta = self.deltas(dO, O, tdO, is_empty)
        of_job = TangentGradients(self, wanted)
        tdq = np.zeros(self.q.shape, self.dtype)  # over scale, without the part of its tangent
        dq = np.zeros(tdq.shape, self.dtype)  # over scale
        for tile in self.tiles():
            s, scores = self.scores(tile)
            ts = self.product_tangents(tile)
            u = self.folded(self.score_tangents(tile, s, ts, scores)) - tlse
            p = weights(self.folded(scores))
            np.copyto(u, 0, where=p == 0)
            kept = self.kept(tile) if self.problem.dropout else None
            if "dv" in wanted:
                tdv = product((p * u if kept is None else p * u * kept).swapaxes(2, 3), dO)
                if tdO is not None:
                    tdv += product((p if kept is None else p * kept).swapaxes(2, 3), tdO)
                of_job.add_keys("dv", tile, tdv)
            if of_job.is_of_values:
                continue
            ds, tds = self.weight_gradients(tile, dO, tdO, kept)
            ds = p * (ds - delta)
            tds = u * ds + p * (tds - tdelta)
            if of_job.is_of_scores:
                both = of_job.add_tangents(tile, s, ts, ds.reshape(s.shape), tds.reshape(s.shape))
                ds, tds = (self.folded(x) for x in both)
            if "dk" in wanted:
                tdk = product(tds.swapaxes(2, 3), self.scaled_q)
                if self.has("q", "scale"):
                    tdk += product(ds.swapaxes(2, 3), self.scaled_q_tangent)
                of_job.add_keys("dk", tile, tdk)
            if "dq" in wanted or "dscale" in wanted:
                tdq += product(tds, self.of_keys("k", tile))
                if self.has("k"):
                    tdq += product(ds, self.of_keys("tk", tile))
                if self.has("q", "scale"):
                    dq += product(ds, self.of_keys("k", tile))
        if "dscale" in wanted:
            tdscale = tdq * self.q
            if self.has("q"):
                tdscale += dq * self.of_rows("tq")
            of_job.of_heads["dscale"] = self.sum_of_rows(tdscale)
        if "dsinks" in wanted and "sinks" in self.call.arrays:
            of_sinks = weights(self.sinks) * ((self.sink_tangents - tlse) * delta + tdelta)
            of_job.of_heads["dsinks"] = -self.sum_of_rows(of_sinks)
        if "dq" in wanted:
            self.write("dq", tdq * self.dtype.type(self.problem.scale) + dq * self.number("scale"))
        return of_job


class TangentGradients(JobGradients):
    """What a job adds to the tangents of gradients that jobs share, under the names of the gradients."""

    job: TangentJob

    def add_tangents(self, tile: Tile, s: Array, ts: Array, ds: Array, tds: Array) -> tuple[Array, Array]:
        """Add to the tangents of the gradients of what makes scores of the scaled products s, whose tangents are ts.

        `ds` and `tds` are the gradient of the scores and its tangent; returned are those of s. Only pairs with weight
        count.
        """
        job, call, problem = self.job, self.job.call, self.job.problem
        if "dbias" in self.wanted and "bias" in call.arrays:
            self.add_bias(tile, tds)
        if "dalibi_slopes" in self.wanted and "alibi_slopes" in call.arrays:
            self.add_heads("dalibi_slopes", -tds * job.distances(tile))
        counts = (ds != 0) | (tds != 0)
        if problem.softcap is not None:
            cap = job.dtype.type(problem.softcap)
            x = argument_of_cap(np.where(counts, s, 0), cap)
            tanh = np.tanh(x)
            slope = 1 - tanh * tanh
            # The slope first: of a small cap, the tangent of x may be too large a number where the slope is 0.
            tslope = -2 * tanh * slope * np.where(counts, ts - x * job.number("softcap"), 0) / cap
            if "dsoftcap" in self.wanted:
                self.add_heads("dsoftcap", tds * derivative_by_softcap(x, tanh) - ds * x * tslope)
            ds, tds = ds * slope, tds * slope + ds * tslope
        program = call.program
        if program.score is not None and program.by_s is not None:
            inputs = {**tile.inputs, "s": s, "ts": ts}
            reads = [
                (name, load, tangent)
                for name, loads in program.loads.items()
                if f"d{name}" in self.wanted
                for load, tangent in zip(loads, call.tangents.reads[name], strict=True)
            ]
            nodes = [program.by_s, call.tangents.by_s]
            nodes += [x for _, load, tangent in reads for x in (load.derivative, tangent)]
            slope, moved, *others = (
                np.where(counts, x, 0) for x in evaluate(nodes, inputs, call.score_args, job.dtype)
            )
            for (name, load, _), derivative, tangent in zip(reads, others[::2], others[1::2], strict=True):
                indices = evaluate(load.at.args, inputs, call.score_args, job.dtype)
                shape = call.score_args[name].shape
                own = sums_of_entries(entries(shape, indices), tds * derivative + ds * tangent)
                self.of_entries.append((name, *own))
            ds, tds = ds * slope, tds * slope + ds * moved
        return ds, tds


run = functools.partial(fallback.run, job_type=TangentJob)
