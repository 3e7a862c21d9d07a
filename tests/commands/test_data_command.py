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
    said = capsys.readouterr().out
    assert said.startswith("preparing data=text") and "  train        5,400 bytes, 1 documents, 5,400 bytes, 1," in said
    assert main(["data", "verify", *options]) == 0
    assert "every byte as recorded" in capsys.readouterr().out
    (split,) = (tmp_path / "stores").glob("text-*/valid.bin")
    split.write_bytes(b"")
    assert main(["data", "verify", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"rtx: {split}: damaged: expected 300 bytes, found 0; ") and error.count("\n") == 1
    assert main(["data", "prepare", *options]) == 0 and main(["data", "verify", *options]) == 0


def test_info_list_and_remove(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RTX_DATA", str(tmp_path / "stores"))
    book = tmp_path / "book.txt"
    book.write_bytes(b"a line of text\n" * 400)
    options = ["data=text", f"data.path={book}"]
    assert main(["data", "list"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'stores'}: no data yet\n"
    assert main(["data", "info", *options]) == 2
    assert "not prepared; to prepare it: rtx data prepare data=text data.path=" in capsys.readouterr().err
    for by_name in (False, True):
        assert main(["data", "prepare", *options]) == 0
        (store,) = (tmp_path / "stores").glob("text-*")
        assert main(["data", "info", *options]) == 0
        page = capsys.readouterr().out
        assert "(of your own files)" in page and "  fingerprint  " in page
        assert main(["data", "list"]) == 0
        assert f"  {store.name}  " in capsys.readouterr().out
        assert main(["data", "remove", *([store.name] if by_name else options)]) == 0
        assert capsys.readouterr().out.startswith(f"{store}: removed, ")
        assert [path for path in (tmp_path / "stores").iterdir() if path.suffix != ".lock"] == []
    assert main(["data", "remove", *options]) == 2
    assert "nothing to remove: no such store" in capsys.readouterr().err
    assert main(["data", "info", "data=recall"]) == 0
    assert "made on the fly; valid 2,048, test 2,048 answers" in capsys.readouterr().out


def test_only_keys_of_data_are_taken(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RTX_DATA", str(tmp_path / "stores"))
    assert main(["data", "prepare", "trainer.steps=5", "logger=online", "routing.heads=1", "data.pth=x"]) == 2
    said = capsys.readouterr().err.splitlines()
    for line, word in zip(said, ("trainer.steps", "logger", "routing.heads"), strict=False):
        assert line.startswith(f"rtx: {word}=") and "rtx data does not read" in line
    assert said[3].startswith("rtx: unknown key 'data.pth' (did you mean 'data.path'?)") and len(said) == 4
    assert not (tmp_path / "stores").exists()
    assert main(["data", "verify", "data=recall", "data.length=40", "data.pairs=2"]) == 0  # no window of a model counts
    assert main(["data", "--help"]) == 0
    assert "\n  data.path" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "rtx: rtx data: say prepare, verify, info, remove or list\n"),
        (["prepar"], "rtx: rtx data prepar: say prepare, verify, info, remove or list (did you mean 'prepare'?)\n"),
        (["list", "data=text"], "rtx: rtx data list data=text: takes no words; rtx data info says more of one store\n"),
        (["remove", "text-12"], "rtx: text-12: no store of this name in "),
        (["remove"], "rtx: rtx data remove: name a store, as rtx data list has it, or say data=<set>\n"),
        (["remove", "data.length=64"], "rtx: rtx data remove: name a store, "),
        (["remove", "data=recall"], "rtx: data=recall: made on the fly, nothing on disk to remove\n"),
        (["info"], "rtx: "),
        (["prepare", "data=text"], "rtx: data=text needs data.path=<file, folder or glob>\n"),
        (
            ["prepare", "data=enwik8", "data.path=nowhere"],
            "rtx: data.path=nowhere: expected enwik8.zip or enwik8",
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
