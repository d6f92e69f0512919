"""The Pathfinder task: what its images hold, what the model of `bench.pathfinder` computes, and that it learns."""

import functools
import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import pathfinder
from bench.__main__ import main
from bench.curves import Drawing, dilated, make_images
from bench.examples import run_page
from bench.training import PAGE
from tests.sampling import examples

page = functools.cache(functools.partial(run_page, PAGE))
DRAWINGS = [(16, 3, 1), (16, 4, 2), (32, 3, 0), (32, 5, 4), (32, 6, 6), (64, 5, 4)]
SMALL = pathfinder.Study(tasks=(), width=8, blocks=2, head_dim=16)
images_of = st.builds(
    lambda sizes, seed: (drawing := Drawing(*sizes), make_images(drawing, 1024 // drawing.side, seed)),
    st.sampled_from(DRAWINGS),
    st.integers(0, 2**32 - 1),
)


def linked_to(pixels, start, reach):
    """The pixels that a path leads to, from one drawn pixel to another within reach."""
    found = np.zeros_like(pixels, bool)
    found[tuple(start)] = True
    while True:
        grown = dilated(found[None], reach)[0] & (pixels > 0)
        if (grown == found).all():
            return found
        found = grown


# ---- Images ----------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(12))
@given(images_of)
def test_a_path_links_both_marks_where_the_answer_is_yes(drawn):
    """And nowhere else; what is marked is what paths from both ends reach. All of it stays within the image."""
    drawing, images = drawn
    for pixels, linked, marked, (one, other) in zip(*vars(images).values(), strict=True):
        reached = linked_to(pixels, one, drawing.reach)
        assert reached[tuple(other)] == linked
        np.testing.assert_array_equal(reached | linked_to(pixels, other, drawing.reach), marked)
        for end in (one, other):
            mark = pixels[tuple(slice(x - drawing.mark, x + drawing.mark + 1) for x in end)]
            assert mark[[0, -1]].all() and mark[:, [0, -1]].all() and mark[drawing.mark, drawing.mark]
        assert set(np.unique(pixels)) == {0, 1}
        assert not pixels[[0, -1]].any() and not pixels[:, [0, -1]].any()


@settings(max_examples=examples(2))
@given(st.sampled_from(DRAWINGS[:2]), st.integers(0, 2**32 - 1))
def test_images_repeat_and_are_balanced(sizes, seed):
    """Within five standard errors; so are the distances of marks, which say nothing of the answer."""
    drawing = Drawing(*sizes)
    images, same = make_images(drawing, 200, seed), make_images(drawing, 200, seed)
    for one, other in zip(vars(images).values(), vars(same).values(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert (make_images(drawing, 200, seed + 1).pixels != images.pixels).any()
    assert abs(images.linked.sum() - 100) < 5 * np.sqrt(200 / 4)
    apart = np.sqrt(((images.ends[:, 0] - images.ends[:, 1]) ** 2).sum(axis=1))
    means, errors = zip(
        *((x.mean(), x.std() / len(x) ** 0.5) for x in (apart[images.linked], apart[~images.linked])), strict=True
    )
    assert abs(means[0] - means[1]) < 5 * np.hypot(*errors) + drawing.tolerance
    assert apart.min() > drawing.least - drawing.tolerance


@given(st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_dilation(radius, seed):
    image = np.random.default_rng(seed).random((1, 16, 16)) < 0.02
    rows, columns = np.nonzero(image[0])
    expected = np.zeros_like(image)
    for row, column in zip(rows, columns, strict=True):
        expected[0, max(0, row - radius) : row + radius + 1, max(0, column - radius) : column + radius + 1] = True
    np.testing.assert_array_equal(dilated(image, radius), expected)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((24, 3, 1), "side: got 24, expected a power of two"),
        ((32, 2, 1), "dashes: got 2, expected more"),
        ((16, 5, 1), "dashes: got 5, expected fewer"),
        ((32, 5, -1), "distractors: got -1, expected at least 0"),
    ],
)
def test_what_cannot_be_drawn(sizes, expected):
    with pytest.raises(ValueError, match=expected):
        Drawing(*sizes)


# ---- The model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [16, 32, 64, 128, 256])
def test_tokens_are_pixels_tile_by_tile(side):
    """A block mask shows all pixels within a dash and a gap, and no tile that is farther away but the first."""
    order, drawing = pathfinder.order(side), Drawing(side)
    assert len(np.unique(order @ [side, 1])) == side**2
    tiles = order.reshape(-1, 128, 2)
    assert (np.ptp(tiles, axis=1) == np.array(pathfinder.TILE) - 1).all()
    low, high = tiles.min(axis=1), tiles.max(axis=1)
    gaps = np.maximum(low[:, None] - high, low - high[:, None]).max(axis=2)
    near = gaps <= drawing.dash + drawing.gap
    mask = pathfinder.neighbourhoods(side)
    np.testing.assert_array_equal(mask[1:, 1:], near[1:, 1:])
    assert mask[0].all() and mask[:, 0].all()


@pytest.mark.parametrize("side", [16, 32, 128])
def test_tokens_see_the_cells_around_them(side):
    """Some of them, pixel by pixel; the last number is the pixel itself."""
    rng, size = np.random.default_rng(side), max(1, side // 32)
    pixels = (rng.random((2, side, side)) < 0.1 / size**2).astype(np.uint8)
    at, order = pathfinder.features(np, pixels), pathfinder.order(side)
    assert at.shape == (2, side**2, pathfinder.NUMBERS)
    np.testing.assert_array_equal(at[..., -1], pixels[:, order[:, 0], order[:, 1]])
    wide = np.pad(pixels, ((0, 0), (4 * size, 4 * size), (4 * size, 4 * size)))
    for token in rng.choice(side**2, 30):
        row, column = order[token] + 4 * size - size // 2
        for number in range(49):
            y, x = row + (number // 7 - 3) * size, column + (number % 7 - 3) * size
            np.testing.assert_array_equal(
                at[:, token, number], wide[:, y : y + size, x : x + size].max(axis=(1, 2)), err_msg=f"{token} {number}"
            )


@pytest.mark.parametrize(("side", "head_dim"), [(16, 16), (32, 64), (256, 64)])
def test_the_numbers_of_places_are_exact_in_bfloat16(side, head_dim):
    """And their products are those of the Gaussian, up to a number for each query."""
    q, k = pathfinder.Near.positions(side, head_dim)
    for x in (q, k):
        np.testing.assert_array_equal(x.astype(ml_dtypes.bfloat16).astype(float), x)
    cells = pathfinder.order(side)
    some = np.random.default_rng(side).choice(len(cells), 50, replace=False)
    scores = np.einsum("ihn,jhn->hij", q[some, :, :4], np.broadcast_to(k[some], (50, 4, 4))) / head_dim**0.5
    squares = ((cells[some, None] - cells[some]) ** 2).sum(axis=2)
    ranges = np.array(pathfinder.RANGES) * side / 32
    expected = -squares / (2 * ranges[:, None, None] ** 2)
    np.testing.assert_allclose(scores - scores[..., :1], expected - expected[..., :1], rtol=1e-12, atol=1e-9)


@settings(max_examples=examples(4))
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_attention_is_that_of_the_formula_with_a_bias(seed, masked):
    rng, side, head_dim = np.random.default_rng(seed), 16, 16
    near = pathfinder.Near(page(), side, head_dim, masked=masked)
    q, k, v, dout = rng.standard_normal((4, 1, side**2, 4, head_dim))
    near.drawn = drawn = (rng.random((1, side**2)) < 0.1).astype(float)
    content = [x[..., :-5].swapaxes(1, 2).copy() for x in (q, k)]
    out, saved = near.forward(q, k, v)
    dq, dk, _ = near.backward(dout, saved)
    assert not dq[..., -5:].any() and not dk[..., -5:].any() and dq[..., :-5].any() and dk[..., :-5].any()
    cells = pathfinder.order(side)
    squares = ((cells[:, None] - cells) ** 2).sum(axis=2)
    ranges = np.array(pathfinder.RANGES)[:, None, None] * side / 32
    scores = content[0] @ content[1].swapaxes(2, 3) / head_dim - squares / (2 * ranges**2)
    scores += pathfinder.DRAWN * drawn[:, None, None]
    if masked:
        visible = np.kron(pathfinder.neighbourhoods(side), np.ones((128, 128), bool))
        scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = weights / weights.sum(axis=-1, keepdims=True) @ v.swapaxes(1, 2)
    np.testing.assert_allclose(out.swapaxes(1, 2), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("library", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
@settings(max_examples=examples(2), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), masked=st.booleans())
def test_gradients_of_a_step_in_float64(library, seed, masked):
    """Of every parameter, along a direction."""
    pytest.importorskip(library)
    names, rng = page(library), np.random.default_rng(seed)
    xp, attention = names["xp"], pathfinder.Near(names, 16, SMALL.head_dim, masked=masked)
    p = pathfinder.new_parameters(names, SMALL, dtype=np.float64)
    p = {name: x + xp.asarray(0.1 * rng.standard_normal(x.shape)) for name, x in p.items()}
    images = make_images(Drawing(16, 3, 1), 2, seed)[:1]
    _, _, gradients = pathfinder.loss_and_gradients(names, p, images, attention)
    assert gradients.keys() == p.keys()
    for name in p:
        direction = xp.asarray(rng.standard_normal(p[name].shape))
        moved = ({**p, name: p[name] + h * direction} for h in (1e-5, -1e-5))
        above, below = (float(pathfinder.loss_and_gradients(names, x, images, attention)[0]) for x in moved)
        slope = float((gradients[name] * direction).sum())
        np.testing.assert_allclose(slope, (above - below) / 2e-5, rtol=1e-5, atol=1e-8, err_msg=name)


# ---- The suite -------------------------------------------------------------------------------------------------------


def test_a_run_of_the_suite(monkeypatch, tmp_path, capsys):
    """With few steps: what is written, and what is shown of it."""
    study = replace(
        SMALL,
        tasks=tuple(
            pathfinder.Task(side=16, seconds=60, batch=4, trials=4, masked=masked, most_steps=10, dashes=3)
            for masked in (False, True)
        ),
    )
    monkeypatch.setitem(pathfinder.STUDIES, "cpu", study)
    arguments = ["--suite", "pathfinder", "--backend", "cpu", "--out", str(tmp_path), "--revision", "abc"]
    assert main(["run", *arguments, "--scale", "2"]) == 0
    assert "--suite pathfinder --backend cpu --scale 2`" in capsys.readouterr().out
    head, *records, end = [json.loads(line) for line in (tmp_path / "pathfinder.jsonl").read_text().splitlines()]
    assert (head["record"], head["revision"], end["record"]) == ("run", "abc", "end")
    first, *steps, second = [records[i] for i in (0, 1, 2, 3)]
    assert [(r["record"], r["masked"]) for r in steps] == [("step", True), ("step", False)]
    assert steps[1]["visible"] == 1 and all(min(r["step_ms"], r["attention_ms"]) > 0 for r in steps)
    assert [r["images"] for r in (first, second)] == [40, 40] and first["right_before"] is None
    assert 0 <= second["right"] <= 8 and 0 <= second["right_before"] <= 8
    text = pathfinder.markdown([first | {"right": 6}, *steps])
    assert "| 16 x 16 | 256 | 7 | 40 | " in text and "| - | 0.750 ± 0.153 |" in text
    assert f"| 256 | 4 | 100% | {steps[1]['step_ms']:.3g} / {steps[0]['step_ms']:.3g} |" in text
    assert pathfinder.markdown([head]) == "No length was learnt to its end."


def test_images_come_from_other_processes_alike():
    drawing = Drawing(16, 3, 0)
    with pathfinder.Supply(1) as supply, pathfinder.Supply(0) as own:
        images = next(supply.batches(lambda: drawing, 4))
        np.testing.assert_array_equal(images.pixels, make_images(drawing, 512, (16, 0)).pixels[:4])
        fresh = [x.fresh(drawing, 5)() for x in (supply, own)]
    np.testing.assert_array_equal(fresh[0].pixels, fresh[1].pixels)


def test_lessons_grow_to_the_task():
    task = pathfinder.Task(side=32, seconds=1, batch=1, trials=1)
    assert [task.lesson(part, True) for part in (0, 0.3, 0.9)] == [Drawing(32, 3, 1), Drawing(32, 4, 2), task.drawing]
    assert task.lesson(0, False) == task.drawing == Drawing(32, 5, 4)
