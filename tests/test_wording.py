"""Text on its way to a terminal."""

from __future__ import annotations

from rtx.wording import TextStream, printable


def test_control_characters_never_reach_a_terminal() -> None:
    assert printable("a\x1b[31mb\x07\r") == "a\ufffd[31mb\ufffd\ufffd"
    assert printable("line\n\tindented é 漢") == "line\n\tindented é 漢"


def test_utf8_is_decoded_as_its_bytes_come() -> None:
    stream = TextStream()
    pieces = [stream.feed(bytes([byte])) for byte in "é漢".encode()]
    assert pieces == ["", "é", "", "", "漢"]


def test_broken_utf8_is_replaced() -> None:
    stream = TextStream()
    assert stream.feed(b"a\xff") + stream.feed(b"\xc3", final=True) == "a\ufffd\ufffd"
