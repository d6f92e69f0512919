"""Scores that a caller writes in CUDA, for what traced functions cannot express, such as loops and branches.

CUDA source is known only by the results of its runs. Its derivatives come from runs with dual numbers
(`kernels/common/score/dual.cuh`). No subexpression is hoisted, no option takes its place, and every place in an array
that it reads counts as one that depends on the pair.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cuflash.arrays.checks import type_error, typed, value_error
from cuflash.score_mod.codegen import ELEMENTS
from cuflash.score_mod.indexing import COUNTED, ORIGIN
from cuflash.score_mod.nodes import Node
from cuflash.score_mod.program import (
    DERIVATIVE_TANGENTS,
    PAIR_READ,
    SCORE_FUNCTION,
    SCORE_TANGENT,
    SLOPE_TANGENT,
    Program,
    Traced,
)
from cuflash.score_mod.tables import Table

FIRST_LINE = '#line 1 "score"'  # compilers then count the lines of the source, and name it after its argument
SIGNATURE = "template <class T> T score(T s, int i, int j, int head, int batch, const Given<T>& given)"
# The source as a function of the scaled product, with or without a tangent, and of the record of its reads.
_RUN = """\
  const auto run = [&](auto s, score_text::Reads& reads) {{
    return score_text::score<decltype(s)>(s, {}, {{arrays, reads}});
  }};
"""
REALS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class Score:
    """A score in CUDA C++, for `FlashAttention(score=...)`: docs/score.md has the rules.

    Parameters
    ----------
    cuda : str
        The source of ``template <class T> T score(T s, int i, int j, int head, int batch, const Given<T>& given)``, and
        of functions that it calls. T is float, or double for float64 arrays, or a dual number of these, which gives
        derivatives.
    arrays : sequence of str, optional
        The arrays that the source reads, as ``given.name(index, ...)``, and that the calls are given by these names.
    python : callable, optional
        The same score as a function that is traced. It computes NumPy arrays, and tests compare the source with it.

    Raises
    ------
    TypeError, ValueError
        `cuda` is no str, or lacks the function; `arrays` are no identifiers, or not all different;
        `python` cannot be traced, or reads other arrays.
    NotImplementedError
        A call on NumPy arrays without `python`.

    See Also
    --------
    FlashAttention : The option `score`.

    Examples
    --------
    >>> import cuflash
    >>> capped = '''
    ... template <class T> T score(T s, int i, int j, int head, int batch, const Given<T>& given) {
    ...   return given.cap(head) * tanh(s / given.cap(head));
    ... }
    ... '''
    >>> cuflash.FlashAttention(score=cuflash.Score(cuda=capped, arrays=["cap"])).options.score.arrays
    ('cap',)
    """

    cuda: str
    arrays: Sequence[str] = ()
    python: Callable[..., Any] | Traced | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.cuda, str):
            raise type_error("cuda", typed(self.cuda), "the source of a score in CUDA C++")
        if not re.search(r"\bscore\s*\(", self.cuda):
            raise value_error("cuda", "source without a function score", SIGNATURE)
        if isinstance(self.arrays, str) or not isinstance(self.arrays, Iterable):
            raise type_error("arrays", typed(self.arrays), "a sequence of names")
        names = tuple(self.arrays)
        for name in names:
            if not isinstance(name, str):
                raise type_error("arrays", typed(name), "names of arrays")
            is_name = name == ORIGIN or re.fullmatch(r"(?!(T|Given)$)[A-Za-z]\w*", name, re.ASCII)
            if not is_name or names.count(name) > 1:
                raise value_error("arrays", repr(name), "identifiers that differ, other than T and Given")
        traced = self.python
        if traced is not None and not isinstance(traced, Traced):
            if not callable(traced):
                raise type_error("python", typed(traced), "None or a function of (s, i, j, *, ...)")
            traced = Traced.of(traced, "score")
        if traced is not None and {*traced.arrays, ORIGIN} != {*names, ORIGIN}:
            raise value_error("python", f"a function of {_listed(traced.arrays)}", f"one of {_listed(names)} as arrays")
        object.__setattr__(self, "arrays", names)
        object.__setattr__(self, "python", traced)

    @property
    def read(self) -> Sequence[str]:
        """The names of all arrays: what the source reads is not looked into."""
        return self.arrays

    @property
    def root(self) -> Node | None:
        """None: CUDA source is no expression."""
        return None

    def of_slice(self) -> Score:
        """The score of a slice of a longer problem: see `cuflash.score_mod.indexing`."""
        python = self.python.of_slice() if isinstance(self.python, Traced) else None
        return replace(self, arrays=(*self.arrays, ORIGIN), python=python)

    def on_numpy(self) -> Traced:
        """The function in Python."""
        if not isinstance(self.python, Traced):
            raise NotImplementedError(
                "score: got NumPy arrays for a Score of CUDA alone, expected CuPy arrays; or give Score the same score "
                "as a function in Python, python=, which computes NumPy arrays"
            )
        return self.python

    def program(self, mask: Node | None, arrays: tuple[tuple[str, int, str], ...]) -> Program:
        """See `cuflash.score_mod.program.ScoreFunction`."""
        return TextProgram(score=None, mask=mask, by_s=None, arrays=arrays, loads={}, of=self)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "no arrays"


@dataclass(frozen=True, kw_only=True)
class TextProgram(Program):
    """The program of CUDA source, with the expression of a mask.

    Attributes
    ----------
    of : Score
    """

    of: Score

    changes_slope = True
    reads_pairs = True
    reads_points = False

    def on_numpy(self) -> Program:
        """The program of the function in Python."""
        return self.of.on_numpy().program(self.mask, self.arrays)

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The arrays of real numbers that the source reads."""
        return tuple(name for name, _, dtype in self.arrays if name in self.of.arrays and dtype in REALS)

    def derivatives_read_s(self, wanted: Collection[str]) -> bool:
        """True, because derivatives of CUDA source may depend on s."""
        return True

    def classes(self, wanted: Collection[str]) -> list[str]:
        """One for each array. Unlike an expression, it shows no index of its reads."""
        return ["known by running the source" for name in self.differentiable if name in wanted]

    def summed(self, wanted: Collection[str]) -> tuple[str, ...]:
        """The arrays that are wanted."""
        return tuple(name for name in self.differentiable if name in wanted)

    def describe(self, tables: Sequence[Table] = ()) -> str:
        """The source, and the mask."""
        return "\n".join(filter(None, ("score in CUDA:", self.of.cuda.strip("\n"), super().describe(tables))))

    def _scores(self, arrays: Mapping[str, tuple[int, str]], wanted: Collection[str], known: Mapping[Node, str]) -> str:
        axes = {name: num_axes for name, num_axes, _ in self.arrays}
        members, made = "", []
        for name in self.of.arrays:
            if name == ORIGIN:
                continue
            index, dtype = arrays[name]
            read_as = f"T, {ELEMENTS[dtype]}, {index}, {axes[name]}, {str(name in wanted).lower()}"
            if self.moved is None:
                members += f"  GivenArray<{read_as}> {name};\n"
                made.append(f"{name}{{arrays_[{index}], reads_}}")
            else:
                tangent = arrays[f"t{name}"][0] if name in self.moved else index
                members += f"  MovedArray<{read_as}, {str(name in self.moved).lower()}> {name};\n"
                made.append(f"{name}{{arrays_[{index}], arrays_[{tangent}], reads_}}")
        made_of = "const ScoreArg* arrays_, Reads& reads_"
        given = f"  CUFLASH_DEVICE Given({made_of}){' : ' if made else ''}{', '.join(made)} {{}}\n"
        given = f"namespace score_text {{\ntemplate <class T>\nstruct Given {{\n{members}{given}}};\n}}\n"
        # Line numbers go on after the source, so that an error that a missing brace causes there names the source, too.
        source = f"{FIRST_LINE}\nnamespace score_text {{ {self.of.cuda}\n}}\n"
        body = f"{self._run(arrays)}  return score_text::score_of(s, by_s, run);\n"
        return self._points(arrays, known) + given + source + f"{SCORE_FUNCTION} {{\n{body}}}\n"

    def _reads(self, arrays: Mapping[str, tuple[int, str]], summed: Collection[str]) -> list[tuple[int, int, bool]]:
        """One read for each array, which stands for all reads of it."""
        return [(arrays[name][0], PAIR_READ, False) for name in summed]

    def _tangents(
        self, arrays: Mapping[str, tuple[int, str]], summed: Collection[str], known: Mapping[Node, str]
    ) -> str:
        if self.moved is None:
            return ""
        run, source = self._run(arrays), ""
        for function, found in ((SCORE_TANGENT, "tangent_of"), (SLOPE_TANGENT, "slope_tangent_of")):
            source += f"{function} {{\n{run}  return score_text::{found}(s, ts, run);\n}}\n"
        if not summed:
            return source
        visit = _visit(arrays, summed, "derivative", "tangent")
        return (
            f"{source}{DERIVATIVE_TANGENTS} {{\n{run}  score_text::derivative_tangents_of(s, ts, run, {visit});\n}}\n"
        )

    def _visits(self, arrays: Mapping[str, tuple[int, str]], summed: Collection[str], known: Mapping[Node, str]) -> str:
        return (
            f"{self._run(arrays)}  score_text::derivatives_of(s, by_s, run, {_visit(arrays, summed, 'derivative')});\n"
        )

    def _factors(
        self, arrays: Mapping[str, tuple[int, str]], summed: Collection[str], known: Mapping[Node, str]
    ) -> str:
        """Every factor is 1, because nothing is known to be the same for all pairs."""
        return "".join(f"  of_read[{read}] = 1;\n" for read, _ in enumerate(summed))

    def _run(self, arrays: Mapping[str, tuple[int, str]]) -> str:
        indices = list(COUNTED)
        if ORIGIN in arrays:
            index, dtype = arrays[ORIGIN]
            indices = [f"{x} + score_load<{ELEMENTS[dtype]}>(arrays[{index}], {n})" for n, x in enumerate(COUNTED)]
        return _RUN.format(", ".join(indices))


def _visit(arrays: Mapping[str, tuple[int, str]], summed: Collection[str], *found: str) -> str:
    """CUDA source: a function that visits what was `found` for one read, with the number of the read."""
    visits = "".join(
        f"    if (array == {arrays[name][0]}) visit(Integer<{read}>{{}}, place, {', '.join(found)});\n"
        for read, name in enumerate(summed)
    )
    return f"[&](int array, i64 place, {', '.join(f'Real {x}' for x in found)}) {{\n{visits}  }}"
