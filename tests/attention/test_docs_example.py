"""The worked example of docs/extending.md and the one of docs/api.md run as they stand there."""

import re
from pathlib import Path
from typing import Any

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
def dilated() -> Any:
    """The class of the page, without the name that it registers for commands."""
    (text,) = [text for text in blocks(ROOT / "docs/extending.md") if "class Dilated" in text]
    names: dict[str, Any] = {"__name__": "dilated"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rtx, "register_pattern", lambda name, cls: None)
        exec(compile(text, "dilated.py", "exec"), names)
    return names["Dilated"]


def check(pattern: Pattern, case: Case) -> None:
    check_oracle(pattern, case)
    check_stream(pattern, case)


@given(case=CASES)
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_the_pattern_is_the_oracles_and_streams(dilated: Any, case: Case) -> None:
    check(dilated(window=case.W, stride=case.C).eval(), case)


def test_it_reads_every_third_of_the_last(dilated: Any) -> None:
    i, j = torch.tensor([[4], [19]]), torch.arange(20)
    seen_2N = dilated(window=4, stride=3).sees(0, i, j) & (i >= j)
    assert [seen_N.nonzero()[:, 0].tolist() for seen_N in seen_2N] == [[1, 4], [10, 13, 16, 19]]


@pytest.mark.parametrize("wrong", ["sees", "since_N", "until_N", "keeps"])
def test_a_pattern_that_contradicts_itself_is_caught(dilated: Any, wrong: str) -> None:
    class Wrong(dilated):
        def sees(self, head: int, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return i - j < self.keeps if wrong == "sees" else super().sees(head, i, j)

        def spreads(self, position_N: torch.Tensor, heads: int) -> list[Spread]:
            (spread,) = super().spreads(position_N, heads)
            if wrong in spread._fields:  # a key too few; the next key, too
                spread = spread._replace(**{wrong: getattr(spread, wrong) + self.stride})
            return [spread]

        def start(self, relative: Relative | None = None) -> Cache:
            cache = super().start(relative)
            cache.ring -= self.stride * (wrong == "keeps")  # forgets a key too early
            return cache

    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check(Wrong(window=3, stride=3).eval(), Case(N=20))


def test_the_example_of_the_attention_alone_runs() -> None:
    (text,) = [text for text in blocks(ROOT / "docs/api.md") if "rtx.attention" in text]
    exec(compile(text, "api.md", "exec"), {})
