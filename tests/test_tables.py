"""Tables and lists on a terminal.

Columns line up, narrow terminals get tables in parts, and overrides are short.
"""

import pytest

from rtx.tables import (
    DASH,
    MINUS,
    Column,
    Table,
    aligned,
    print_table,
    room_for,
    shortened,
    table_text,
    text_of,
)


def test_a_list_lines_up_numbers_at_the_right_also_beside_wide_letters_and_markup() -> None:
    rows = [["cell", "bits"], ["[red]x", "2.5"], ["漢字", "12.25"]]
    assert aligned(rows, right={1}) == [
        "cell     bits",
        "[red]x    2.5",
        "漢字    12.25",
    ]
    assert room_for(0, rows, width=20) == 20 - len("  12.25")


def test_a_narrow_terminal_gets_a_table_in_parts_each_with_the_first_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"layer": "0", "local": 0.25, "routing": -1.0}]
    columns = [Column("layer", "layer"), Column("local", "local", 2), Column("routing", "r", 1)]
    monkeypatch.setenv("COLUMNS", "14")
    print_table(rows, columns)
    assert capsys.readouterr().out.splitlines() == [
        "layer  local",
        "0       0.25",
        "",
        "layer     r",
        f"0      {MINUS}1.0",
    ]
    monkeypatch.setenv("COLUMNS", "20")
    print_table(rows, columns)
    assert capsys.readouterr().out.splitlines() == [
        "layer  local     r",
        f"0       0.25  {MINUS}1.0",
    ]


def test_values_have_their_digits_errors_remarks_and_no_negative_zero() -> None:
    column = Column("bits", "bits", 2, error="half", remark="note")
    assert text_of({"bits": -1234.5, "half": 0.125}, column) == f"{MINUS}1,234.50 ± 0.12"
    assert text_of({"bits": -0.001, "note": "old"}, column) == "0.00, old"
    assert text_of({"bits": "not run"}, column) == "not run"
    assert text_of({}, column) == DASH


def test_intervals_are_drawn_on_one_scale_where_there_is_room() -> None:
    columns = [Column("heads", "heads"), Column("ours", "bits", 1, "half")]
    rows = [
        {"heads": "full", "ours": 1.0, "half": 0.0, "seeds": 5},
        {"heads": "local", "ours": 2.0, "half": 1.0, "seeds": 5},
        {"heads": "baseline", "ours": 3.0},
    ]
    lines = table_text(Table("scores", columns, rows), 100, intervals=True).splitlines()
    assert [line.rpartition("  ")[2] for line in lines[-3:-1]] == ["●", "●".center(13, "─")]
    assert "●" not in lines[-1]
    assert "●" not in table_text(Table("scores", columns, rows), 80, intervals=True)


def test_long_overrides_name_keys_by_their_last_part_where_that_is_one_key_alone() -> None:
    texts = ["routing.heads=2 routing.window=64", "routing.heads=4 model.window=32"]
    assert shortened(texts, 40) == texts
    assert shortened(texts, 26) == ["heads=2 routing.window=64", "heads=4 model.window=32"]
    assert shortened(["seed=123456"], 6) == ["seed=…"]
