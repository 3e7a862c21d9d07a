from __future__ import annotations

import pyarrow as pa
import pytest
from corpora import write_rows
from pyarrow import parquet

from rtx.data.parquet import check_columns, missing_shards, shards, text_rows
from rtx.errors import UserError

ROWS = [b"one", b"", "zwölf".encode(), b"\xff not UTF-8", b"x" * 100_000]


def test_rows_come_as_their_bytes_and_row_groups_apart(tmp_path):
    path = write_rows(tmp_path / "a.parquet", ROWS, group=2, other=list(range(5)))
    groups = check_columns(path, ["text", "other"])
    assert [group.rows for group in groups] == [2, 2, 1]
    assert sum(group.size for group in groups) >= 100_000
    assert list(text_rows(path, "text")) == ROWS
    assert list(text_rows(path, "text", [2, 0])) == [ROWS[4], ROWS[0], ROWS[1]]
    assert list(text_rows(path, "text", [])) == []


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_every_kind_of_text_is_read(tmp_path, kind):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": pa.array([b"a", b"b"], pa.large_binary()).cast(kind)}), path)
    assert list(text_rows(path, "text", rows=1)) == [b"a", b"b"]


def test_other_columns_are_refused(tmp_path):
    path = write_rows(tmp_path / "a.parquet", ROWS, label=[1, 2, 3, 4, 5])
    with pytest.raises(UserError, match=r"expected columns text, url; found label, text, without url"):
        check_columns(path, ["text", "url"])
    with pytest.raises(UserError, match="expected text in column label, found int64"):
        list(text_rows(path, "label"))
    parquet.write_table(pa.table({"text": ["a", None]}), path)
    with pytest.raises(UserError, match="expected text in column text, found none in row 1"):
        list(text_rows(path, "text"))


@pytest.mark.parametrize("keep", [0, 3, 100, -1])
def test_a_file_cut_short_is_refused(tmp_path, keep):
    path = write_rows(tmp_path / "a.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"a\.parquet: expected a whole parquet file, found [\d,]+ bytes") as error:
        list(text_rows(path, "text"))
    assert "\n" not in str(error.value)


def test_spoilt_rows_are_refused(tmp_path):
    path = write_rows(tmp_path / "a.parquet", [bytes(range(97, 123)) * 40] * 50)
    raw = path.read_bytes()
    path.write_bytes(raw[:40] + b"\xff" * 60 + raw[100:])
    with pytest.raises(UserError, match="expected a whole parquet file"):
        list(text_rows(path, "text"))


def test_html_and_nothing_are_refused(tmp_path):
    (tmp_path / "a.parquet").write_text("<html>moved</html>")
    with pytest.raises(UserError, match=r"expected a whole parquet file, found a web page .HTML. of 18 bytes"):
        check_columns(tmp_path / "a.parquet", ["text"])
    with pytest.raises(UserError, match="expected a whole parquet file, found none"):
        check_columns(tmp_path / "b.parquet", ["text"])


def test_shards_are_found_in_order_and_missed(tmp_path):
    for name in ("train-00002-of-00003", "train-00000-of-00003", "test-00000-of-00001", "trains", "valid"):
        (tmp_path / f"{name}.parquet").touch()
    found = shards(tmp_path, ["train"])
    assert [path.name[:11] for path in found] == ["train-00000", "train-00002"]
    assert missing_shards(found) == ["train-00001-of-00003.parquet"]
    assert [path.name for path in shards(tmp_path, ["validation", "valid"])] == ["valid.parquet"]
    assert missing_shards(shards(tmp_path, ["valid"])) == []
