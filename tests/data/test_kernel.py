"""data=kernel: every form of a kernel gives the same documents; what is no kernel is refused."""

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from rtx.data import download as downloading
from rtx.data import kernel
from rtx.data.catalog import open_data
from rtx.data.download import Remote
from rtx.data.sets import SPLITS
from rtx.data.store import TokenStore
from rtx.errors import RunFailed, UserError
from rtx.settings.compose import compose
from rtx.settings.presets import preset
from tests.helpers.bad_servers import NOBODY, Server, broken, ranged, serving
from tests.helpers.made_sets import (
    kernel_folder,
    kernel_tarball,
    kernel_tree,
    opened,
    refused,
    taken_files,
)

TREE = kernel_tree()
TAKEN = taken_files(TREE)


@pytest.fixture(scope="module")
def tarball(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kernel_tarball(tmp_path_factory.mktemp("kernel") / "linux-6.1.tar.xz", TREE)


@pytest.fixture
def server(tarball: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of the published tarball, which is a small one here."""
    monkeypatch.setattr(downloading, "PAUSE", 0)
    content = tarball.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    with serving(content) as state:
        published = Remote(f"{state.address}/linux-6.12.tar.xz", len(content), sha256)
        monkeypatch.setattr(kernel, "KERNEL", published)
        yield state


def documents(store: TokenStore, split: str) -> list[bytes]:
    starts = np.load(store.folder / f"{split}.starts.npy").tolist()
    tokens = store.split(split)
    return [tokens[start:stop].tobytes() for start, stop in pairwise(starts)]


def names_in(store: TokenStore, split: str) -> list[str]:
    """Return the paths of a split's documents, by their contents, which all differ."""
    names = {content: name for name, content in TAKEN.items()}
    return [names[document] for document in documents(store, split)]


def test_the_published_tarball_is_that_of_the_preset():
    path = preset("data", "kernel")
    assert path is not None
    header = path.read_text()
    assert kernel.KERNEL.url in header and kernel.KERNEL.sha256 in header
    assert f"{kernel.KERNEL.size:,} bytes" in header
    listed = f"{', '.join(kernel.FOLDERS[:-1])} and {kernel.FOLDERS[-1]}"
    assert listed in header and ", ".join(kernel.TABLES) in header


def test_every_file_is_one_document_of_one_split_in_order_of_paths(tarball, root):
    store = opened(root, "kernel", tarball)
    names = {split: names_in(store, split) for split in SPLITS}
    assert all(names[split] == sorted(names[split]) for split in SPLITS)
    everywhere = [*names["train"], *names["valid"], *names["test"]]
    assert sorted(everywhere) == sorted(TAKEN), "no file is in two splits, none is lost"
    assert len(names["valid"]) == len(names["test"]) == 4
    assert store.unit == "byte" and store.describe()["source"]["release"] == "6.12.0"


def test_a_file_is_in_the_same_split_in_every_release(tarball, root, tmp_path):
    fewer = {name: content for name, content in TREE.items() if "file3" not in name}
    other = kernel_tarball(tmp_path / "linux-5.4.tar.xz", fewer)
    first = opened(root, "kernel", tarball)
    second = opened(root, "kernel", other)
    assert first.fingerprint != second.fingerprint
    for split in SPLITS:
        assert set(names_in(second, split)) <= set(names_in(first, split))


@pytest.mark.parametrize("name", ["linux-6.1.tar.gz", "linux.tar", "linux-6.1"])
def test_every_form_gives_the_same_store(tarball, root, tmp_path, name):
    if name.endswith(kernel.TARBALLS):
        reverse = dict(reversed(TREE.items()))
        other = kernel_tarball(tmp_path / name, reverse, top="./linux/")
    else:
        other = kernel_folder(tmp_path / name, TREE)
    first = opened(root, "kernel", tarball)
    assert opened(root, "kernel", other).fingerprint == first.fingerprint


def test_words_and_subwords_are_learned_from_training_files(tarball, root):
    words = opened(root, "kernel", tarball, tokenizer="words")
    subwords = opened(root, "kernel", tarball, tokenizer="sentencepiece", vocabulary=400)
    assert words.unit == "word" and subwords.unit == "subword"
    assert subwords.facts["valid"]["documents"] == 4
    assert subwords.tokenizer.decode(subwords.split("test")) == b"".join(
        TAKEN[name] for name in sorted(TAKEN) if kernel.split_of(name) == "test"
    )


def test_the_published_tarball_is_fetched_once_checked_and_not_needed_again(server, root):
    server.answers = [broken, ranged]
    store = opened(root, "kernel", None)
    assert os.listdir(root / "downloads") == ["linux-6.12.tar.xz"]
    assert store.describe()["source"]["sha256"] == kernel.KERNEL.sha256
    requests = len(server.ranges)
    (root / "downloads" / "linux-6.12.tar.xz").unlink()
    assert opened(root, "kernel", None).fingerprint == store.fingerprint
    assert len(server.ranges) == requests, "a store that is there needs no source"


def test_a_local_copy_of_the_published_tarball_makes_its_store(server, root, tarball, tmp_path):
    copy = tmp_path / "linux-6.12.tar.xz"
    copy.write_bytes(tarball.read_bytes())
    store = opened(root, "kernel", copy)
    assert opened(root, "kernel", None).folder == store.folder and server.ranges == []


@pytest.mark.usefixtures("server")
def test_no_other_tarball_of_its_name_is_opened(root, tarball, tmp_path, monkeypatch):
    monkeypatch.setattr(tarfile, "open", lambda *_, **__: pytest.fail("it was opened"))
    other = tmp_path / "linux-6.12.tar.xz"
    other.write_bytes(tarball.read_bytes() + b"\0")
    message = r"linux-6\.12\.tar\.xz: expected .* with sha256 [0-9a-f]{64}, found [\d,]+ bytes with"
    refused(root, "kernel", other, message)


def test_without_a_network_a_line_says_the_way_round(root, monkeypatch):
    published = Remote(f"{NOBODY}/linux-6.12.tar.xz", 10, "0" * 64)
    monkeypatch.setattr(kernel, "KERNEL", published)
    with pytest.raises(RunFailed) as raised:
        opened(root, "kernel", None)
    line = str(raised.value)
    assert line.startswith(f"{published.url}: cannot be fetched: 127.0.0.1: Connection refused; ")
    assert line.endswith("name it: data.path=<file or folder>") and "\n" not in line


def test_what_is_no_kernel_is_refused(root, tmp_path, tarball):
    left_out = ("fs/", "mm/")
    without = {name: content for name, content in TREE.items() if not name.startswith(left_out)}
    (tmp_path / "notes.txt").touch()
    (tmp_path / "text.tar.xz").write_bytes(b"no tarball" * 100)
    (tmp_path / "cut.tar.xz").write_bytes(tarball.read_bytes()[:-2_000])
    no_top = kernel_tarball(tmp_path / "flat.tar.xz", TREE, top="")
    lacking = kernel_tarball(tmp_path / "lacking.tar.xz", without)
    folder = kernel_folder(tmp_path / "tree", without)
    expected = r"expected linux-6\.12\.tar\.xz, .* with block/, crypto/, .*security/, virt/"
    for path, message in {
        tmp_path / "nowhere": f"{expected}, found none$",
        tmp_path / "notes.txt": rf"{expected}, found a file that ends in none of \.tar\.xz, ",
        tmp_path / "text.tar.xz": r"text\.tar\.xz: expected a whole tarball, found another file",
        tmp_path / "cut.tar.xz": r"cut\.tar\.xz: expected a whole tarball, found another file, or",
        no_top: r"expected one folder at its top, found Makefile, README, block, ",
        lacking: rf"lacking\.tar\.xz: {expected}; found no fs/, mm/$",
        folder: rf"tree: {expected}; found no fs/, mm/$",
    }.items():
        refused(root, "kernel", path, rf"data\.path=.*{message}")


def test_more_than_a_kernel_has_is_refused_before_it_is_read(root, tarball, tmp_path, monkeypatch):
    monkeypatch.setattr(kernel, "MOST_BYTES", 1_000)
    folder = kernel_folder(tmp_path / "tree", TREE)
    message = r"expected at most 1,000 bytes of C files, found [\d,]+ or more"
    for path in (tarball, folder):
        refused(root, "kernel", path, message)


def header(name: str, size: bytes = b"", kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return the header of a member, with a size as its field has it."""
    content = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT)[:512])
    content[124 : 124 + len(size)] = size
    content[156:157] = kind
    content[148:156] = b" " * 8  # what the checksum takes for its own field
    content[148:156] = b"%06o\0 " % sum(content)
    return bytes(content)


def binary(size: int) -> bytes:
    """Return a size as GNU tar writes those that do not fit in octal digits."""
    mark = b"\x80" if size >= 0 else b"\xff"
    return mark + size.to_bytes(11, "big", signed=True)


LONG_NAME = header("././@LongLink", b"%011o" % 2, tarfile.GNUTYPE_LONGNAME) + b"x".ljust(512, b"\0")
SPARSE = b"22 GNU.sparse.map=a,b\n21 GNU.sparse.size=9\n"


@pytest.mark.parametrize(
    ("front", "reason"),
    [
        (header("linux-6.12/huge.bin", binary(1 << 60)), "unexpected end of data"),
        (header("linux-6.12/fs/negative.c", binary(-512)), "a negative size"),
        (header("name", binary(1 << 40), tarfile.GNUTYPE_LONGNAME), r"a header of [\d,]+ bytes"),
        (header("name", binary(1 << 40), tarfile.XHDTYPE), r"a header of [\d,]+ bytes"),
        (LONG_NAME * 1_500, "recursion"),
        (
            header("pax", b"%011o" % len(SPARSE), tarfile.XHDTYPE)
            + SPARSE.ljust(512, b"\0")
            + header("linux-6.12/fs/sparse.c"),
            "invalid literal",
        ),
    ],
    ids=["huge", "negative", "long name", "long records", "chain", "sparse"],
)
def test_headers_that_no_tar_writes_are_refused_at_once(tmp_path, front, reason):
    path = kernel_tarball(tmp_path / "hostile.tar", TREE)
    path.write_bytes(front + path.read_bytes())
    with pytest.raises(UserError, match=f"expected a whole tarball, found .*{reason}"):
        kernel.tarball_files(path)


def test_a_tarball_without_its_end_and_a_damaged_one_are_no_shorter_ones(tmp_path):
    path = kernel_tarball(tmp_path / "linux.tar", TREE)
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        last = archive.getmembers()[-1]
    damaged = bytearray(whole)
    damaged[last.offset] ^= 1
    for content, reason in ((whole[: last.offset], "unexpected end"), (damaged, "bad checksum")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"expected a whole tarball, found .*{reason}"):
            kernel.tarball_files(path)


def test_the_sum_at_the_end_of_compressed_data_is_checked(tmp_path):
    path = kernel_tarball(tmp_path / "linux.tar.gz", TREE)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1  # of the sum
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"expected a whole tarball, found .*CRC"):
        kernel.tarball_files(path)


def test_a_makefile_of_other_bytes_names_no_release():
    assert kernel.release_of(b"VERSION = \xff\nPATCHLEVEL = 12\nSUBLEVEL =\n") == "?.12.?"
    candidate = b"VERSION = 6\nPATCHLEVEL = 1\nSUBLEVEL = 0\nEXTRAVERSION = -rc1\n"
    assert kernel.release_of(candidate) == "6.1.0-rc1"


def link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info


def test_links_and_paths_that_lead_elsewhere_are_not_read(root, tmp_path, tarball):
    secret = tmp_path / "secret.c"
    secret.write_bytes(b"secret " * 50)
    path = tmp_path / "linked.tar"
    kernel_tarball(path, TREE)
    with tarfile.open(path, "a") as archive:
        archive.addfile(link("linux-6.12/fs/symbolic.c", str(secret), tarfile.SYMTYPE))
        archive.addfile(link("linux-6.12/fs/hard.c", str(secret), tarfile.LNKTYPE))
        outside = tarfile.TarInfo("linux-6.12/fs/../../outside.c")
        outside.size = 6
        archive.addfile(outside, io.BytesIO(b"escape"))
    folder = kernel_folder(tmp_path / "tree", TREE)
    (folder / "fs" / "symbolic.c").symlink_to(secret)
    (folder / "fs" / "folder").symlink_to(tmp_path)
    first = opened(root, "kernel", tarball)
    assert opened(root, "kernel", path).fingerprint == first.fingerprint
    assert opened(root, "kernel", folder).fingerprint == first.fingerprint
    assert not (tmp_path / "outside.c").exists()


def test_a_folder_that_changes_while_it_is_read_leaves_nothing(root, tmp_path, monkeypatch):
    folder = kernel_folder(tmp_path / "tree", TREE)
    real = kernel.folder_files

    def changing(*words):
        contents = real(*words)
        (folder / "fs" / "head.h").write_bytes(b"another")
        return contents

    monkeypatch.setattr(kernel, "folder_files", changing)
    refused(root, "kernel", folder, r"tree: changed while it was read; prepare it again")


def test_a_window_of_65536_units_goes_on_over_the_borders_of_files(root, tmp_path):
    place = kernel_tarball(tmp_path / "linux-6.1.tar.xz", kernel_tree(files_each=80))
    words = ["data=kernel", f"data.path={place}", "data.length=65536", "trainer.batch_size=1"]
    config = compose(words)
    store = open_data(config.data, root, lambda line: None)
    assert isinstance(store, TokenStore)
    train = store.split("train")
    window = store.training_sampler(config).sequence(0)
    assert window.shape == (65_536,) and window.tobytes() in train.tobytes()
    assert store.facts["train"]["documents"] > 100
    refused(root, "kernel", place, r"data\.length=.*found", length=2**24)
