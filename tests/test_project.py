"""One version, locked dependencies, links of guides and targets of workflows agree."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.markers import Marker, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rtx import __version__

ROOT = Path(__file__).resolve().parents[1]
LISTS = ROOT / ".ci" / "requirements"
COMMUNITY = sorted((ROOT / ".github").glob("*.md"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYTHONS = ("3.11", "3.12", "3.13")


def locked(name: str) -> dict[str, tuple[str, Marker | None]]:
    """Return the packages of a list, each with its version and its marker."""
    text = (LISTS / name).read_text(encoding="utf-8")
    found: dict[str, tuple[str, Marker | None]] = {}
    for line in re.findall(r"^[a-z0-9][^\\\n]*", text, re.MULTILINE):
        requirement = Requirement(line)
        (specifier,) = requirement.specifier
        found[canonicalize_name(requirement.name)] = (specifier.version, requirement.marker)
    return found


def declared(extra: str | None) -> list[Requirement]:
    """Return the requirements of pyproject.toml, with those of an extra and of what it names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [Requirement(line) for line in project["dependencies"]]
    waiting = [extra] if extra else []
    while waiting:
        for line in project["optional-dependencies"][waiting.pop()]:
            requirement = Requirement(line)
            if requirement.name == "rtx":
                waiting += sorted(requirement.extras)
            else:
                found.append(requirement)
    return found


@pytest.mark.parametrize(("file", "extra"), [("train.txt", None), ("dev.txt", "dev")])
def test_the_locked_versions_are_those_that_pyproject_allows(file: str, extra: str | None) -> None:
    versions = {**locked(file), **locked("torch.txt")}
    for requirement in declared(extra):
        name = canonicalize_name(requirement.name)
        assert name in versions, f"{requirement}: run make lock"
        version, marker = versions[name]
        assert requirement.specifier.contains(version), f"{requirement}: run make lock"
        if requirement.marker is None:
            for python in PYTHONS:
                linux = {"sys_platform": "linux", "platform_machine": "x86_64"}
                place = {**default_environment(), **linux, "python_full_version": f"{python}.0"}
                assert marker is None or marker.evaluate(place), f"{requirement}, {python}"


def test_both_lists_lock_the_same_versions_each_with_a_hash() -> None:
    train = locked("train.txt")
    dev = locked("dev.txt")
    assert train.items() <= dev.items()
    for name, packages in (("train.txt", train), ("dev.txt", dev)):
        text = (LISTS / name).read_text(encoding="utf-8")
        pinned = re.findall(r"^\S+==\S+.*\\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)
        assert len(pinned) == len(packages)
        assert "torch" not in packages
        assert "://" not in text, "an index is the user's choice"


def test_the_version_is_one_in_the_package_the_citation_and_the_change_log() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changes = (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", changes, re.MULTILINE)
    assert newest is not None
    assert citation["version"] == newest[1] == __version__


@pytest.mark.parametrize("path", COMMUNITY, ids=lambda path: path.name)
def test_links_of_the_guides_lead_somewhere(path: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]+)#?([\w-]*)\)", path.read_text()):
        page = path.parent / target
        assert page.is_file(), f"{path.name}: {target}"
        headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        anchors = {re.sub(r"[^\w-]", "", text.lower().replace(" ", "-")) for text in headings}
        assert not anchor or anchor in anchors, f"{path.name}: {target}#{anchor}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_and_files_that_exist_and_say_that_they_have_not_run(
    path: Path,
) -> None:
    text = path.read_text(encoding="utf-8")
    assert "not run yet" in text.splitlines()[0]
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for job in yaml.safe_load(text)["jobs"].values():
        for step in job["steps"]:
            command = step.get("run", "")
            assert set(re.findall(r"\bmake ([a-z]+)", command)) <= set(targets)
            for name in re.findall(r"\.ci/\S+\.txt", command):
                assert (ROOT / name).is_file()
