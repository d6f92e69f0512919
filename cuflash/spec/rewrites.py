"""Functions that spell out options: a call computes these options in place of the functions.

``s - slopes[head] * abs(i - j)`` is ALiBi, ``s + pairs[head, i, j]`` a bias, ``c * tanh(s / c)`` a soft cap, and
``(i >= j) & (i - j < 256)`` a window. Kernels and the CPU path serve options faster than functions, because they know
where the bias of a tile lies and which tiles are hidden. The results are those that the functions define.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cuflash.arrays.array_info import FLOAT8
from cuflash.score_mod import program_of
from cuflash.score_mod.nodes import Node, in_order
from cuflash.spec.inputs import BY_NAME, INPUTS, NUMBER_ROWS, NUMBERS, SCORE_OPTIONS
from cuflash.spec.options import Options, diagonal_of
from cuflash.spec.outputs import model_of
from cuflash.spec.passes import JVP, PASSES

AXES = ("batch", "head", "i", "j")  # the axes of a bias, named after the inputs that index them
Index = tuple[slice | None, ...]
Bounds = tuple[int | None, int | None]  # (left, right) of a window
_ALL: Index = ()  # the array as it is
_PACKED = ("cu_seqlens_q", "cu_seqlens_k")
_LOOKED_AT = (*_PACKED, "block_table", *SCORE_OPTIONS)
LARGEST_SUM = 2**61  # of integers in a condition that is a window: integers of 64 bits do not wrap around then
MOST_FACTORS = 2  # of a summand that is an option: c * tanh(s / c), and slopes[head] * abs(i - j)


@dataclass(frozen=True, kw_only=True)
class Equivalent:
    """What a call computes in place of its functions."""

    options: Options  # the options of the call, with options in place of functions
    # By the name of an array that the score reads, the optional input that it becomes, and the index that turns its
    # axes into those of the input.
    becomes: Mapping[str, tuple[str, Index]]
    unread: tuple[str, ...]  # arrays of the functions that nothing reads any more

    def arrays(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays of a call, with the gradients that it writes to, by their new names."""
        dropped = {*self.becomes, *self.unread, *(f"t{name}" for name in self.unread)}
        renamed = {name: x for name, x in given.items() if name not in dropped}
        for name, (option, index) in self.becomes.items():
            for prefix in ("", "d", "t", "td"):
                array = given.get(f"{prefix}{name}")
                renamed.pop(f"{prefix}{name}", None)
                if array is not None:
                    renamed[f"{prefix}{option}"] = array[index] if index else array
        return renamed

    def need(self, names: Sequence[str]) -> tuple[str, ...]:
        """The results of these names by their new names, in the order in which the passes return them."""
        wanted = {self._gradient(name) for name in names}
        return tuple(dict.fromkeys(x for pass_ in PASSES for x in pass_.results_of(self.options) if x in wanted))

    def gradients(self, computed: Sequence[Any], given: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
        """The gradients that a call returns, made from those that a pass computed, which are those of `need`."""
        by_name = dict(zip(self.need(names), computed, strict=True))
        found = []
        for name in names:
            gradient = by_name[self._gradient(name)]
            if given.get(name) is not None:
                gradient = given[name]
            elif model_of(name) in self.becomes:
                gradient = gradient.reshape(given[model_of(name)].shape)
            found.append(gradient)
        return found

    def _gradient(self, name: str) -> str:
        """The new name of a result; only gradients of what a score reads have one."""
        if name in JVP.results_of(self.options):
            return name
        model = model_of(name)
        option, _ = self.becomes.get(model, (model, _ALL))
        return f"{name.removesuffix(model)}{option}"

    def describe(self, options: Options, given: Mapping[str, Any]) -> str:
        """The text about it in a plan, for the options and the arrays of the call."""
        cap = self.options.softcap
        numbers = [] if cap is None else [f"softcap = {cap}"]
        arrays = [f"{option} = {name}" for name, (option, _) in self.becomes.items()]
        bounds = [f"window = {self.options.window}"] if options.mask_function and not self.options.mask_function else []
        types = tuple((name, given[name].ndim, given[name].dtype.name) for name in options.score_args)
        program = program_of(options.score, options.mask_function, types)
        said = f"functions computed as the options that they spell out: {', '.join((*numbers, *arrays, *bounds))}"
        return f"{said}\n{program.describe()}"


def equivalent(
    options: Options, arrays: Mapping[str, Any], served: tuple[str, ...] = SCORE_OPTIONS
) -> Equivalent | None:
    """What a call computes in place of its functions; None where they are computed as functions.

    `arrays` are those of the call by name, None stands for an absent one. A function is replaced as a whole or not at
    all, by options that are `served`. It takes 2 us of a call that has functions.
    """
    if not (options.score or options.mask_function):
        return None
    names = options.score_args
    signature = tuple((name, tuple(arrays[name].shape), arrays[name].dtype.name) for name in (*INPUTS, *names))
    given = tuple(name for name in _LOOKED_AT if arrays.get(name) is not None)
    is_square = arrays.get("cu_seqlens_q") is arrays.get("cu_seqlens_k")
    return _equivalent(options, signature, given, is_square, served)


class _Call(NamedTuple):
    """The facts of a call that decide what its functions are equivalent to."""

    layout: str
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    is_packed: bool
    window: Bounds  # around the diagonal, including the causal mask
    diagonal: int | None  # None where sequences or batch entries have their own

    @property
    def sizes(self) -> dict[str, int]:
        """The lengths of the axes that the scores have, by the inputs that index them."""
        *batch, heads, seqlen_q, _ = _in_order(self.shapes["q"], self.layout)
        own = {"head": heads, "i": seqlen_q, "j": _in_order(self.shapes["k"], self.layout)[-2]}
        return own | ({"batch": batch[0]} if batch else {})


@functools.lru_cache(maxsize=256)
def _equivalent(
    options: Options,
    signature: tuple[tuple[str, tuple[int, ...], str], ...],
    given: tuple[str, ...],
    is_square: bool,
    served: tuple[str, ...],
) -> Equivalent | None:
    shapes = {name: shape for name, shape, _ in signature}
    dtypes = {name: dtype for name, _, dtype in signature}
    if not (_has_whole_batch(shapes) and _may_have_options(options, dtypes, given)):
        return None
    left, right = options.window or (None, None)
    window = (left, 0 if options.causal else right)
    diagonal = 0 if window == (None, None) else _diagonal(options, shapes, bool(given), is_square)
    call = _Call(options.layout, shapes, dtypes, bool(given), window, diagonal)
    changed: dict[str, Any] = {}
    bounds = _as_window(options, call)
    if bounds is not None:
        call = call._replace(window=bounds)
        changed |= {"mask_function": None, "causal": False, "window": bounds, "diagonal": 0}
    becomes: dict[str, tuple[str, Index]] = {}
    as_options = _as_options(options, call, served)
    if as_options is not None:
        cap, becomes = as_options
        changed |= {"score": None, "softcap": cap}
        if "alibi_slopes" in {option for option, _ in becomes.values()} and call.window == (None, None):
            changed["diagonal"] = 0
    if not changed:
        return None
    remaining = replace(options, **changed)
    kept = (*remaining.score_args, *becomes)
    return Equivalent(
        options=remaining, becomes=becomes, unread=tuple(name for name in options.score_args if name not in kept)
    )


def _has_whole_batch(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether q, k and v have one batch axis, of one length, or none."""
    q, k, v = (shapes[name] for name in INPUTS)
    return len(q) == len(k) == len(v) and (len(q) == 3 or (len(q) == 4 and q[0] == k[0] == v[0]))


def _may_have_options(options: Options, dtypes: Mapping[str, str], given: Collection[str]) -> bool:
    """Whether functions go with what else a call has. If not, the call raises an error that says so."""
    numbers = [name for name in NUMBERS if name in SCORE_OPTIONS and getattr(options, name) is not None]
    has_float8 = any(dtypes[name] in FLOAT8 for name in INPUTS)
    return options.diagonal is None and not has_float8 and not numbers and set(given) <= set(_PACKED)


def _diagonal(options: Options, shapes: Mapping[str, tuple[int, ...]], is_packed: bool, is_square: bool) -> int | None:
    """The diagonal of the window; None where sequences or batch entries have their own."""
    if is_packed and not is_square:
        return 0 if options.causal == "top_left" else None
    if options.causal == "lengths" and not is_packed:
        return None
    return diagonal_of(options, *(_in_order(shapes[name], options.layout)[-2] for name in ("q", "k")))


def _in_order(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """(..., heads, seqlen, dim)."""
    if layout == "bhsd":
        return shape
    *batch, seqlen, heads, dim = shape
    return (*batch, heads, seqlen, dim)


# ---- Scores ----------------------------------------------------------------------------------------------------------


def _of_score(
    root: Node, call: _Call, served: tuple[str, ...]
) -> tuple[float | None, dict[str, tuple[str, Index]]] | None:
    """The soft cap and optional inputs that a score consists of; None if there is more in it, or neither of these."""
    cap: float | None = None
    becomes: dict[str, tuple[str, Index]] = {}
    has_s = False
    for sign, summand in _summands(root):
        own_cap = _cap(summand, call)
        if sign > 0 and not has_s and (_is_product(summand) or own_cap is not None):
            has_s, cap = True, own_cap
            continue
        option = _alibi_slopes(sign, summand, call) or _bias(sign, summand, call)
        if option is None or option[1][0] not in served:
            return None
        name, target = option
        if name in becomes or any(target[0] == other for other, _ in becomes.values()):
            return None
        becomes[name] = target
    return (cap, becomes) if has_s and (cap is not None or becomes) else None


def _as_options(
    options: Options, call: _Call, served: tuple[str, ...]
) -> tuple[float | None, dict[str, tuple[str, Index]]] | None:
    """What score_mod consists of, if that is all of it and mask_mod reads none of its arrays."""
    if options.score is None or options.score.root is None:
        return None
    found = _of_score(options.score.root, call, served)
    read_by_mask = options.mask_function.arrays if options.mask_function is not None else ()
    return None if found is None or set(found[1]) & set(read_by_mask) else found


def _summands(root: Node) -> Iterator[tuple[int, Node]]:
    """The summands of an expression, each with its sign, one after the other: it may have any number."""
    pending = [(1, root)]
    while pending:
        sign, at = pending.pop()
        if at.op == "neg":
            pending.append((-sign, at.args[0]))
        elif at.op in ("add", "sub"):
            pending += ((-sign if at.op == "sub" else sign, at.args[1]), (sign, at.args[0]))
        else:
            yield sign, at


def _factors(root: Node) -> tuple[int, list[Node]]:
    """The sign of a product, and its factors; of more than options have, one more than these, and any sign."""
    sign, factors, pending = 1, list[Node](), [root]
    while pending and len(factors) <= MOST_FACTORS:
        at = pending.pop()
        if at.op == "neg":
            sign = -sign
            pending.append(at.args[0])
        elif at.op == "mul":
            pending += reversed(at.args)
        else:
            factors.append(at)
    return sign, factors


def _is_product(at: Node) -> bool:
    return at.op == "input" and at.payload == "s"


def _number(at: Node) -> float | None:
    is_number = at.op == "constant" and isinstance(at.payload, (int, float)) and not isinstance(at.payload, bool)
    return float(at.payload) if is_number else None  # type: ignore[arg-type]


def _cap(at: Node, call: _Call) -> float | None:
    """c of ``c * tanh(s / c)``, if the option may have that value."""
    sign, factors = _factors(at)
    of_tanh = [x for x in factors if x.op == "tanh"]
    numbers = [_number(x) for x in factors if x.op != "tanh"]
    if sign < 0 or len(of_tanh) != 1 or len(numbers) != 1 or numbers[0] is None:
        return None
    cap, inner = numbers[0], of_tanh[0].args[0]
    if inner.op != "div" or not _is_product(inner.args[0]) or _number(inner.args[1]) != cap:
        return None
    (row,) = (row for row in NUMBER_ROWS if row.name == "softcap")
    low, high, _ = row.range_of(call.dtypes["q"])
    return cap if low <= cap <= high else None


def _alibi_slopes(sign: int, at: Node, call: _Call) -> tuple[str, tuple[str, Index]] | None:
    """The slopes of ``-slopes[head] * abs(i - j)``, or under a causal mask without the ``abs``."""
    if call.diagonal != 0:
        return None
    own_sign, factors = _factors(at)
    loads = [x for x in factors if x.op == "load"]
    others = [x for x in factors if x.op != "load"]
    if len(loads) != 1 or len(others) != 1:
        return None
    is_abs = others[0].op == "abs"
    form = _linear(others[0].args[0] if is_abs else others[0])
    if form not in ((1, -1, 0), (-1, 1, 0)) or not (is_abs or call.window[1] == 0):  # there may be pairs with i < j
        return None
    of_distance = 1 if is_abs or form == (1, -1, 0) else -1
    if sign * own_sign * of_distance > 0:
        return None
    return _as_input("alibi_slopes", loads[0], call, _ALL)


def _bias(sign: int, at: Node, call: _Call) -> tuple[str, tuple[str, Index]] | None:
    """A per-pair bias, of keys or of queries."""
    if sign < 0 or at.op != "load" or call.is_packed:
        return None
    inputs = [str(x.payload) if x.op == "input" else "" for x in at.args]
    if not set(inputs) & {"i", "j"}:
        return None
    index: Index = tuple(slice(None) if axis in inputs else None for axis in AXES)
    while index[0] is None:
        index = index[1:]
    return _as_input("bias", at, call, _ALL if None not in index else index)


def _as_input(name: str, load: Node, call: _Call, index: Index) -> tuple[str, tuple[str, Index]] | None:
    """An array as an optional input, if each axis is one of the scores and as long, or has length 1 in a bias."""
    array = str(load.payload)
    shape, sizes, option = call.shapes[array], call.sizes, BY_NAME[name]
    inputs = [str(x.payload) for x in load.args if x.op == "input"]
    if not len(load.args) == len(inputs) == len(shape) or inputs != [axis for axis in AXES if axis in inputs]:
        return None
    if name == "alibi_slopes" and inputs not in (["head"], ["batch", "head"]):
        return None
    for axis, length in zip(inputs, shape, strict=True):
        if axis not in sizes or not (length == sizes[axis] or (length == 1 and option.broadcasts)):
            return None
    if call.dtypes[array] not in option.dtypes_with(call.dtypes["q"]):
        return None
    return array, (name, index)


# ---- Masks -----------------------------------------------------------------------------------------------------------


def _as_window(options: Options, call: _Call) -> Bounds | None:
    """The window that mask_mod and the options make together, if that is all of it, around the diagonal i = j."""
    if options.mask_function is None or call.diagonal != 0:
        return None
    return _of_mask(options.mask_function.root, call.window)


def _of_mask(root: Node, window: Bounds) -> Bounds | None:
    """The window that a mask and the options make together; None if the mask is more than a window."""
    found = [window]
    for condition in _conditions(root):
        bounds = _window(condition)
        if bounds is None:
            return None
        found.append(bounds)
    left, right = (min((x for x in side if x is not None), default=None) for side in zip(*found, strict=True))
    # A window as an option always includes the diagonal.
    return None if (left is not None and left < 0) or (right is not None and right < 0) else (left, right)


def _conditions(root: Node) -> list[Node]:
    """The conditions that all have to hold."""
    found, joined = list[Node](), {root}
    for at in reversed([*in_order([root])]):
        if at not in joined:
            continue
        if at.op == "and":
            joined.update(at.args)
        else:
            found.append(at)
    return found


def _window(at: Node) -> Bounds | None:
    """The window that a condition such as ``i - j < 5`` or ``abs(i - j) <= 8`` makes; None if it makes none."""
    if at.op not in ("lt", "le"):
        return None
    smaller, larger = at.args
    strict = int(at.op == "lt")
    inner, most = _linear(smaller.args[0] if smaller.op == "abs" else smaller), _linear(larger)
    if inner is None or most is None:
        return None
    if smaller.op == "abs":
        side = most[2] - strict
        return (side, side) if inner in ((1, -1, 0), (-1, 1, 0)) and most[:2] == (0, 0) else None
    of_i, of_j, rest = (x - y for x, y in zip(inner, most, strict=True))
    side = -rest - strict  # the most that of_i * i + of_j * j may be
    return {(1, -1): (side, None), (-1, 1): (None, side)}.get((of_i, of_j))


def _linear(root: Node) -> tuple[int, int, int] | None:
    """(a, b, c) of an expression that is a * i + b * j + c."""
    forms: dict[Node, tuple[int, int, int] | None] = {}
    for at in in_order([root]):
        forms[at] = _form(at, [forms[arg] for arg in at.args])
    return forms[root]


def _form(at: Node, args: Sequence[tuple[int, int, int] | None]) -> tuple[int, int, int] | None:
    """`_linear` of a node, from those of its arguments."""
    if at.op == "input" and at.payload in ("i", "j"):
        return (1, 0, 0) if at.payload == "i" else (0, 1, 0)
    if at.op == "constant":
        return (0, 0, at.payload) if type(at.payload) is int else None
    if at.op not in ("add", "sub", "neg") or None in args:
        return None
    signs = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}[at.op]
    a, b, c = (sum(sign * form[i] for sign, form in zip(signs, args, strict=True) if form) for i in range(3))
    return (a, b, c) if max(abs(a), abs(b), abs(c)) < LARGEST_SUM else None
