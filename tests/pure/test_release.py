"""What a release is made of: one version and one date everywhere, workflows, the recipe, and what hosts look for."""

import datetime
import re
from pathlib import Path
from typing import Any

import pytest

import cuflash

tomllib: Any = pytest.importorskip("tomllib", reason="reads pyproject.toml; Python has it from 3.11 on")
yaml: Any = pytest.importorskip("yaml", reason="reads the workflows; the extra docs brings it along")

CHECKOUT = Path(__file__).parents[2]
METADATA = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in (CHECKOUT / ".github" / "workflows").iterdir()}
RECIPE = yaml.safe_load((CHECKOUT / "recipe" / "recipe.yaml").read_text())
CITATION = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text())


def commands(workflow, job):
    """What the job of a workflow runs."""
    return [step["run"] for step in WORKFLOWS[workflow]["jobs"][job]["steps"] if "run" in step]


def test_the_version_and_its_date_are_the_same_everywhere():
    changelog = (CHECKOUT / "docs" / "changelog.md").read_text()
    versions = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    newest = f"{cuflash.__version__} ({CITATION['date-released']})"
    assert versions[0] == newest or versions[:2] == ["Unreleased", newest]
    assert CITATION["version"] == RECIPE["context"]["version"] == cuflash.__version__
    assert isinstance(CITATION["date-released"], datetime.date)


def test_a_change_runs_what_ci_runs():
    assert commands("test.yml", "test") == [".ci/run"]


def test_wheels_are_built_for_each_system_that_the_core_is_for():
    settings = METADATA["tool"]["cibuildwheel"]
    oldest = METADATA["project"]["requires-python"].removeprefix(">=").replace(".", "")
    assert settings["build"] == [f"cp{oldest}-*"] and settings["archs"] == ["auto64"]
    jobs = WORKFLOWS["wheels.yml"]["jobs"]
    runners = {"ubuntu-24.04", "ubuntu-24.04-arm", "macos-15", "macos-15-intel", "windows-2022"}
    assert set(jobs["with-core"]["strategy"]["matrix"]["runner"]) == runners
    assert any("cibuildwheel --output-dir dist" in command for command in commands("wheels.yml", "with-core"))
    assert "CXX=false python -m build" in commands("wheels.yml", "without-core")
    assert jobs["elsewhere"]["strategy"]["matrix"]["runner"] == ["macos-latest", "windows-latest"]


def test_only_a_tag_publishes_and_without_a_token():
    publish = WORKFLOWS["wheels.yml"]["jobs"]["publish"]
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert set(publish["needs"]) == WORKFLOWS["wheels.yml"]["jobs"].keys() - {"publish"}
    assert publish["permissions"] == {"id-token": "write"} and "secrets" not in str(WORKFLOWS)
    for workflow in WORKFLOWS.values():
        assert workflow["permissions"] == {"contents": "read"}
        assert all("timeout-minutes" in job for job in workflow["jobs"].values())


def test_what_is_uploaded_is_what_is_published():
    """A job's packages reach the last one by the names of their artifacts."""
    jobs = WORKFLOWS["wheels.yml"]["jobs"]
    uploads = [step for job in jobs.values() for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    assert len(uploads) == 2 and all(step["with"]["name"].startswith("dist-") for step in uploads)
    assert jobs["publish"]["steps"][0]["with"] == {"pattern": "dist-*", "merge-multiple": True, "path": "dist"}


def test_the_recipe_needs_what_the_package_needs():
    project, run = METADATA["project"], RECIPE["requirements"]["run"]
    assert [name.replace(" ", "") for name in run[1:]] == project["dependencies"]
    assert project["requires-python"] == f">={RECIPE['context']['python_min']}"
    assert set(METADATA["build-system"]["requires"]) <= {x.replace(" ", "") for x in RECIPE["requirements"]["host"]}
    assert RECIPE["about"]["summary"] == project["description"]
    assert RECIPE["about"]["license"] == CITATION["license"] == project["license"]


@pytest.mark.parametrize("name", ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_hosts_find_a_file_that_leads_to_the_pages(name):
    text = (CHECKOUT / name).read_text()
    assert len(text.splitlines()) < 20 and all(len(line) <= 120 for line in text.splitlines())
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    assert targets and all((CHECKOUT / target).exists() for target in targets)
