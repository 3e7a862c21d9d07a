"""Words that a text does not have, their share, and texts side by side."""

from __future__ import annotations

import pytest

from rtx.report.spelling import folded, known_words, samples_page, shares, shares_table, side_by_side, words


def test_words_are_letters_in_small_ones_and_halves_are_left_out() -> None:
    assert words("The cat's 3rd Überblick, x_y") == ["the", "cat", "s", "rd", "überblick", "x"]
    assert words("ending whole.") == ["ending", "whole"]
    assert words("alf a word", cut_start=True) == ["a"]
    assert words(" whole word ", cut_start=True) == ["whole", "word"]
    assert words("") == []


def test_known_words_stop_when_all_are_found() -> None:
    def texts():
        yield "A tale of a Cat"
        yield "and a dog"
        raise AssertionError("read on, though every word was found")

    assert known_words({"cat", "dog"}, texts()) == {"cat", "dog"}
    assert known_words({"cat", "dogs"}, ["cat dog"]) == {"cat"}


def test_the_share_is_over_all_words_with_the_error_over_samples() -> None:
    found = shares([["a", "b"], ["a", "x", "y", "z"]], {"a", "b"})
    assert found["words"] == 6 and found["unknown"] == 3 and found["share"] == 0.5
    # Residuals 0 - 1 and 3 - 2; their squares, times 2 samples over 1, are 4, whose root over 6 words is a third.
    assert found["error"] == pytest.approx(1 / 3)
    assert shares([["a"]], set())["error"] is None
    assert shares([[], []], set()) == {"words": 0, "unknown": 0, "share": None, "error": None}


def test_two_runs_are_set_against_each_other() -> None:
    row = {"words": 1_000, "unknown": 100, "share": 0.1, "error": 0.03}
    rows = {"routed": row, "local": row | {"share": 0.2, "error": 0.04}, "valid text": row | {"share": 0.01}}
    lines = shares_table(rows)
    assert lines[1].split() == ["routed", "1,000", "10.00%", "±", "3.00%"]
    assert lines[-1].split() == ["difference", "-10.00%", "±", "5.00%"]
    assert len(shares_table({"routed": row, "valid text": row})) == 3
    assert "no words" in shares_table({"routed": shares([[]], set()), "valid text": row})[1]


def test_columns_stand_side_by_side_within_80() -> None:
    lines = side_by_side(["one\n" + "word " * 20, "x" * 90], ["a", "b"])
    assert all(len(line) <= 80 for line in lines)
    assert [line.index("|") for line in lines] == [39] * len(lines)
    assert lines[2].split("|")[0].strip() == "one" and lines[2].split("|")[1].strip() == "x" * 38
    (line,) = side_by_side(["y" * 80], ["alone"])[2:]
    assert line == "y" * 80


def test_folding_keeps_lines_and_harms_no_terminal() -> None:
    assert folded("a\n\nb\x1b[31m", 10) == ["a", "", "b\N{REPLACEMENT CHARACTER}[31m"]


def test_the_page_names_the_unknown_words_of_each_sample() -> None:
    sample = {"prompt": "Once", "texts": {"r": "```\nupon"}, "unknown": {"r": ["upn", "upn", "atime"]}}
    page = samples_page("Samples", ["how"], ["table"], [sample])
    assert page.startswith("# Samples\n\nhow\n\n    table\n\n## Sample 1\n\nGiven:\n\n    Once")
    assert "    ```\n    upon\n" in page, "a fence inside a sample ends nothing"
    assert "Not in the training text, r: upn, atime.\n" in page
