"""The worked example of docs/attention.md and the one of README.md run as they stand there."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from cases import CASES, Case, gradients, leaves, run, tensors
from hypothesis import HealthCheck, given, settings
from test_streaming import stream

from rtx.attention import Pattern, Relative, Spread, oracle
from rtx.attention.cache import Cache

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/attention.md"
RUN = (
    *("model=tiny", "model.base=dilated", "model.window=8", "model.stride=3", "model.layers=2", "model.heads=2"),
    *("model.hidden=16", "model.ffn_hidden=16", "routing.heads=1", "routing.layers=1", "routing.window=8"),
    *("data=recall", "data.length=64", "data.sequences=4", "hardware=cpu", "hardware.threads=1"),
)
COMMANDS = """
import sys
from rtx.cli import main
run, *model = sys.argv[1:]
train = ["train", *model, "trainer.steps=2", "trainer.batch_size=2", "logger=jsonl"]
for words in (train, ["audit", run, "prefixes=2", "windows=2", "positions=2"], ["plan", *model]):
    if code := main(words):
        sys.exit(f"{words[0]}: {code}")
"""


def blocks(page: Path) -> list[str]:
    """Return the blocks of Python of a page."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def example() -> str:
    """Return the text of the file that the page asks for."""
    (found,) = [text for text in blocks(PAGE) if "class Dilated" in text]
    return found


def line() -> str:
    """Return the line that the page adds to BASES."""
    (found,) = [text for text in blocks(PAGE) if text.lstrip().startswith('"dilated": ')]
    return found


@pytest.fixture(scope="module")
def dilated(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The page's file, loaded."""
    path = tmp_path_factory.mktemp("example") / "dilated.py"
    path.write_text(example(), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("dilated", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(pattern: Pattern, case: Case) -> None:
    """Compare outputs and gradients with the oracle, and a stream with one pass."""
    here = tensors(pattern, case)
    named = leaves(pattern, here)
    ours = run(pattern, here)
    theirs = run(lambda *given, **more: oracle.attend(pattern, *given, **more), here)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    mine, its = gradients(ours, named), gradients(theirs, named)
    for name in named:
        torch.testing.assert_close(mine[name], its[name], rtol=1e-8, atol=1e-8)
    with torch.no_grad():
        for prompt in {0, case.seed % (case.N + 1), case.N}:
            torch.testing.assert_close(stream(pattern, here, prompt), ours, rtol=1e-9, atol=1e-9)


@given(case=CASES)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_the_pattern_is_the_oracles_and_streams(dilated: ModuleType, case: Case) -> None:
    check(dilated.Dilated(window=case.W, stride=case.C).eval(), case)


def test_it_reads_every_third_of_the_last(dilated: ModuleType) -> None:
    i = torch.arange(20)[:, None]
    seen_NN = dilated.Dilated(window=4, stride=3).sees(0, i, i.T) & (i >= i.T)
    assert seen_NN[19].nonzero()[:, 0].tolist() == [10, 13, 16, 19]
    assert seen_NN[4].nonzero()[:, 0].tolist() == [1, 4]
    with pytest.raises(ValueError, match="stride=0: must be at least 1"):
        dilated.Dilated(window=4, stride=0)


@pytest.mark.parametrize("wrong", ["sees", "spreads", "until", "keeps"])
def test_a_pattern_that_contradicts_itself_is_caught(dilated: ModuleType, wrong: str) -> None:
    class Wrong(dilated.Dilated):  # type: ignore[name-defined,misc]
        def sees(self, head: int, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return i - j < self.keeps if wrong == "sees" else super().sees(head, i, j)

        def spreads(self, position_N: torch.Tensor, heads: int) -> list[Spread]:
            (spread,) = super().spreads(position_N, heads)
            if wrong == "spreads":  # a key too few
                spread = spread._replace(since_N=spread.since_N + self.stride)
            if wrong == "until":  # the next key, too
                spread = spread._replace(until_N=spread.until_N + self.stride)
            return [spread]

        def start(self, relative: Relative | None = None) -> Cache:
            cache = super().start(relative)
            if wrong == "keeps":  # forgets a key too early
                cache.ring -= self.stride
            return cache

    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check(Wrong(window=3, stride=3).eval(), Case(N=20))


def test_one_line_more_makes_a_base_of_it(tmp_path: Path) -> None:
    for name in ("rtx", "conf"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "rtx/attention/dilated.py").write_text(example(), encoding="utf-8")
    schema = tmp_path / "rtx/config.py"
    text = schema.read_text(encoding="utf-8")
    assert text.count("\nBASES = {\n") == 1
    schema.write_text(text.replace("\nBASES = {\n", f"\nBASES = {{\n{line()}"), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "RTX_RUN": str(tmp_path / "run")}
    command = [sys.executable, "-c", COMMANDS, str(tmp_path / "run"), *RUN]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\n +0 +dilated +0 +0\n", done.stdout), done.stdout
    assert "streaming: sees no future" in done.stdout and "dilated heads" in done.stdout
    assert "step 2/2" in done.stdout + done.stderr


def test_the_readmes_example_runs() -> None:
    (text,) = [text for text in blocks(ROOT / "README.md") if "rtx.attention" in text]
    exec(compile(text, "README.md", "exec"), {})
