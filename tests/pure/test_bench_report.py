"""What the benchmark reports: tables and plots of synthetic runs, and the pages of the committed ones."""

from dataclasses import replace

import numpy as np
import pytest

from bench import accuracy, evidence, report
from bench.__main__ import ROOT, main
from bench.cases import Case
from bench.suites import FA2, SUITES
from tests.bench_records import ALL_CASES, synthetic, write


def test_table_of_a_synthetic_run():
    text = report.markdown(synthetic())
    lines = text.splitlines()
    assert lines[0] == (
        "| head_dim | seqlen | batch x heads | mask | dtype | cuflash | cuDNN | FlashAttention-2 "
        "| cuflash : best peer | cuflash : FA2 | error : formula's |"
    )
    assert len({line.count("|") for line in lines[:21]}) == 1
    numbers = ("300 / 300", "400 / 400", "250 / 250", "0.75 / 0.75", "1.20 / 1.20", "1.25 / 1.25")
    assert lines[2] == "| 64 | 1024 | 16 x 32 | full | bf16 | " + " | ".join(numbers) + " |"
    assert lines[20].startswith("| geometric mean |") and "| 0.75 / 0.75 | 1.20 / 1.20 |" in lines[20]
    assert lines[-1] == "- FlexAttention: absent: torch: not here (36 measurements)"
    assert "790 TFLOP/s" in report.heading(synthetic()) and "NVIDIA H200" in report.heading(synthetic())


def test_the_last_whole_run_is_reported(tmp_path):
    path = tmp_path / "fa2.jsonl"
    runs = [
        synthetic("old", speed=100),
        synthetic("good", speed=200),
        synthetic("part", cases=FA2[:1], matched="s1024"),
        synthetic("cut", cases=FA2[:3], ended=False),
    ]
    write(path, [record for records in runs for record in records])
    with path.open("a") as file:
        file.write('{"record": "resu')
    assert {r["run"] for r in report.latest_run(report.load(path))} == {"good"}
    write(path, runs[2] + runs[3])
    assert {r["run"] for r in report.latest_run(report.load(path))} == {"cut"}
    assert report.latest_run([]) == []


def test_runs_on_numpy_arrays_are_told_by_cores(tmp_path):
    """The last whole run on each number of cores is shown, and plotted."""
    every = []
    for run_id, cores in (("a", 2), ("b", 16), ("c", 2)):
        records = synthetic(run_id)
        records[0] |= {"kind": "cpu", "suite": "cpu", "cores": cores}
        every += records
    write(tmp_path / "cpu.jsonl", every)
    found = report.runs(tmp_path)
    assert {name: {r["run"] for r in records} for name, records in found.items()} == {
        "cpu_2_cores": {"c"},
        "cpu_16_cores": {"b"},
    }
    assert list(found) == ["cpu_2_cores", "cpu_16_cores"]
    plots = report.plots_of(found["cpu_16_cores"], tmp_path)
    assert [path.name for path in plots] == ["cpu_16_cores_forward.svg", "cpu_16_cores_backward.svg"]
    assert "### cpu 16 cores\n" in report.section(tmp_path, tmp_path / "page.md")


def test_options_are_compared_with_the_plain_call():
    plain = FA2[:2]
    cases = (*plain, *(replace(case, softcap=9.0) for case in plain), replace(FA2[5], sinks=True))
    records = synthetic(cases=cases)
    for record in records:
        if record.get("contender") == "cuflash" and record["problem"]["softcap"]:
            record["tflops"] = 150.0
    lines = report.markdown(records).splitlines()
    assert lines[0].endswith("| of the plain call | error : formula's |")
    assert [line.split(" | ")[-2] for line in lines[2:7]] == ["- / -"] * 2 + ["0.50 / 0.50"] * 2 + ["- / -"]
    assert "of the plain call" not in report.markdown(synthetic())


def test_kernels_of_7_5_are_held_against_those_of_8_0():
    of_suite = {"cudnn": "cuflash-sm75", "flex": "cuflash-sm80"}
    cases = SUITES["architectures"].cases
    records = [
        r
        | {"suite": "architectures"}
        | ({"contender": of_suite.get(r["contender"], r["contender"])} if "contender" in r else {})
        for r in synthetic(cases=cases)
    ]
    records[0]["contenders"] = ["cuflash", "cuflash-sm75", "cuflash-sm80", "fa2"]
    table = report.Table(records)
    assert (table.mine, table.other, table.peers) == ("cuflash-sm75", "cuflash-sm80", ["fa2"])
    header = report.markdown(records).splitlines()[0]
    assert "| cuflash, kernels of 7.5 : FA2 | cuflash, kernels of 7.5 : 8.0 |" in header


def test_decoding_is_read_in_bytes_and_the_cpu_in_gflops():
    wide = synthetic(cases=SUITES["decode-wide"].cases)
    assert report.Table(wide).unit == "TB/s" and "| 576/512, v in k |" in report.markdown(wide)
    assert report.Table([r | {"suite": "small-dims"} for r in synthetic()]).unit == "microseconds"
    assert report.Table(synthetic(cases=SUITES["decode"].cases)).unit == "TB/s"
    assert report.Table(synthetic()).unit == "TFLOP/s"
    records = synthetic()
    records[0]["kind"] = "cpu"
    assert report.Table(records).unit == "GFLOP/s"
    assert report.Table(records).value(FA2[0].name, "cudnn", "forward") == 400e3


def test_the_generated_parts(tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="draws the plots")
    assert matplotlib
    results, page, readme = tmp_path / "results", tmp_path / "docs" / "performance.md", tmp_path / "README.md"
    results.mkdir()
    page.parent.mkdir()
    write(results / "fa2.jsonl", synthetic())
    for path in (page, readme):
        path.write_text(f"# Title\n\n{report.BEGIN}\nold\n{report.END}\n\ntail\n")
    everything = tmp_path / "evidence.md"
    everything.write_text("".join(f"{report.begin_of(name)}{report.END}" for name in evidence.PAGE_SECTIONS))
    arguments = ["report", "--results", str(results), "--page", str(page), "--readme", str(readme)]
    arguments += ["--evidence", str(everything)]
    assert main(arguments) == 0
    assert everything.read_text().count("No results yet") == len(evidence.PAGE_SECTIONS)
    text = page.read_text()
    assert text.startswith("# Title\n\n" + report.BEGIN) and text.endswith(report.END + "\n\ntail\n")
    assert "old" not in text and "### fa2" in text and "geometric mean" in text
    assert "old" in readme.read_text()  # it shows another suite
    for pass_ in ("forward", "backward"):
        assert f"![fa2, {pass_}](../results/fa2_{pass_}.svg)" in text
        picture = results / f"fa2_{pass_}.svg"
        assert "head_dim 128, causal" in picture.read_text()
        assert picture.stat().st_size < 100_000
    pictures = [(results / f"fa2_{pass_}.svg").read_bytes() for pass_ in ("forward", "backward")]
    assert main(arguments) == 0
    assert page.read_text() == text
    assert [(results / f"fa2_{pass_}.svg").read_bytes() for pass_ in ("forward", "backward")] == pictures
    write(results / f"{report.HEADLINE_SUITE}.jsonl", synthetic())
    assert main(arguments) == 0
    rows = [line for line in readme.read_text().splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[:2] for row in rows[1:]] == [
        [f"| {head_dim}", mask] for head_dim in (64, 128, 256) for mask in ("full", "causal")
    ]
    assert rows[0].endswith("cuDNN | FlashAttention-2 | cuflash : fastest of the others |")
    assert "old" not in readme.read_text() and "![" not in readme.read_text()


def test_errors_of_random_problems_are_recorded_and_reported(tmp_path, capsys):
    command = ["accuracy", "--backend", "cpu", "--out", str(tmp_path), "--revision", "abc", "--problems", "2"]
    assert main([*command, "--dtype", "float64"]) == 0
    printed = capsys.readouterr().out
    (row,) = report.load(tmp_path / report.ACCURACY)
    assert (row["dtype"], row["problems"], row["kind"], row["revision"]) == ("float64", 2, "cpu", "abc")
    assert list(row["results"]) == ["out", "lse", "dq", "dk", "dv"]
    for name, found in row["results"].items():
        assert sum(found["counts"]) == 2 and found["outside"] == 0
        assert 0 < found["median"] <= found["largest"]
        assert f"{name}: 2 problems, median {found['median']:.2f}" in printed
    accuracy.append(tmp_path, row | {"revision": "new", "dtype": "float32", "precision": "tf32"})
    accuracy.append(tmp_path, row | {"revision": "new"})
    lines = report.accuracy(report.load(tmp_path / report.ACCURACY)).splitlines()
    assert [line.split(" | ")[1] for line in lines[4:]] == ["float64", "float32, tf32"]
    assert all(line.endswith("| new |") for line in lines[4:])


def test_an_error_that_is_not_a_number_counts_as_the_largest():
    assert accuracy._counts(np.array([0.0, 0.3, 0.3, 9.0, np.inf, np.nan])) == [1, 0, 2, 0, 0, 0, 0, 0, 3]


def test_a_page_without_markers_is_left_alone(tmp_path):
    page = tmp_path / "page.md"
    for text in ("no markers", report.END + report.BEGIN, report.BEGIN * 2 + report.END):
        page.write_text(text)
        with pytest.raises(ValueError, match="page"):
            report.update(page, "new")
        assert page.read_text() == text
    with pytest.raises(SystemExit, match="results"):
        main(["report", "--results", str(tmp_path), "--page", str(page)])


def test_a_page_of_several_parts(tmp_path):
    """Each is replaced alone; one that is not closed before the next begins is an error."""
    page = tmp_path / "page.md"
    one, other = (report.begin_of(name) for name in ("one", "other"))
    page.write_text(f"{one}\n{report.END}\nbetween\n{other}\nold\n{report.END}\ntail")
    assert report.update(page, "new", "other") and not report.update(page, "new", "other")
    assert page.read_text() == f"{one}\n{report.END}\nbetween\n{other}\nnew\n{report.END}\ntail"
    page.write_text(f"{one}\n{other}\n{report.END}")
    for part in ("one", "third"):
        with pytest.raises(ValueError, match=f"one <!-- bench:begin {part} -->"):
            report.update(page, "new", part)


def test_the_pages_have_the_committed_results():
    results, readme = ROOT / "bench" / "results", ROOT / "README.md"
    page, learnt, everything = (ROOT / "docs" / name for name in ("performance.md", "training.md", "evidence.md"))
    parts = {
        (page, ""): report.section(results, page),
        (page, "logsumexp"): evidence.sections("logsumexp", results, page),
        (learnt, ""): evidence.sections("training", results, learnt),
        (readme, ""): report.readme_section(results),
        **{(everything, name): text for name, text in evidence.page_sections(results, everything).items()},
    }
    for (path, name), expected in parts.items():
        shown = path.read_text().split(report.begin_of(name))[1].split(report.END)[0].strip()
        assert shown == expected, "python -m bench report writes it"


def test_where_cuflash_is_ahead_of_the_formula_is_said():
    """From the length on from which no other is behind, for each mask and pass."""
    cases = [Case(head_dim=64, seqlen_q=n, batch=1, num_heads=16, causal=c) for c in (False, True) for n in (512, 1024)]
    head, *rows = [r | {"suite": "runtime"} for r in synthetic(cases=cases)]
    rows = [r | {"contender": "naive"} if r.get("contender") == "fa2" else r for r in rows]
    for r in rows:
        if (r.get("contender"), r.get("case")) == ("naive", cases[0].name):
            r["median_us"] /= 2
    text = report.markdown([head | {"contenders": ["cuflash", "naive"]}, *rows])
    slower, faster = 0.5 * 300 / 250, 300 / 250
    for pass_ in ("forward", "backward"):
        spread = f"{slower:.2f} to {faster:.2f} times as fast"
        assert f"\n- cuflash is ahead of the plain formula from 1024 on, {spread}: full, {pass_}." in text
        assert f"formula at every length, {faster:.2f} to {faster:.2f} times as fast: causal, {pass_}." in text


def test_list_prints_every_case(capsys):
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert all(case.name in printed for case in ALL_CASES)


def test_a_sentence_that_a_record_cuts_off_is_left_out():
    message = "CUDA out of memory. Tried to allocate 16 GiB. " + "Of the allocated memory " * 20
    for stated, shown in (
        ("Absent: needs a GPU. Or so", "Absent: needs a GPU. Or so"),
        (f"OutOfMemoryError: {message[: report.REASON_LENGTH]}", f"OutOfMemoryError: {message[:44]}"),
        (f"ValueError: {'x' * report.REASON_LENGTH}", f"ValueError: {'x' * report.REASON_LENGTH}"),
    ):
        assert report.whole_sentences(stated) == shown
