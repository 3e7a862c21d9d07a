"""`rtx data`: what each action says, its exit codes, and what is wrong in one line."""

from __future__ import annotations

import pytest

from rtx.cli import main

SAY = "say prepare, verify, info data=<set>, list, or remove <a store of that list>"


def test_every_action_says_what_it_found(tmp_path, monkeypatch, capsys):
    root, book = tmp_path / "stores", tmp_path / "book.txt"
    monkeypatch.setenv("RTX_DATA", str(root))
    book.write_bytes(b"a line of text\n" * 400)
    options = ["data=text", f"data.path={book}"]

    def said(*words: str, code: int = 0) -> str:
        assert main(["data", *words]) == code
        found = capsys.readouterr()
        return found.err if code else found.out

    assert said("list") == f"{root}: no data yet\n"
    for word in ("verify", "info"):
        assert "not prepared; to prepare it: rtx data prepare data=text data.path=" in said(word, *options, code=2)
    page = said("prepare", *options)
    assert page.startswith("preparing data=text") and "  train        5,400 bytes, 1 documents, 5,400 bytes, 1," in page
    assert said("info", *options) in page
    assert "every byte as recorded" in said("verify", *options)
    (split,) = root.glob("text-*/valid.bin")
    split.write_bytes(b"")
    error = said("verify", *options, code=2)
    assert error.startswith(f"rtx: {split}: damaged: expected 300 bytes, found 0; ") and error.count("\n") == 1
    said("prepare", *options)
    assert f"  {split.parent.name}  data=text " in said("list")
    assert said("remove", split.parent.name).startswith(f"{split.parent}: removed, ") and not list(root.iterdir())
    assert "no store of this name" in said("remove", *options, code=2)
    assert "made on the fly; 2,048 answers in valid, 2,048 answers in test" in said("info", "data=recall")


def test_only_keys_of_data_are_taken(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RTX_DATA", str(tmp_path / "stores"))
    for word in ("trainer.steps=5", "logger=online", "routing.heads=1"):
        assert main(["data", "prepare", word]) == 2
        assert f"rtx: rtx data does not read {word.partition('=')[0]}; " in capsys.readouterr().err
    assert main(["data", "prepare", "data.pth=x"]) == 2
    assert "rtx: unknown key 'data.pth' (did you mean 'data.path'?)" in capsys.readouterr().err
    assert not (tmp_path / "stores").exists()
    assert main(["data", "info", "data=recall", "data.length=40", "data.pairs=2"]) == 0  # no window of a model counts
    assert main(["data", "--help"]) == 0
    assert "\n  data.path" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], f"rtx: rtx data: {SAY}\n"),
        (["prepar"], f"rtx: rtx data prepar: {SAY} (did you mean 'prepare'?)\n"),
        (["list", "data=text"], f"rtx: rtx data list data=text: {SAY}\n"),
        (["remove", "text-12"], "rtx: text-12: no store of this name in "),
        (["remove"], f"rtx: rtx data remove: {SAY}\n"),
        (["info"], "rtx: "),
        (["prepare", "data=text"], "rtx: data=text needs data.path=<file, folder or glob>\n"),
        (
            ["prepare", "data=enwik8", "data.path=nowhere"],
            "rtx: data.path=nowhere: expected enwik8.zip or enwik8, found none",
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
    assert main(["data", "prepare"]) == 2
    assert capsys.readouterr().err.startswith(f"rtx: RTX_DATA={root}: is not a folder; set RTX_DATA to")
