"""The worked example of docs/extending.md and the one of docs/api.md run as they stand there."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from cases import CASES, Case, check_oracle, check_stream
from hypothesis import HealthCheck, given, settings

import rtx
from rtx.attention import Pattern, Relative, Spread
from rtx.attention.cache import Cache

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def dilated(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The file that the page asks for, loaded, without the name that it registers for commands."""
    path = tmp_path_factory.mktemp("example") / "dilated.py"
    (text,) = [text for text in blocks(ROOT / "docs/extending.md") if "class Dilated" in text]
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("dilated", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rtx, "register_pattern", lambda name, cls: None)
        spec.loader.exec_module(module)
    return module


def check(pattern: Pattern, case: Case) -> None:
    check_oracle(pattern, case)
    check_stream(pattern, case)


@given(case=CASES)
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_the_pattern_is_the_oracles_and_streams(dilated: ModuleType, case: Case) -> None:
    check(dilated.Dilated(window=case.W, stride=case.C).eval(), case)


def test_it_reads_every_third_of_the_last(dilated: ModuleType) -> None:
    i, j = torch.tensor([[4], [19]]), torch.arange(20)
    seen_2N = dilated.Dilated(window=4, stride=3).sees(0, i, j) & (i >= j)
    assert [seen_N.nonzero()[:, 0].tolist() for seen_N in seen_2N] == [[1, 4], [10, 13, 16, 19]]


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


def test_the_example_of_the_attention_alone_runs() -> None:
    (text,) = [text for text in blocks(ROOT / "docs/api.md") if "rtx.attention" in text]
    exec(compile(text, "api.md", "exec"), {})
