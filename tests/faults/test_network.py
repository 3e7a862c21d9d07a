"""A network that fails a command: downloads that break, lie or lead elsewhere, and a W&B that is down."""

import hashlib
import io
import shutil
import signal
import socket
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bad_servers import Answer, Server, ranged, redirect, refuse, send, serving, whole
from disturbances import environment
from small_runs import Process, Workshop, difference

TEXT = np.random.default_rng(0).integers(0, 256, 1_000_000, dtype=np.uint8).tobytes()


def archive() -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as file:
        file.writestr(zipfile.ZipInfo("enwik8"), TEXT)
    return held.getvalue()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Who a server on this machine says that it is, and its key, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("a server that answers by HTTPS needs a certificate, which openssl makes")
    path = tmp_path_factory.mktemp("certificate") / "localhost.pem"
    asked = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run(["openssl", *asked.split(), "-keyout", path, "-out", path], check=True, capture_output=True)
    return path


@pytest.fixture
def server(certificate: Path) -> Iterator[Server]:
    with serving(archive(), certificate) as running:
        yield running


class Prepared:
    """`rtx data prepare data=enwik8` against a server of ours: the benchmark is a hundredth of its size."""

    def __init__(self, workshop: Workshop, server: Server, certificate: Path, name: str) -> None:
        self.workshop, self.certificate = workshop, certificate
        self.run, self.root = workshop.folder / name, workshop.folder / f"{name}-data"
        self.inside = environment(SSL_CERT_FILE=str(certificate), RTX_DATA=str(self.root)) + (
            "from rtx.data import text; from rtx.data.files import Remote\n"
            f"text.ENWIK8 = Remote({server.address + '/enwik8.zip'!r}, {len(server.content)}, "
            f"{hashlib.sha256(server.content).hexdigest()!r})\n"
            f"text.ENWIK8_TEXT = ({len(TEXT)}, {hashlib.sha256(TEXT).hexdigest()!r})\n"
        )

    def begin(self) -> Process:
        return self.workshop.fork(self.run, "data", "prepare", "data=enwik8", inside=self.inside)

    def said(self, code: int) -> str:
        """Run the command, check its exit code, and return the last line."""
        process = self.begin()
        assert process.wait() == code, process.log.read_text()
        return process.log.read_text().splitlines()[-1]

    @property
    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.root.glob("enwik8-*/*.bin")}


def test_a_download_that_is_killed_is_continued(workshop: Workshop, server: Server, certificate: Path) -> None:
    server.answers = [whole]
    straight = Prepared(workshop, server, certificate, "straight")
    assert "fingerprint" in straight.said(code=0)
    assert sorted(straight.files) == ["test.bin", "train.bin", "valid.bin"]
    release = threading.Event()

    def hanging(handler: object) -> None:
        ranged(handler, 300_000)  # type: ignore[arg-type]
        release.wait(60)

    server.answers = [hanging, ranged]
    server.ranges.clear()
    killed = Prepared(workshop, server, certificate, "killed")
    process, part = killed.begin(), killed.root / "downloads" / "enwik8.zip.part"
    try:
        process.until(lambda run: part.exists() and part.stat().st_size > 100_000)
        process.send(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    finally:
        release.set()
    assert not (killed.root / "downloads" / "enwik8.zip").exists() and killed.files == {}
    killed.said(code=0)
    assert (server.ranges[1] or "").startswith("bytes=")
    assert killed.files == straight.files


OTHER = b"\0" * len(archive())


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("other", lambda handler: send(handler, 200, OTHER), ": expected sha256 "),
        ("plain", redirect("http://127.0.0.1:9/a.zip"), ": the server redirects to http://127.0.0.1:9/a.zip: "),
        ("file", redirect("file:///etc/passwd"), "file:///etc/passwd"),
    ],
)
def test_other_bytes_and_other_places_are_refused(
    workshop: Workshop, server: Server, certificate: Path, name: str, answer: Answer, said: str
) -> None:
    server.answers = [answer]
    prepared = Prepared(workshop, server, certificate, name)
    line = prepared.said(code=1)
    assert line.startswith(f"rtx: {server.address}/enwik8.zip") and said in line
    assert line.endswith("fetch it some other way and name it: data.path=<file or folder>")
    assert prepared.files == {} and not (prepared.root / "downloads" / "enwik8.zip").exists()


def test_a_server_whose_name_nobody_vouches_for(workshop: Workshop, server: Server, tmp_path: Path) -> None:
    server.answers = [whole]
    (tmp_path / "none.pem").touch()
    prepared = Prepared(workshop, server, tmp_path / "none.pem", "stranger")
    assert "certificate verify failed" in prepared.said(code=1)
    assert prepared.files == {}


def test_wandb_that_is_down_or_answers_errors_changes_no_bit(workshop: Workshop) -> None:
    alone = workshop.train("alone")
    with serving() as server, serving() as other, socket.socket() as free:
        server.answers, other.answers = [refuse(500)], [lambda handler: send(handler, 200, b"<html>")]
        free.bind(("127.0.0.1", 0))
        down = f"http://127.0.0.1:{free.getsockname()[1]}"
        addresses = {"down": down, "errors": server.address, "nonsense": other.address}
        processes = {}
        for name, address in addresses.items():
            inside = environment(WANDB_BASE_URL=address, WANDB_API_KEY="0" * 40, HOME=str(workshop.folder))
            inside += "import rtx.training.loggers; rtx.training.loggers.INIT_SECONDS = 4.0\n"
            processes[name] = workshop.start(name, "logger=auto", inside=inside)
        for name, process in processes.items():
            assert process.wait() == 0, process.log.read_text()
            said = process.log.read_text()
            assert "; going on with metrics.jsonl alone\n" in said and "Traceback" not in said, said
            assert difference(process.run, alone, ignoring=("logger",)) == "", name
        assert server.ranges and other.ranges
