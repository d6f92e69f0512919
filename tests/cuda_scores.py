"""Scores in CUDA, each with the same score in Python, whose arrays tests/scored.py makes."""

from __future__ import annotations

import cuflash
from cuflash import Score

HEAD = "template <class T> T score(T s, int i, int j, int head, int batch, const Given<T>& given)"


def softcapped(s, i, j, *, head, batch, temperature):  # type: ignore[no-untyped-def]
    cap = temperature[batch, head]
    return cap * cuflash.tanh(s / cap)


SOFTCAPPED = f"""
{HEAD} {{
  const T cap = given.temperature(batch, head);
  return cap * tanh(s / cap);
}}
"""


def polynomial(s, i, j, *, head, table):  # type: ignore[no-untyped-def]
    x = cuflash.tanh(s / 2)
    total = 0.0
    for n in range(6, -1, -1):
        total = total * x + table[head, n]
    return s + total


POLYNOMIAL = f"""
template <class T> T horner(T x, int head, const Given<T>& given) {{
  T total = 0;
#pragma unroll 1
  for (int n = given.table.size(1) - 1; n >= 0; --n) total = total * x + given.table(head, n);
  return total;
}}
{HEAD} {{ return s + horner(tanh(s / 2), head, given); }}
"""


def interpolated(s, i, j, *, head, table, pos_q, pos_k, side):  # type: ignore[no-untyped-def]
    x = (pos_q[i, 0] - pos_k[j, 1]) / side
    n = cuflash.floor(x)
    return s + (1 - (x - n)) * table[head, n + 3] + (x - n) * table[head, n + 4]


INTERPOLATED = f"""
{HEAD} {{
  const T x = (given.pos_q(i, 0) - given.pos_k(j, 1)) / given.side();
  const int n = floor(x);  // some places are outside of the table
  const T part = x - n;
  return s + (1 - part) * given.table(head, n + 3) + part * given.table(head, n + 4);
}}
"""


def branching(s, i, j, *, head, slopes, kind_q, kind_k, gate, pairs):  # type: ignore[no-untyped-def]
    far = s - slopes[head] * cuflash.abs(i - j)
    near = s * cuflash.exp(-cuflash.abs(gate[j])) + 0.5 * pairs[i, j]
    own = cuflash.where(i - j > 20, s * s / 4, near)
    own = cuflash.where(i - j > 40, -float("inf"), own)
    return cuflash.where(kind_q[i] != kind_k[j], far, own)


BRANCHING = f"""
{HEAD} {{
  if (given.kind_q(i) != given.kind_k(j)) return s - given.slopes(head) * abs(i - j);
  if (i - j > 40) return -infinity();
  if (i - j > 20) return s * s / 4;
  return s * exp(-abs(given.gate(j))) + T(0.5) * given.pairs(i, j);
}}
"""


def counted(s, i, j, *, kind_q, kind_k, table, gamma, head):  # type: ignore[no-untyped-def]
    total = s
    for n in range(3):
        seen = cuflash.sin(total + n) * table[kind_k[j] // 2, n] + gamma[head] * cuflash.cos(total)
        total = cuflash.where(n < kind_q[i], seen, total)
    return total


# The number of reads differs from row to row; the first row of the table is read by most keys.
COUNTED = f"""
{HEAD} {{
  T total = s;
#pragma unroll 1
  for (int n = 0; n < given.kind_q(i); ++n)
    total = sin(total + n) * given.table(given.kind_k(j) / 2, n) + given.gamma(head) * cos(total);
  return total;
}}
"""


def of_functions(s, i, j, *, head, gate, cap, gamma, pairs, kind_q):  # type: ignore[no-untyped-def]
    x, y = gate[j], gamma[head]
    bounded = cuflash.minimum(cuflash.maximum(s, -cap), cap)
    rooted = cuflash.where(x > 0, cuflash.sqrt(cuflash.maximum(x, 0.0)) + cuflash.log(x), 0.0)
    smooth = cuflash.log(1 + cuflash.exp(-cuflash.abs(s))) + cuflash.maximum(s, 0.0)
    rooted = rooted + cuflash.sqrt(kind_q[i])
    return 0.5 * bounded + 0.2 * rooted + y ** (1 + cuflash.sin(pairs[i, j])) + 0.1 * smooth


CAPS = f"""
// The logarithm of 1 + exp(x), with the derivatives that it is known to have.
template <class T> T softplus(T x) {{
  const auto of = value_of(x), e = exp(-abs(of)), slope = (of > 0 ? 1 : e) / (1 + e);
  return chain(x, log(1 + e) + max(of, 0), slope, slope * (1 - slope));
}}
{HEAD} {{
  const T x = given.gate(j), cap = given.cap();
  T total = T(0.5) * clamp(s, -cap, cap);
  const T count = given.kind_q(i);  // of a root of 0 the derivative is infinite, but nothing depends on it here
  total += T(0.2) * (where(x > 0, sqrt(max(x, 0)) + log(x), 0) + sqrt(count));
  total += pow(given.gamma(head), 1 + sin(given.pairs(i, j)));
  total -= -T(0.1) * softplus(s);
  return total;
}}
"""

CUDA_SCORES = {
    function.__name__: Score(cuda=cuda, arrays=arrays, python=function)
    for cuda, arrays, function in (
        (SOFTCAPPED, ["temperature"], softcapped),
        (POLYNOMIAL, ["table"], polynomial),
        (INTERPOLATED, ["table", "pos_q", "pos_k", "side"], interpolated),
        (BRANCHING, ["slopes", "kind_q", "kind_k", "gate", "pairs"], branching),
        (COUNTED, ["kind_q", "kind_k", "table", "gamma"], counted),
        (CAPS, ["gate", "cap", "gamma", "pairs", "kind_q"], of_functions),
    )
}
