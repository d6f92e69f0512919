"""What the README and docs/ say is so: code runs, commands, paths and names exist, tables agree with the library."""

import functools
import inspect
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.distributed
import cuflash.testing
from bench.__main__ import parser as bench_parser
from bench.examples import PICTURES
from cuflash.cli.main import COMMANDS, make_parser
from cuflash.cli.main import main as cuflash_main
from cuflash.gpu.kernel_cache import CACHE_BYTES
from cuflash.plan.sm90.tiles import BACKWARD_SM90_TILES, FORWARD_SM90_TILES
from cuflash.spec.outputs import GRADIENTS
from cuflash.spec.passes import PASSES_WITHOUT_TANGENTS
from cuflash.testing import numpy_dtype
from tests.many_cases import each

CHECKOUT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(CHECKOUT).as_posix(): path.read_text()
    for path in (CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md")))
}
EXAMPLES = {name for name in PAGES if name.startswith("docs/examples/")}
NOTES = {name for name in PAGES if name.startswith("docs/notes/")}
SITE = {f"docs/{name}.md" for name in ("index", "start", "guide", "development")}  # what the site has around the pages
README, OPTIONS, SEMANTICS, DESIGN = (
    PAGES[name] for name in ("README.md", "docs/options.md", "docs/semantics.md", "docs/design.md")
)
EVERYTHING = "\n".join(PAGES.values())
FORWARD_SOURCE = (CHECKOUT / "kernels" / "sm90" / "forward.cu").read_text()
LONGEST_README = 200  # lines
PATH = r"(?:\.ci|\.github|bench|cuflash|docs|kernels|recipe|tests)/[\w./*]*"


def blocks(language, text=README):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def table(header, text=README):
    """Rows of the table whose first column is headed `header`, as lists of cells without backticks."""
    (rows,) = re.findall(rf"^\| {header} \|.*\n\|[ |-]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip().replace("`", "") for cell in row.strip("|").split(" | ")] for row in rows.splitlines()]


def test_the_lines_of_use_run():
    (code,) = blocks("python")
    names: dict[str, Any] = {}
    exec(code, names)
    lines = [line for line in code.splitlines() if line and "import" not in line]
    assert len(lines) <= 6
    np.testing.assert_array_equal(names["out"], cuflash.attention(names["q"], names["k"], names["v"], causal=True))
    assert names["dk"].shape == names["k"].shape
    step = 1e-2 * np.sign(names["dq"])
    moved = cuflash.attention(names["q"] + step, names["k"], names["v"], causal=True)
    change = (moved.astype(float) ** 2 - names["out"].astype(float) ** 2).sum()
    np.testing.assert_allclose(change, (step.astype(float) * names["dq"]).sum(), rtol=0.05)


def named_paths(text):
    return sorted(set(re.findall(rf"`({PATH}|LICENSE|CITATION\.cff|pyproject\.toml)`", text)))


@pytest.mark.parametrize("name", PAGES)
def test_the_examples_of_a_page_run(name):
    """In order, in one namespace; what needs a device only compiles here."""
    names: dict[str, Any] = {"__name__": "example"}
    for code in blocks("python", PAGES[name]):
        exec(compile(code, f"<{name}>", "exec"), names)  # no file: hypothesis would read lines of the page as code
        for test in [names.pop(key) for key in list(names) if key.startswith("test_")]:
            test()
    for code in blocks("python gpu", PAGES[name]):
        compile(code, name, "exec")


@pytest.mark.parametrize(
    ("name", "library"),
    [(name, library) for name in PAGES for library in ("torch", "jax") if blocks(f"python {library}", PAGES[name])],
)
def test_the_examples_for_another_library_run(name, library):
    """After those of NumPy."""
    pytest.importorskip(library, reason=f"{library} is not installed")
    names: dict[str, Any] = {"__name__": "example"}
    for kind in ("python", f"python {library}"):
        for code in blocks(kind, PAGES[name]):
            exec(compile(code, f"<{name}>", "exec"), names)  # no file: hypothesis would read lines of the page as code


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, text in PAGES.items() if blocks("python gpu", text)])
def test_the_examples_for_a_device_run(name):
    names = {"__name__": "example", "cuflash": cuflash, "np": np}
    for code in blocks("python gpu", PAGES[name]):
        exec(compile(code, f"<{name}>", "exec"), names)  # no file: hypothesis would read lines of the page as code


def test_no_other_kind_of_example():
    fences = set(re.findall(r"^```(.+)$", EVERYTHING, re.MULTILINE))
    assert fences <= {
        "python",
        "python gpu",
        "python mpi",
        "python dask",
        "python ray",
        "python torch",
        "python jax",
        "sh",
        "text",
    }


def test_no_example_has_a_deadline():
    """Hypothesis gives each example 200 ms, which a busy machine does not keep."""
    texts = [*PAGES.values(), cuflash.testing.__doc__ or ""]
    drawn = [code for text in texts for code in re.findall(r"(?:^ *@.*\n)*^ *@given\(.*\n", text, re.MULTILINE)]
    assert len(drawn) == 2 and all("deadline=None" in code for code in drawn)


def test_the_readme_is_short():
    assert len(README.splitlines()) < LONGEST_README


@each(PAGES)
def test_lines_are_as_long_as_those_of_code(name):
    """But for tables, commands and what is generated. No code is broken at an end of line, where tests miss it."""
    free = r"^(```sh\n.*?^```|<!-- bench:begin.*?bench:end -->)"
    text = re.sub(free, "", PAGES[name], flags=re.MULTILINE | re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")] == []
    assert [line for line in text.splitlines() if not line.startswith("```") and line.count("`") % 2] == []


def commands(package):
    """Every `python -m package ...` with its arguments."""
    return sorted({shlex.join(shlex.split(x)) for x in re.findall(rf"python -m ({package} [^`\n#|]*)", EVERYTHING)})


@each([*commands("cuflash"), *commands("bench")])
def test_the_commands_exist(command):
    package, *arguments = shlex.split(command)
    parser = make_parser() if package == "cuflash" else bench_parser()
    if arguments == ["--version"]:
        with pytest.raises(SystemExit, match=r"^0$"):
            parser.parse_args(arguments)
    else:
        parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("name", "device", "peak"), [("performance", "T4", "65"), ("design", "H200", "989")], ids=["performance", "design"]
)
def test_the_plan_is_what_is_shown(capsys, name, device, peak):
    """But for the ends of lines, and for registers, which depend on the compiler."""
    page = PAGES[f"docs/{name}.md"]
    (command,) = re.findall(r"^```sh\npython -m cuflash (plan .*)\n```", page, re.MULTILINE)
    (shown,) = blocks("text", page)
    assert cuflash_main(shlex.split(command)) == 0
    printed = capsys.readouterr().out
    assert device in printed and f"matrix products at {peak}" in " ".join(printed.split())
    same = [re.sub(r"\d+ registers", "registers", " ".join(text.split())) for text in (shown, printed)]
    assert same[0] == same[1]


@pytest.mark.parametrize("command", commands("pytest"))
def test_the_tests_that_are_named_exist(command):
    for argument in shlex.split(command)[1:]:
        assert (CHECKOUT / argument).exists() or not argument.startswith("tests"), argument


def test_the_programs_of_tests_exist():
    names = re.findall(r"python -m (tests[\w.]+)", EVERYTHING)
    assert len(names) >= 4
    for name in names:
        path = CHECKOUT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


def test_every_command_is_described():
    described = [row[0].removeprefix("python -m cuflash ") for row in table("command")]
    assert described == list(COMMANDS)


def test_every_variable_of_the_environment_is_described():
    code = "".join(path.read_text() for path in (CHECKOUT / "cuflash").rglob("*.py"))
    read = {name for line in re.findall(r"os\.environ.*", code) for name in re.findall(r'"([A-Z_]+)"', line)}
    assert read >= {"CUFLASH_CACHE_DIR", "CUFLASH_CACHE_BYTES"}
    assert {row[0] for row in table("variable of the environment", SEMANTICS)} == read
    assert f"{CACHE_BYTES} (1 GiB)" in SEMANTICS


def links(text):
    return re.findall(r"(!?)\[[^\]]*\]\(([^)\s]*)\)", text)


def test_the_readme_shows_one_picture():
    """Of the gallery. That it is there, `test_links_lead_somewhere` sees."""
    (shown,) = (target for picture, target in links(README) if picture)
    assert shown in {f"{name.removesuffix('.md')}.svg" for name in EXAMPLES}


@each(PAGES)
def test_links_lead_somewhere(name):
    for _, target in links(PAGES[name]):
        if not target.startswith("https://"):
            file, _, title = target.partition("#")
            path = (CHECKOUT / name).parent / file if file else CHECKOUT / name
            assert path.exists(), target
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) if title else []
            anchors = [re.sub(r"[^\w -]", "", x.lower()).replace(" ", "-") for x in titles]
            assert not title or title in anchors, target


@each(PAGES)
def test_every_reference_has_an_address(name):
    """Links whose addresses are below: `[text][label]` or `[label]`, and `[label]: address`."""
    text = re.sub(r"^```.*?^```", "", PAGES[name], flags=re.MULTILINE | re.DOTALL)
    addresses = dict(re.findall(r"^\[([^\]]+)\]: (https://\S+)$", text, re.MULTILINE))
    used = set(re.findall(r"\]\[([^\]]+)\]", text)) | {
        x for x in addresses if re.search(rf"\[{re.escape(x)}\](?![:\[(])", text)
    }
    assert used == addresses.keys()


def test_every_page_is_in_a_table_of_the_site():
    """Which the README links."""
    tables = {f"docs/{target}" for name in ("guide", "development") for _, target in links(PAGES[f"docs/{name}.md"])}
    assert tables - NOTES == PAGES.keys() - EXAMPLES - NOTES - SITE - {"README.md", "docs/examples.md"}
    assert {"docs/guide.md", "docs/development.md", "docs/examples.md"} <= {target for _, target in links(README)}


def test_the_api_reference_lists_everything_public():
    text = (CHECKOUT / "docs" / "api.rst").read_text()
    for module in (cuflash, cuflash.block_masks, cuflash.distributed, cuflash.testing):
        section = text.partition(f".. currentmodule:: {module.__name__}\n")[2].partition(".. currentmodule::")[0]
        listed = set(re.findall(r"^   (\w+)$", section, re.MULTILINE))
        assert listed == {name for name in module.__all__ if callable(getattr(module, name))}


def test_every_note_is_linked_from_a_page():
    linked = {f"docs/{target.partition('#')[0]}" for name in PAGES.keys() - NOTES for _, target in links(PAGES[name])}
    assert linked >= NOTES


def test_every_example_is_listed_and_has_its_picture():
    index = {target for _, target in links(PAGES["docs/examples.md"]) if target.endswith(".md")}
    assert {f"docs/{target}" for target in index} == EXAMPLES == {f"docs/examples/{name}.md" for name in PICTURES}
    for name in EXAMPLES:
        assert [target for picture, target in links(PAGES[name]) if picture] == [f"{Path(name).stem}.svg"]


@each(sorted(EXAMPLES))
def test_an_example_is_short(name):
    assert len(PAGES[name].splitlines()) <= 100


def test_the_tutorial_is_short():
    """Without its results."""
    text = re.sub("<!-- bench:begin.*bench:end -->", "", PAGES["docs/training.md"], flags=re.DOTALL)
    assert len(text.splitlines()) <= 250


def test_the_test_command_is_what_ci_runs():
    (command,) = (block.strip() for block in blocks("sh") if block.rstrip().endswith("-m pytest -n auto"))
    script = (CHECKOUT / ".ci" / "run").read_text()
    venv, install, tests = re.split(r" &&\s", command)
    assert venv in script and f"step {tests}\n" in script
    # The package without what it depends on, and then that: the core is built meanwhile.
    extra = re.fullmatch(r'(.+pip) install -e "\.\[(.+)\]"', install)
    assert extra and f'pip() {{ {extra[1]} "$@"; }}' in script
    assert "--no-deps --editable . " in script
    assert f'"cuflash[{extra[2]},bench,dev,docs]"' in script and '"cuflash[torch,jax]"' in script


def test_the_extras_exist():
    metadata = (CHECKOUT / "pyproject.toml").read_text()
    named = {name for extras in re.findall(r'"\.\[([^]$\\]+)\]"', EVERYTHING) for name in extras.split(",")}
    assert named >= {"cuda12", "cuda13", "test", "dev"}
    for name in named:
        assert re.search(rf"^{name} = \[", metadata, re.MULTILINE), name


@each({path for text in PAGES.values() for path in named_paths(text)})
def test_every_named_path_exists(path):
    assert list(CHECKOUT.glob(path)) if "*" in path else (CHECKOUT / path).exists()


@pytest.mark.parametrize("row", table("dtype", SEMANTICS), ids=lambda row: row[0])
def test_the_dtypes_on_numpy_arrays(row):
    name, on_numpy, _, softmax_dtype = row
    q, k, v = np.random.default_rng(0).standard_normal((3, 6, 8)).astype(numpy_dtype(name.split()[0]))
    assert on_numpy == "forward, backward"
    attn = cuflash.FlashAttention()
    out, lse = attn.forward(q, k, v)
    assert out.dtype == q.dtype
    assert lse.dtype.name == softmax_dtype
    assert {x.dtype for x in attn.backward(out, q, k, v, out, lse)} == {q.dtype}


@pytest.mark.parametrize("row", table("dtype", SEMANTICS), ids=lambda row: row[0])
def test_the_dtypes_on_devices(row):
    """The plans of every compute capability that the page on options names agree with this table."""
    from cuflash.plan import DeviceSpec, choose_plan
    from cuflash.spec.options import Options
    from cuflash.spec.problem import make_problem

    name, _, on_cupy, _ = row
    (device,) = [row for row in table("option", OPTIONS) if row[0] == "device"]
    capabilities = re.findall(r"\d+\.\d", device[1])
    assert {"8.0", "8.6", "9.0", "12.0"} <= set(capabilities)
    q = np.zeros((1, 2, 100, 64), numpy_dtype(name.split()[0]))
    problem = make_problem(Options(causal=True), q, q, q)
    for capability in capabilities:
        for pass_ in PASSES_WITHOUT_TANGENTS:
            device = DeviceSpec.for_arch(capability)
            if on_cupy == "forward, backward":
                module = type(choose_plan(problem, device, pass_).tiles[0]).__module__
                own = capability == "9.0" and problem.dtype in ("float16", "bfloat16")
                assert module.startswith(f"cuflash.plan.{'sm90' if own else 'sm80'}")
            else:
                assert on_cupy == "not yet: NotImplementedError"
                with pytest.raises(NotImplementedError, match=name):
                    choose_plan(problem, device, pass_)


def test_every_option_is_in_the_table_and_in_the_interface():
    parameters = {
        name
        for function in (cuflash.FlashAttention, cuflash.FlashAttention.forward, cuflash.FlashAttention.backward)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    rows = {name for row in table("option", OPTIONS) for name in row[0].split(", ")}
    of_arrays = {"device", "dtype", "strides", "num_heads_kv", "head_dim_v", "v=None", "axes"}
    methods = {"column_sums", "column_max", "top_keys"}  # which take most of these
    assert rows == of_arrays | methods | parameters - {"out", "lse", "need", *GRADIENTS}


def test_the_gradients_are_in_the_table():
    named = {name for row in table("option", OPTIONS) for name in re.findall(r"\bd[a-z_]+", row[3])}
    assert named == {*GRADIENTS} - {"dq", "dk", "dv"}


def pictures():
    """(keywords as written, rows of 0 and 1) of every picture of a mask on the page on semantics."""
    for block in blocks("text", SEMANTICS):
        head, *rows = block.splitlines()
        starts = [match.start() for match in re.finditer(r"(?:(?<=  )|^)\S", head)]
        for start, stop in zip(starts, [*starts[1:], None], strict=True):
            yield head[start:stop].strip(), np.array([row[start:stop].split() for row in rows], int)


@pytest.mark.parametrize(("keywords", "visible"), list(pictures()))
def test_the_pictures_of_masks(keywords, visible):
    seqlen_q, seqlen_k = visible.shape
    options = eval(f"dict({keywords})")
    q, k, v = np.zeros((seqlen_q, 4)), np.zeros((seqlen_k, 4)), np.eye(seqlen_k)
    weights = cuflash.attention(q, k, v, **options)
    np.testing.assert_allclose(weights, visible / np.maximum(visible.sum(axis=1, keepdims=True), 1), atol=1e-15)


def test_merging_by_lse_as_described():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 50, 8))
    attn = cuflash.FlashAttention()
    out_a, lse_a = attn.forward(q, k[:, :20], v[:, :20])
    out_b, lse_b = attn.forward(q, k[:, 20:], v[:, 20:])
    lse = np.logaddexp(lse_a, lse_b)
    out = np.exp(lse_a - lse)[..., None] * out_a + np.exp(lse_b - lse)[..., None] * out_b
    whole = attn.forward(q, k, v)
    for merged in ((out, lse), cuflash.merge([out_a, out_b], [lse_a, lse_b])):
        np.testing.assert_allclose(merged[1], whole.lse, rtol=1e-12)
        np.testing.assert_allclose(merged[0], whole.out, rtol=1e-12, atol=1e-13)


def test_every_folder_is_described():
    described = {name.strip("` ") for row in table("folder", DESIGN) for name in row[0].split(",")}
    package = CHECKOUT / "cuflash"
    folders = {f"cuflash/{path.parent.relative_to(package)}/" for path in package.glob("*/__init__.py")}
    folders |= {f"kernels/{path.name}/" for path in (CHECKOUT / "kernels").iterdir() if path.is_dir()}
    assert {name for name in described if re.fullmatch(r"(cuflash|kernels)/\w+/", name)} == folders


def test_imports_run_the_way_that_is_described():
    from tests.pure.test_layering import MAY_IMPORT

    (chain,) = re.findall(r"^ *(arrays <- [\w, <-]+) <- the public API$", DESIGN, re.MULTILINE)
    before: set[str] = set()
    for folders in chain.split(" <- "):
        here = set(folders.split(", "))
        assert not any(MAY_IMPORT[name] - before for name in here)
        before |= here


# ---- The walk-through of the kernels ---------------------------------------------------------------------------------


def kernel_names():
    """Every name of the code on the pages about kernels: `kConstants`, functions, structs, fields of barriers."""
    pages = "\n".join(PAGES[name] for name in ("docs/kernels.md", *sorted(NOTES)))
    text = re.sub(r"^```.*?^```", "", pages, flags=re.MULTILINE | re.DOTALL)
    return sorted(set(re.findall(r"`((?:ptx::)?[A-Za-z_]\w+)(?:\[i\])?`", text)))


@each(kernel_names())
def test_the_names_of_kernels_are_in_the_code(name):
    assert name.removeprefix("ptx::") in words_of_the_code()


@functools.cache
def words_of_the_code():
    """Every name in kernels, modules and the core."""
    cuflash = CHECKOUT / "cuflash"
    files = [*(CHECKOUT / "kernels").rglob("*.cu*"), *cuflash.rglob("*.py"), *cuflash.rglob("*.h")]
    return {word for path in files for word in re.findall(r"\w+", path.read_text())}


def numbers(cell):
    return tuple(int(x) for x in re.findall(r"\d+", cell))


def test_the_tiles_of_the_forward_pass_are_those_of_the_table():
    """The numbers of a row, at its largest head_dim."""
    rows = table("head_dim", PAGES["docs/kernels.md"])
    assert {numbers(row[0])[-1] for row in rows} == {tile.max_dim for tile in FORWARD_SM90_TILES}
    known = set()
    for tile in FORWARD_SM90_TILES:
        with_bias = replace(tile, bias_of_pairs=2) if tile.serves == "bias" else tile
        nbytes, with_bias_bytes = (x.shared_bytes(tile.max_dim, tile.max_dim) for x in (tile, with_bias))
        bias = (with_bias_bytes - nbytes,) * (tile.serves == "bias")
        stages, consumers = (tile.num_stages, tile.q_stages), tile.block_m // 64
        known.add((tile.max_dim, tile.block_m, tile.block_n, *stages, consumers, tile.ping_pong, nbytes, *bias))
    for head_dim, _, tile, stages, consumers, registers, nbytes in rows:
        of_row = numbers(head_dim)[-1], *numbers(tile), *numbers(stages), *numbers(consumers)
        assert (*of_row, "ping-pong" in consumers, *numbers(nbytes)) in known, of_row
        (own, of_producer), (count,) = numbers(registers), numbers(consumers)
        assert f"kConsumers == {count} ? {own}" in FORWARD_SOURCE or (count, own) == (2, 240)
        assert 128 * (own * count + of_producer) <= 65536


def test_the_tiles_of_the_backward_pass_are_those_of_the_table():
    rows = table("schedule", PAGES["docs/kernels.md"])
    shown = {
        (row[0], *numbers(row[2]), *numbers(row[3]), *numbers(row[5]), numbers(row[1])[-1]): numbers(row[4])
        for row in rows
    }
    tiles = [x for x in BACKWARD_SM90_TILES if x.serves != "no values" and x.max_dim >= 64]
    assert {x.schedule for x in BACKWARD_SM90_TILES} == {row[0] for row in rows}
    assert shown.keys() == {
        (x.schedule, x.block_m, x.block_n, x.num_stages, x.shared_bytes(x.max_dim, x.max_dim), x.max_dim) for x in tiles
    }
    assert all(128 * (2 * consumer + dq) <= 65536 for consumer, dq in shown.values())


def test_every_kernel_is_explained():
    """Those that a launch runs."""
    text = PAGES["docs/kernels.md"]
    kernels = [path for path in (CHECKOUT / "kernels").rglob("*.cu")]
    assert [path for path in kernels if f"`{path.relative_to(CHECKOUT).as_posix()}`" not in text] == []


def test_the_unrelated_library_is_mentioned_once():
    assert " ".join(README.split()).count("not related to the C++ library of the same name") == 1
