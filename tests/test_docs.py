"""README and docs/: what scripts write is current, examples run, and named files exist."""

import inspect
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import rtx.attention
from rtx.settings.fields import fields_of
from rtx.settings.schema import GROUPS, Config
from tests.helpers.pages import PAGES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
files = runpy.run_path(str(DOCS / "schema" / "make.py"))["files"]


def test_schemas_and_the_page_of_all_keys_are_the_committed_ones() -> None:
    written = files()
    assert {path.stem for path in written} == {*GROUPS, "config", "configuration"}
    for path, text in written.items():
        assert path.read_text(encoding="utf-8") == text, "run python docs/schema/make.py"


def test_the_page_of_all_keys_has_a_row_for_each() -> None:
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    for key in fields_of(Config):
        assert page.count(f"\n| `{key}` |") == 1


def test_the_notebook_trains_and_shows_what_heads_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    for name in ("RTX_DATA", "RTX_OUTPUTS", "RTX_RUN"):
        monkeypatch.delenv(name, raising=False)
    names: dict[str, Any] = {}
    for cell in json.loads((DOCS / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "notebook", "exec"), names)
    assert [name for name, _ in names["heads"]] == ["local 0", "local 1", "routed 0", "routed 1"]
    reads = {name: weight_NN.sum(-1) for name, weight_NN in names["heads"]}
    assert all(
        bool((sum_N[1:] - 1).abs().max() < 1e-5) for name, sum_N in reads.items() if "local" in name
    )
    assert "sees the future: False" in capsys.readouterr().out


def test_the_page_shows_what_every_pattern_reads_and_says_it_in_a_formula() -> None:
    drawing = runpy.run_path(str(DOCS / "pictures.py"))
    page = (DOCS / "attention.md").read_text(encoding="utf-8")
    patterns = drawing["patterns"]()
    for name, pattern in patterns.items():
        kept = (DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
        assert drawing["draw"](name, drawing["reads"](pattern)) == kept, "python docs/pictures.py"
        assert f"](pictures/{name}.svg)" in page
    drawn = {type(pattern).__name__ for pattern in patterns.values()}
    public = {name for name, kind in vars(rtx.attention).items() if is_pattern(kind)}
    bases = {"Pattern", "PositionPattern", "ContiguousPattern", "ClusterPattern", "Routing"}
    assert public - drawn == {*bases, "RandomBlocks"}
    for name in public - bases:
        section = section_of(name, page)
        assert "](pictures/" in section, name
        assert re.search("S_i|[ko]_[ij] = ", section), name


def is_pattern(kind: object) -> bool:
    """Return whether it is a class of patterns."""
    return inspect.isclass(kind) and issubclass(kind, rtx.attention.Pattern)


def section_of(name: str, page: str) -> str:
    """Return the section to which the table of all patterns links a class."""
    (anchor,) = re.findall(rf"`{name}`[^(|]*\]\(#([\w-]+)\)", page)
    parts = re.split(r"^### (.*)$", page, flags=re.MULTILINE)[1:]
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    for heading, text in sections.items():
        if re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) == anchor:
            return text
    raise AssertionError(f"{name}: no section #{anchor}")


def test_the_code_of_the_page_on_models_of_your_own_runs() -> None:
    page = (DOCS / "library.md").read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert len(code) == 7
    names: dict[str, object] = {"__name__": "library"}
    for block in code:
        exec(compile(block, "library.md", "exec"), names)


def test_the_code_of_the_page_on_pretrained_models_runs() -> None:
    pytest.importorskip("transformers", reason="the extra rtx[hf] is not installed")
    page = (DOCS / "pretrained.md").read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert len(code) == 3
    names: dict[str, Any] = {"__name__": "pretrained"}
    # The model of the page has random weights, and other ones may generate the end of a text.
    torch.manual_seed(0)
    for block in code:
        exec(compile(block, "pretrained.md", "exec"), names)
    assert names["loss"].isfinite() and names["written"].shape == (1, 72)


def test_every_test_that_the_page_on_reliability_names_exists() -> None:
    page = (DOCS / "reliability.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page)
    assert len(named) > 20
    for path, name in named:
        content = (ROOT / path).read_text(encoding="utf-8")
        assert not name or re.search(rf"^def {name}\(", content, re.MULTILINE), f"{path}::{name}"


def test_the_readme_is_short_and_fits_a_terminal_of_80_columns() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    for command in ("make train", "make test", "rtx train --help"):
        assert any(command in line for line in lines)
    assert len(lines) <= 100 and max(map(len, lines)) <= 80


def test_every_file_that_the_page_on_extending_names_exists() -> None:
    page = (DOCS / "extending.md").read_text(encoding="utf-8")
    _, _, steps = page.partition("## How to add a key")
    named = re.findall(r"`((?:rtx|tests|docs|conf)/[\w./]+)`", steps)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_tables_of_the_page_on_speed_are_those_of_the_records() -> None:
    text = runpy.run_path(str(DOCS / "speed.py"))["text"]
    assert (DOCS / "speed.md").read_text(encoding="utf-8") == text(), "run python docs/speed.py"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    _, _, navigation = text.partition("\nnav:\n")
    pages = [*DOCS.glob("*.md"), *(DOCS / "results").glob("*.md")]
    names = {page.relative_to(DOCS).as_posix() for page in pages}
    assert names <= set(re.findall(r"\S+\.md", navigation))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_every_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    problems = []
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([\w.-]*)\)", text):
        other = page.parent / target if target else page
        is_reference = other.name == "api.md" and anchor.startswith("rtx")
        if not other.exists():
            problems.append(target)
        elif anchor and not is_reference and anchor not in anchors_of(other):
            problems.append(f"{target}#{anchor}")
    assert problems == []


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w-]", "", text.lower().replace(" ", "-")) for text in headings}
