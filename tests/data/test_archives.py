from __future__ import annotations

import io
import stat
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest
from image_cases import write_tar

from rtx.data.archives import Member, MemberStream, read_member, read_zip, tar_members, zip_members
from rtx.errors import UserError

LIMIT = 1 << 20


def names(path: Path, limit: int = LIMIT) -> dict[str, bytes]:
    return {member.name: read_member(member, file) for member, file in tar_members(path, limit)}


def refusal(call, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_members_of_a_tar_are_streams_in_its_own_order(tmp_path, name):
    members = {"b/2.txt": b"two", "b/1.txt": b"one" * 9000, "b/._1.txt": b"hidden", "c" * 300: b"", "a.txt": b"last"}
    path = write_tar(tmp_path / name, members)
    found = names(path)
    assert list(found) == ["b/2.txt", "b/1.txt", "c" * 300, "a.txt"]
    assert all(found[name] == members[name] for name in found)
    index = [member for member, _ in tar_members(path, LIMIT)]
    later = [member.name for member, _ in tar_members(path, LIMIT, index[2].offset)]
    assert later == ["c" * 300, "a.txt"]  # a long name has headers of its own before it


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x", "C:x", "\\x", "..\\x", "a/.."])
def test_names_that_lead_out_are_refused(tmp_path, name):
    said = refusal(names, write_tar(tmp_path / "a.tar", {"a": b"1", name: b"2"}))
    assert said.startswith(f"{tmp_path / 'a.tar'}: refused: member {name!r} leads out of the archive's folder")
    info = zipfile.ZipInfo("a")
    info.filename = name
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(info, b"2")
    said = refusal(zip_members, tmp_path / "a.zip", LIMIT)
    assert said.startswith(f"{tmp_path / 'a.zip'}: refused: member ") and "leads out" in said


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(tmp_path, kind):
    info = tarfile.TarInfo("link")
    info.type, info.linkname = kind, "/etc/passwd"
    assert "member 'link' is a link, a device" in refusal(names, write_tar(tmp_path / "a.tar", [info]))
    link = zipfile.ZipInfo("link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    assert "member 'link' is a link or a device" in refusal(zip_members, tmp_path / "a.zip", LIMIT)


def test_a_tar_that_is_cut_short_or_altered_is_refused(tmp_path):
    path = write_tar(tmp_path / "a.tar", {"a": b"1" * 600, "b": b"2" * 600})
    whole = path.read_bytes()
    for size in (0, 100, 700, 1536, 1600, 2300, 3072):
        path.write_bytes(whole[:size])
        assert str(path) in refusal(names, path), size
    path.write_bytes(whole[:1536] + b"\x07" + whole[1537:])  # the second header: tarfile would take it for the end
    assert "a damaged header at byte 1,536" in refusal(names, path)
    path.write_bytes(b"<html>not here</html>" * 100)
    assert "found a web page (HTML) of 2,100 bytes" in refusal(names, path)
    packed = write_tar(tmp_path / "a.tar.gz", {"a": bytes(range(256)) * 9})
    packed.write_bytes(packed.read_bytes()[:-30])
    assert "cut short or altered" in refusal(names, packed)
    packed.write_bytes(b"\x1f\x8b" + b"no gzip" * 20)
    assert "cut short or altered" in refusal(names, packed)


def test_a_tar_that_unpacks_to_more_than_it_may_is_refused_before_it_is_unpacked(tmp_path):
    path = write_tar(tmp_path / "bomb.tar.gz", {"a": b"", "b": bytes(LIMIT + 1)})
    assert path.stat().st_size < 10_000
    assert f"member 'b' makes it {LIMIT + 1:,} bytes unpacked" in refusal(names, path)
    info = tarfile.TarInfo("lie")
    info.size = LIMIT // 2
    header = tmp_path / "lie.tar"
    header.write_bytes(info.tobuf() + bytes(2048))
    assert "lie" in refusal(names, header)
    long = tarfile.TarInfo("././@LongLink")
    long.type, long.size = tarfile.GNUTYPE_LONGNAME, 1 << 40
    header.write_bytes(long.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    assert "asks for" in refusal(names, header)


def test_a_zip_is_read_in_chunks(tmp_path):
    content = {"a/x": b"x" * 3_000_000, "a/y": b""}
    path = write_zip(tmp_path / "a.zip", content)
    assert zip_members(path, 1 << 22) == {"a/x": 3_000_000, "a/y": 0}
    chunks = list(read_zip(path, "a/x", 1 << 22))
    assert b"".join(chunks) == content["a/x"] and max(map(len, chunks)) <= 1 << 20
    assert "member 'a/x' makes it 3,000,000 bytes unpacked" in refusal(zip_members, path, LIMIT)


@pytest.mark.parametrize("stated", [10, 999, 1001, 1 << 19])
def test_a_zip_that_lies_about_a_size_is_refused(tmp_path, stated):
    path = write_zip(tmp_path / "a.zip", {"a": b"\0" * 1000})
    raw = bytearray(path.read_bytes())
    central = raw.index(b"PK\x01\x02")
    raw[central + 24 : central + 28] = struct.pack("<I", stated)
    path.write_bytes(raw)
    assert f"{path}: " in (said := refusal(lambda: list(read_zip(path, "a", LIMIT)))) and "a" in said


def test_other_faults_of_a_zip(tmp_path):
    path = write_zip(tmp_path / "a.zip", {"a": b"1" * 1000})
    raw = bytearray(path.read_bytes())
    encrypted = bytearray(raw)
    encrypted[raw.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(encrypted)
    assert "member 'a' is encrypted" in refusal(zip_members, path, LIMIT)
    path.write_bytes(raw[: len(raw) // 2])
    assert "cut short or altered" in refusal(zip_members, path, LIMIT)
    altered = bytearray(raw)
    altered[35] ^= 0xFF
    path.write_bytes(altered)
    assert f"{path}: expected a whole archive with member a" in refusal(lambda: list(read_zip(path, "a", LIMIT)))
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", b"1")
        archive.writestr("a", b"2")
    assert "member 'a' is in it twice" in refusal(zip_members, path, LIMIT)
    assert "No such file" in refusal(zip_members, tmp_path / "none.zip", LIMIT)


def test_a_member_that_ends_early_is_refused(tmp_path):
    said = refusal(read_member, Member("a", 10, 0), MemberStream(tmp_path / "a.tar", "a", io.BytesIO(b"12345")))
    assert "member 'a' states 10 bytes and has 5" in said
