"""`benchmarks/compare.py`: which rows of two records moved, and what it refuses."""

import importlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
Main = Callable[[list[str]], int]


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Main:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("compare").main


def record(path: Path, seed: int, factors: dict[str, float], **more: Any) -> str:
    """Write ten rows of five noisy turns, some slower by a factor, and return the path."""
    draw = random.Random(seed)
    rows = []
    for number in range(10):
        pattern = f"p{number}"
        factor = factors.get(pattern, 1.0)
        turns = [100 * factor * draw.lognormvariate(0, 0.02) for _ in range(5)]
        rows.append({"pattern": pattern, "N": 256, "ms": turns[2], "ms_all": turns, **more})
    path.write_text(json.dumps(rows))
    return str(path)


def test_the_rows_that_moved_by_more_than_their_noise_are_named(
    compare: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = record(tmp_path / "a.json", 1, {})
    after = record(tmp_path / "b.json", 2, {"p3": 1.3, "p7": 0.7})
    assert compare([before, after]) == 1
    said = capsys.readouterr().out
    slower, _, faster = said.partition("faster: 1 row\n")
    assert slower.startswith("slower: 1 row\n  x 1.298") and "p3 N=256" in slower
    assert "p7 N=256" in faster and "10 rows compared in time, 2 moved" in faster
    assert compare([after, before, "--least", "0.5"]) == 0, "1 / 0.7 is less than 1.5"


def test_equal_code_moves_no_row_in_19_of_20_records(compare: Main, tmp_path: Path) -> None:
    false = 0
    for seed in range(40):
        before = record(tmp_path / "a.json", 2 * seed, {})
        after = record(tmp_path / "b.json", 2 * seed + 1, {})
        false += compare([before, after, "--least", "0"])
    assert false <= 4


def test_memory_rates_and_rows_with_few_measurements(
    compare: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(name: str, rate: float, peak: int) -> str:
        path = tmp_path / name
        rates = [rate + 0.01 * n for n in range(5)]
        rows = [
            {"case": "tokens", "unit": "MB/s", "values": rates},
            {"case": "step", "ms": 3.0, "peak_bytes": peak},
        ]
        path.write_text(json.dumps({"machine": "one", "rows": rows}))
        return str(path)

    assert compare([write("a.json", 9.0, 1000), write("b.json", 12.0, 1100)]) == 1
    said = capsys.readouterr().out
    assert "faster: 1 row" in said and "more memory: 1 row\n  x 1.100  step" in said
    assert "1 row not compared in time: fewer than 5 measurements" in said


def test_rows_of_configurations_are_named_by_the_keys_that_differ(
    compare: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for name, ms in (("a.json", 5.0), ("b.json", 9.0)):
        rows = [
            {
                "config": {"seed": 0, "model": {"base": base}},
                "ms_turns": [ms + 0.01 * turn for turn in range(5)],
            }
            for base in ("full", "local")
        ]
        paths.append(tmp_path / name)
        paths[-1].write_text(json.dumps({"device": name, "rows": rows}))
    assert compare([str(path) for path in paths]) == 1
    said = capsys.readouterr().out
    assert "model.base=full\n" in said and "seed" not in said
    assert "not the same machine" in said and said.endswith("a.json; b.json\n")


@pytest.mark.parametrize("content", ["", "{}", '["x"]', "[]", '[{"ms": 1}, {"ms": 2}]'])
def test_what_is_no_record_is_refused_in_a_line(
    compare: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    assert compare([str(path), str(path)]) == 2
    assert capsys.readouterr().err.startswith("compare.py: ")
