"""Folders as data sets of the hub, made by strangers: they read nothing but what is in them."""

import io
import socket
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from rtx.data.hub_files import file_names, is_below
from tests.helpers.made_sets import opened, refused, write_table

LINES = [f"line {number} of some text" for number in range(100)]
BELOW = "a folder may name only files below it, by relative paths"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where any host is looked up or connected to."""

    def fail(*words: Any, **options: Any) -> None:
        pytest.fail(f"the network was asked: {words}")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setattr(socket.socket, "connect", fail)


def folder_naming(tmp_path: Path, files: Any, name: str = "README.md", **more: Any) -> Path:
    """Return a folder with a text, whose card names other files, and a secret beside it."""
    folder = tmp_path / "set"
    (folder / ".hidden").mkdir(parents=True)
    for path in (tmp_path / "secret.txt", folder / "train.txt", folder / ".hidden" / "more.txt"):
        path.write_text("\n".join(LINES))
    (folder / "seen").symlink_to(tmp_path)
    card = yaml.safe_dump({"configs": [{"config_name": "default", "data_files": files, **more}]})
    (folder / name).write_text(f"---\n{card}---\n" if name.endswith(".md") else card)
    return folder


FOREIGN = (
    "SECRET",
    "../secret.txt",
    "a/../../secret.txt",
    "../*.txt",
    ["train.txt", "../secret.txt"],
    [{"split": "train", "path": ["train.txt", "../secret.txt"]}],
    "file:SECRET",
    "file://SECRET",
    "http://127.0.0.1:9/x.txt",
    "https://127.0.0.1:9/x.txt",
    "hf://datasets/some/set/x.txt",
    "s3://bucket/x.txt",
    "zip://x.txt::http://127.0.0.1:9/x.zip",
    "..\\secret.txt",
)


@pytest.mark.parametrize("files", FOREIGN, ids=str)
def test_files_elsewhere_are_refused_before_any_is_looked_up(tmp_path, root, files):
    if isinstance(files, str):
        files = files.replace("SECRET", str(tmp_path / "secret.txt"))
    folder = folder_naming(tmp_path, files)
    refused(root, "hub", folder, f"its README.md names .*: {BELOW}")


def test_a_folder_elsewhere_and_names_in_other_places_are_refused(tmp_path, root):
    outside = folder_naming(tmp_path / "a", "*.txt", data_dir="../..")
    refused(root, "hub", outside, BELOW)
    settings = folder_naming(tmp_path / "b", "../secret.txt", ".huggingface.yaml")
    refused(root, "hub", settings, BELOW)


@pytest.mark.parametrize("files", [".hidden/more.txt", "seen/secret.txt"])
def test_files_that_the_identity_does_not_cover_are_refused(tmp_path, root, files):
    folder = folder_naming(tmp_path, files)
    refused(root, "hub", folder, "which is hidden, or not below that folder")


def test_files_below_are_read_and_a_change_of_what_names_them_makes_another_store(tmp_path, root):
    files = [{"split": "train", "path": "tra*.txt"}]
    folder = folder_naming(tmp_path, files, ".huggingface.yaml")
    (folder / "other.txt").write_text("other text\n" * 100)
    store = opened(root, "hub", folder)
    assert store.split("train").tobytes().startswith(b"line 0 of some text\n")
    settings = folder / ".huggingface.yaml"
    settings.write_text(settings.read_text().replace("tra*", "other"))
    changed = opened(root, "hub", folder)
    assert changed.split("train").tobytes().startswith(b"other text\n")


def test_names_and_aliases_without_end_are_read_once():
    bomb: list[Any] = ["train.txt"]
    for _ in range(60):
        bomb = [bomb] * 9
    assert list(file_names([{"data_files": bomb, "other": "../x"}])) == ["train.txt"]
    assert is_below("data/**/part-*.txt") and not is_below("/etc/passwd")


def tar_of(folder: Path, name: str, content: bytes) -> None:
    with tarfile.open(folder / "train.tar", "w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))


def bad_zip(folder: Path) -> None:
    (folder / "train.zip").write_bytes(b"PK\x03\x04 no archive")


def zip_of_no_text(folder: Path) -> None:
    with zipfile.ZipFile(folder / "train.zip", "w") as archive:
        archive.writestr("x.parquet", b"no table")


SPOILT = {
    "package": lambda folder: tar_of(folder, "a.cbor", b"\xa1aax"),
    "pickle": lambda folder: tar_of(folder, "a.pth", b"no pickle"),
    "message": lambda folder: tar_of(folder, "a.mp", b"\xc1"),
    "tar": lambda folder: (folder / "train.tar").write_bytes(b"no archive"),
    "zip": bad_zip,
    "zipped": zip_of_no_text,
    "card": lambda folder: (folder / "README.md").write_text("---\n- a\n- b\n---\n"),
    "yaml": lambda folder: (folder / "README.md").write_text("---\na: [\n---\n"),
    "configs": lambda folder: (folder / "README.md").write_text("---\nconfigs: [1]\n---\n"),
    "json": lambda folder: (folder / "dataset_infos.json").write_text("[1]"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_bad_archives_formats_and_cards_are_refused_in_words(tmp_path, root, kind):
    folder = tmp_path / "set"
    folder.mkdir()
    if kind in ("card", "yaml", "configs", "json"):
        write_table(folder / "train.parquet", text=LINES)
    SPOILT[kind](folder)
    refused(root, "hub", folder, f"data.path={folder}: cannot be loaded: |expected a column of")


@pytest.mark.parametrize("ending", ["h5", "lance", "pdb"])
def test_formats_that_name_further_files_are_refused(tmp_path, root, ending):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / f"train.{ending}").write_text("x")
    refused(root, "hub", tmp_path / "set", "expected files of arrow, .*, found ")
