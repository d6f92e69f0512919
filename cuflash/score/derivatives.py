"""Derivatives of expressions with kinds, as expressions: reverse mode, which shares the subexpressions of the value.

Where an expression has a kink its derivative is one-sided: `cuflash.score.functions` says which. An argument that
`where`, `minimum` or `maximum` does not take has the derivative 0, even where its own derivative is infinite or NaN:
below such a choice, derivatives are multiplied by `product`, which is 0 wherever its first factor is 0.
"""

from __future__ import annotations

from cuflash.score.kinds import cast, real
from cuflash.score.nodes import Node, in_order, node

ZERO, ONE = real(0), real(1)


def _is(x: Node, value: float) -> bool:
    return x.op == "constant" and x.payload == value


def _made(op: str, *args: Node) -> Node:
    return node(op, args, None, "float")


def _condition(op: str, x: Node, y: Node) -> Node:
    return node(op, (x, y), None, "bool")


def add(x: Node, y: Node) -> Node:
    if _is(x, 0):
        return y
    if y.op == "neg":
        return _made("sub", x, y.args[0])
    return x if _is(y, 0) else _made("add", x, y)


def negative(x: Node) -> Node:
    if x.op == "neg":
        return x.args[0]
    return (
        real(-float(x.payload))
        if x.op == "constant" and not isinstance(x.payload, (str, type(None)))
        else _made("neg", x)
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
    return _made("mul", x, y)


def choose(condition: Node, x: Node, y: Node) -> Node:
    return x if x is y else _made("where", condition, x, y)


def derivatives(root: Node, wanted: list[Node]) -> list[Node]:
    """The derivatives of a real expression by some of its nodes."""
    order = list(in_order([root]))
    depends = set(wanted)
    for at in order:
        if at.kind == "float" and any(arg in depends for arg in at.args):
            depends.add(at)
    adjoint: dict[Node, Node] = {root: ONE}
    chosen: set[Node] = set()  # nodes whose adjoint may be 0 by a choice
    for at in reversed(order):
        if at not in depends or at not in adjoint or at in wanted:
            continue
        own, is_chosen = adjoint[at], at in chosen
        for arg, factor in _local(at):
            if arg not in depends:
                continue
            if isinstance(factor, Node):
                part = _scaled(own, factor, is_chosen)
            else:
                condition, takes = factor
                part = choose(condition, own, ZERO) if takes else choose(condition, ZERO, own)
                chosen.add(arg)
            if is_chosen:
                chosen.add(arg)
            adjoint[arg] = add(adjoint[arg], part) if arg in adjoint else part
    return [adjoint.get(at, ZERO) for at in wanted]


def _scaled(adjoint: Node, factor: Node, is_chosen: bool) -> Node:
    if is_chosen and factor.op != "constant":
        return _made("product", adjoint, factor)
    return multiply(adjoint, factor)


def _local(at: Node) -> list[tuple[Node, Node | tuple[Node, bool]]]:
    """The arguments of a node, each with its derivative: an expression, or (condition, takes), 1 where both agree."""
    if at.op in ("add", "sub"):
        return [(at.args[0], ONE), (at.args[1], ONE if at.op == "add" else real(-1))]
    if at.op == "neg":
        return [(at.args[0], real(-1))]
    if at.op == "where":
        return [(at.args[1], (at.args[0], True)), (at.args[2], (at.args[0], False))]
    if at.op in ("min", "max"):
        x, y = at.args
        # False for a NaN: then the derivative is that of y.
        takes_x = _condition("le", *((x, y) if at.op == "min" else (y, x)))
        return [(x, (takes_x, True)), (y, (takes_x, False))]
    if at.op == "mul":
        return [(at.args[0], at.args[1]), (at.args[1], at.args[0])]
    if at.op == "div":
        x, y = at.args
        return [(x, _made("div", ONE, y)), (y, negative(_made("div", at, y)))]
    if at.op == "mod":
        x, y = at.args
        return [(x, ONE), (y, negative(_made("floordiv", x, y)))]
    if at.op == "pow":
        x, y = at.args
        of_base = _made("mul", y, _made("pow", x, _made("sub", y, ONE)))
        return [(x, of_base), (y, _made("mul", at, _made("log", x)))]
    if at.op == "abs":
        (x,) = at.args
        sign = choose(_condition("lt", x, ZERO), real(-1), choose(_condition("lt", ZERO, x), ONE, ZERO))
        return [(x, sign)]
    return _of_function(at)


def _of_function(at: Node) -> list[tuple[Node, Node | tuple[Node, bool]]]:
    if not at.args or at.op in ("floordiv", "load", "cast", "floor"):
        return []
    (x,) = at.args
    slopes = {
        "exp": lambda: at,
        "log": lambda: _made("div", ONE, x),
        "sqrt": lambda: _made("div", real(0.5), at),
        "tanh": lambda: _made("sub", ONE, _made("mul", at, at)),
        "sin": lambda: _made("cos", x),
        "cos": lambda: negative(_made("sin", x)),
    }
    return [(cast(x, "float"), slopes[at.op]())]


def loads_of(root: Node, name: str) -> list[Node]:
    """The nodes that read an array, in the order in which they are needed."""
    return [at for at in in_order([root]) if at.op == "load" and at.payload == name]
