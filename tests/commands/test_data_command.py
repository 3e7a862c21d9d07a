from __future__ import annotations

import pytest

from rtx.cli import main


def test_prepare_then_verify_then_damage(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RTX_DATA", str(tmp_path / "stores"))
    book = tmp_path / "book.txt"
    book.write_bytes(b"a line of text\n" * 400)
    options = ["data=text", f"data.path={book}"]
    assert main(["data", "verify", *options]) == 2
    assert "not prepared; to prepare it: rtx data prepare data=text data.path=" in capsys.readouterr().err
    assert main(["data", "prepare", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("preparing data=text") and ": train 5,400, valid 300, test 300 bytes; " in lines[1]
    assert main(["data", "verify", *options]) == 0
    assert "every byte as recorded" in capsys.readouterr().out
    (split,) = (tmp_path / "stores").glob("text-*/valid.bin")
    split.write_bytes(b"")
    assert main(["data", "verify", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"rtx: {split}: damaged: expected 300 bytes, found 0; ") and error.count("\n") == 1
    assert main(["data", "prepare", *options]) == 0 and main(["data", "verify", *options]) == 0


def test_only_keys_of_data_are_taken(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RTX_DATA", str(tmp_path / "stores"))
    assert main(["data", "prepare", "trainer.steps=5", "logger=online", "routing.heads=1", "data.pth=x"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "rtx: trainer.steps=5: rtx data does not read trainer.steps; it reads data.*",
        "rtx: logger=online: rtx data does not read logger; it reads data.*",
        "rtx: routing.heads=1: rtx data does not read routing.heads; it reads data.*",
        "rtx: unknown key 'data.pth' (did you mean 'data.path'?); rtx data reads data.*",
    ]
    assert not (tmp_path / "stores").exists()
    assert main(["data", "verify", "data=recall", "data.length=40", "data.pairs=2"]) == 0  # no window of a model counts
    assert main(["data", "--help"]) == 0
    assert "\n  data.path" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "rtx: rtx data: say prepare or verify\n"),
        (["prepar"], "rtx: rtx data prepar: say prepare or verify (did you mean 'prepare'?)\n"),
        (["prepare", "data=text"], "rtx: data=text needs data.path=<file, folder or glob>\n"),
        (
            ["prepare", "data=enwik8", "data.path=nowhere"],
            "rtx: data.path=nowhere: expected enwik8.zip, the file enwik8",
        ),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_2(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.setenv("RTX_DATA", str(tmp_path / "stores"))
    assert main(["data", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1


def test_a_root_that_is_a_file_is_told(tmp_path, monkeypatch, capsys):
    root = tmp_path / "stores"
    root.touch()
    monkeypatch.setenv("RTX_DATA", str(root))
    for action in ("prepare", "verify"):
        assert main(["data", action]) == 2
        assert capsys.readouterr().err.startswith(f"rtx: RTX_DATA={root}: is not a folder; set RTX_DATA to")
