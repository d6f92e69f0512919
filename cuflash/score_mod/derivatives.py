"""Derivatives of typed expressions, as expressions: reverse mode, which shares the subexpressions of the value.

Where an expression has a kink its derivative is one-sided: `cuflash.score_mod.functions` says which. An argument that
`where`, `minimum` or `maximum` does not take has the derivative 0, even where its own derivative is infinite or NaN:
below such a choice, derivatives are multiplied by `product`, which is 0 wherever its first factor is 0.

In the chain rule 0 times infinity is 0, too. This happens where the slope of a root or a power is infinite, as in
``a * sqrt(x)`` at a = 0 or in ``sqrt(x * x)`` at its kink, and where a finite value has an infinite subexpression, as
in
``1 / (1 + exp(-x))`` when the exponential overflows, or in ``exp(-1 / (x * x))`` at 0. `cuflash.score_mod.ranges` tells
where that may be; elsewhere products are plain.
"""

from __future__ import annotations

from cuflash.score_mod.nodes import Node, in_order, node
from cuflash.score_mod.ranges import Range, ranges
from cuflash.score_mod.types import cast, real

ZERO, ONE = real(0), real(1)


def _is(x: Node, value: float) -> bool:
    return x.op == "constant" and x.payload == value


def made(op: str, *args: Node) -> Node:
    return node(op, args, None, "float")


def condition(op: str, x: Node, y: Node) -> Node:
    return node(op, (x, y), None, "bool")


def add(x: Node, y: Node) -> Node:
    if _is(x, 0):
        return y
    if y.op == "neg":
        return made("sub", x, y.args[0])
    return x if _is(y, 0) else made("add", x, y)


def negative(x: Node) -> Node:
    if x.op == "neg":
        return x.args[0]
    return (
        real(-float(x.payload))
        if x.op == "constant" and not isinstance(x.payload, (str, type(None)))
        else made("neg", x)
    )


def multiply(x: Node, y: Node) -> Node:
    """The product of two factors that are finite wherever the other one is 0."""
    if _is(x, 1):
        return y
    if _is(y, 1):
        return x
    if _is(x, -1):
        return negative(y)
    if _is(y, -1):
        return negative(x)
    return made("mul", x, y)


def choose(which: Node, x: Node, y: Node) -> Node:
    return x if x is y else made("where", which, x, y)


def derivatives(root: Node, wanted: list[Node]) -> list[Node]:
    """The derivatives of a real expression by some of its nodes."""
    order = list(in_order([root]))
    depends = set(wanted)
    for at in order:
        if at.type == "float" and any(arg in depends for arg in at.args):
            depends.add(at)
    known = ranges(root)
    adjoint: dict[Node, Node] = {root: ONE}
    chosen: set[Node] = set()  # nodes whose adjoint may be 0 by a choice, or because a value is at its limit
    steep: set[Node] = set()  # nodes whose adjoint may be infinite
    for at in reversed(order):
        if at not in depends or at not in adjoint or at in wanted:
            continue
        own = adjoint[at]
        is_steep = at.op in ("sqrt", "pow") and not known[at.args[0]].is_positive
        for arg, factor in local_derivatives(at):
            if arg not in depends:
                continue
            summand = _summand(own, factor, at in chosen, is_steep, at in steep)
            if at in chosen or not isinstance(factor, Node) or is_at_limit(at, arg, known[arg]):
                chosen.add(arg)
            if at in steep or is_steep:
                steep.add(arg)
            adjoint[arg] = add(adjoint[arg], summand) if arg in adjoint else summand
    return [adjoint.get(at, ZERO) for at in wanted]


def is_at_limit(at: Node, arg: Node, known: Range) -> bool:
    """Whether the value of a node may be finite where an argument is infinite. Its derivative by this is 0 there."""
    return known.may_be_infinite and (
        at.op in ("exp", "tanh", "sech2", "pow") or (at.op == "div" and arg is at.args[1])
    )


def _summand(
    adjoint: Node, factor: Node | tuple[Node, bool], is_chosen: bool, is_steep: bool, may_be_infinite: bool
) -> Node:
    """What a node adds to the derivative by an argument: its own derivative times `factor`, that of its value.

    `is_chosen` and `may_be_infinite` are said of its own derivative, `is_steep` of the factor.
    """
    if not isinstance(factor, Node):
        takes_first, takes = factor
        return choose(takes_first, adjoint, ZERO) if takes else choose(takes_first, ZERO, adjoint)
    may_be_0 = is_chosen and factor.op != "constant"
    summand = made("product", adjoint, factor) if may_be_0 else multiply(adjoint, factor)
    if is_steep:
        summand = zero_where(adjoint, summand)
    return zero_where(factor, summand) if may_be_infinite else summand


def zero_where(x: Node, product: Node) -> Node:
    """A product with x, 0 where x is, even if the other factor is infinite."""
    return product if x.op == "constant" else choose(condition("eq", x, ZERO), ZERO, product)


def local_derivatives(at: Node) -> list[tuple[Node, Node | tuple[Node, bool]]]:
    """The arguments of a node in order, each with its derivative: an expression, or (condition, takes).

    With a condition it is 1 where that agrees with `takes`, else 0.
    """
    if at.op in ("add", "sub"):
        return [(at.args[0], ONE), (at.args[1], ONE if at.op == "add" else real(-1))]
    if at.op == "neg":
        return [(at.args[0], real(-1))]
    if at.op == "where":
        return [(at.args[1], (at.args[0], True)), (at.args[2], (at.args[0], False))]
    if at.op in ("min", "max"):
        x, y = at.args
        # False for a NaN: then the derivative is that of y.
        takes_x = condition("le", *((x, y) if at.op == "min" else (y, x)))
        return [(x, (takes_x, True)), (y, (takes_x, False))]
    if at.op in ("mul", "product"):
        return [(at.args[0], at.args[1]), (at.args[1], at.args[0])]
    if at.op == "div":
        x, y = at.args
        return [(x, made("div", ONE, y)), (y, negative(made("div", at, y)))]
    if at.op == "mod":
        x, y = at.args
        return [(x, ONE), (y, negative(made("floordiv", x, y)))]
    if at.op == "pow":
        x, y = at.args
        below = made("pow", x, made("sub", y, ONE))
        of_base = zero_where(below, zero_where(y, made("mul", y, below)))
        is_flat = condition("and", condition("eq", x, ZERO), condition("le", ZERO, y))  # 0 ** y is, but at y = 0
        return [(x, of_base), (y, choose(is_flat, ZERO, zero_where(at, made("mul", at, made("log", x)))))]
    if at.op == "abs":
        (x,) = at.args
        sign = choose(condition("lt", x, ZERO), real(-1), choose(condition("lt", ZERO, x), ONE, ZERO))
        return [(x, sign)]
    return _of_function(at)


def _of_function(at: Node) -> list[tuple[Node, Node | tuple[Node, bool]]]:
    if not at.args or at.op in ("floordiv", "load", "cast", "floor"):
        return []
    (x,) = at.args
    slopes = {
        "exp": lambda: at,
        "log": lambda: made("div", ONE, x),
        "sqrt": lambda: made("div", real(0.5), at),
        "tanh": lambda: made("sech2", x),
        "sech2": lambda: made("mul", made("mul", real(-2), made("tanh", x)), at),
        "sin": lambda: made("cos", x),
        "cos": lambda: negative(made("sin", x)),
    }
    return [(cast(x, "float"), slopes[at.op]())]


def loads_of(root: Node, name: str) -> list[Node]:
    """The nodes that read an array, in the order in which they are needed."""
    return [at for at in in_order([root]) if at.op == "load" and at.payload == name]
