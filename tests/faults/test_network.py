"""A network that fails a command.

Downloads break, lie or lead elsewhere; W&B is down, or somebody else's.
"""

import base64
import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.helpers.bad_servers import (
    CONTENT,
    NOBODY,
    Answer,
    Server,
    ranged,
    redirect,
    refuse,
    send,
    serving,
    silent,
    whole,
)
from tests.helpers.small_runs import SMALL_RUN, Process, Workshop, difference

with zipfile.ZipFile(held := io.BytesIO(), "w") as file:
    file.writestr("enwik8", CONTENT)
ARCHIVE = held.getvalue()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server that proves who it is: its certificate and its key stand in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("a server that answers by HTTPS needs a certificate, which openssl makes")
    path = tmp_path / "localhost.pem"
    asked = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        "-subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    subprocess.run(
        ["openssl", *asked.split(), "-keyout", path, "-out", path], check=True, capture_output=True
    )
    with serving(ARCHIVE, path) as running:
        yield running


def prepare(workshop: Workshop, server: Server, name: str, trusted: Path | None = None) -> Process:
    """Begin `rtx data prepare data=enwik8` against a server of ours; the benchmark is a hundredth
    of its size.
    """
    sha256 = [hashlib.sha256(content).hexdigest() for content in (ARCHIVE, CONTENT)]
    inside = (
        "from rtx.data import text; from rtx.data.download import Remote\n"
        f"text.ENWIK8 = Remote({server.address + '/enwik8.zip'!r}, {len(ARCHIVE)}, {sha256[0]!r})\n"
        f"text.ENWIK8_TEXT = ({len(CONTENT)}, {sha256[1]!r})\n"
    )
    root = workshop.folder / name
    words = ("data", "prepare", "data=enwik8")
    return workshop.fork(
        root,
        *words,
        inside=inside,
        SSL_CERT_FILE=str(trusted or server.certificate),
        RTX_DATA=str(root),
    )


def prepared(root: Path) -> list[bytes]:
    return [
        path.read_bytes()
        for split in ("train", "valid", "test")
        for path in root.glob(f"enwik8-*/{split}.bin")
    ]


def test_a_download_that_is_killed_is_continued(workshop: Workshop, server: Server) -> None:
    server.answers = [silent, ranged]
    process = prepare(workshop, server, "killed")
    part = process.run / "downloads" / "enwik8.zip.part"
    assert (
        process.kill_when(lambda run: part.exists() and part.stat().st_size > 100_000)
        == -signal.SIGKILL
    )
    assert not part.with_suffix("").exists() and prepared(process.run) == []
    process = prepare(workshop, server, "killed")
    assert process.wait() == 0, process.log.read_text()
    assert (server.ranges[1] or "").startswith("bytes=")
    assert b"".join(prepared(process.run)) == CONTENT and len(prepared(process.run)) == 3


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("other", lambda handler: send(handler, 200, bytes(len(ARCHIVE))), ": expected sha256 "),
        ("plain", redirect(f"{NOBODY}/a.zip"), f": the server redirects to {NOBODY}/a.zip: "),
        ("file", redirect("file:///etc/passwd"), "file:///etc/passwd"),
        ("stranger", whole, "certificate verify failed"),
    ],
)
def test_other_bytes_other_places_and_servers_whom_nobody_vouches_for_are_refused(
    workshop: Workshop, server: Server, tmp_path: Path, name: str, answer: Answer, said: str
) -> None:
    server.answers = [answer]
    (nobody := tmp_path / "none.pem").touch()
    process = prepare(workshop, server, name, trusted=nobody if name == "stranger" else None)
    assert process.wait() == 1
    line = process.log.read_text().splitlines()[-1]
    assert line.startswith(f"rtx: {server.address}/enwik8.zip") and said in line
    assert line.endswith("fetch it some other way and name it: data.path=<file or folder>")
    assert prepared(process.run) == [] and not (process.run / "downloads" / "enwik8.zip").exists()


def test_wandb_that_is_down_or_answers_errors_changes_no_bit(workshop: Workshop) -> None:
    alone = workshop.train("alone")
    with serving() as server, serving() as other:
        server.answers = [refuse(500)]
        other.answers = [lambda handler: send(handler, 200, b"<html>")]
        inside = "import rtx.training.loggers; rtx.training.loggers.INIT_SECONDS = 4.0"
        words = ("train", workshop.text, *SMALL_RUN, "logger=wandb")
        known = {"WANDB_API_KEY": "0" * 40, "HOME": str(workshop.folder)}
        processes = [
            workshop.fork(
                workshop.folder / name, *words, inside=inside, WANDB_BASE_URL=address, **known
            )
            for name, address in (
                ("down", NOBODY),
                ("errors", server.address),
                ("nonsense", other.address),
            )
        ]
        for process in processes:
            assert process.wait() == 0, process.log.read_text()
            said = process.log.read_text()
            assert "; going on with metrics.jsonl alone\n" in said and "Traceback" not in said, said
            assert difference(process.run, alone, ignoring=("logger",)) == "", process.run
        assert server.ranges and other.ranges


class Listener:
    """An address of this machine, and the first bytes of each connection to it, never answered."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self.socket.accept()
                with connection:
                    self.heard.append(connection.recv(4096))


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.socket.close()


KEY = "0123456789" * 4
AUTHORIZATION = f"Basic {base64.b64encode(f'api:{KEY}'.encode()).decode()}"
SERVER = "base_url = {address}"
PROXY = "http_proxy = {address}\nhttps_proxy = {address}"
WANDB_RUN = (*SMALL_RUN, "logger=wandb", "trainer.steps=2")
WANDB_COMMANDS = {
    "online": ("train", "TEXT", *WANDB_RUN, "logger.mode=online"),
    "auto": ("train", "TEXT", *WANDB_RUN),
    "eval": ("eval", ".", "limit=1"),
    "report": ("report", "."),
}
"""Commands that log to W&B in the folder of a run; TEXT is the data of the workshop."""


def foreign_run(run: Path, folder: Path, place: str, settings: str) -> Path:
    """Copy a run to a folder, and add a W&B record and W&B settings of another user."""
    copy = Path(shutil.copytree(run, folder / "run"))
    record = dict.fromkeys(("id", "project", "entity", "group", "name", "job_type"), "stranger")
    (copy / "wandb.json").write_text(json.dumps({**record, "tags": []}))
    (copy / place).parent.mkdir()
    (copy / place).write_text(f"[default]\n{settings}")
    return copy


def recording(keys: list[str | None]) -> Answer:
    """Return an answer that records the key of each request, and is 401."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        keys.append(handler.headers["Authorization"])
        refuse(401)(handler)

    return answer


@pytest.mark.parametrize(
    ("place", "names", "by"),
    [("wandb/settings", SERVER, "settings"), (".wandb/settings", PROXY, "variable")],
    ids=["server", "proxy"],
)
@pytest.mark.parametrize(
    "commands", [("auto", "report"), ("online", "eval")], ids=["report", "eval"]
)
def test_settings_of_the_current_folder_send_the_key_of_wandb_nowhere(
    workshop: Workshop,
    run: Path,
    tmp_path: Path,
    listener: Listener,
    place: str,
    names: str,
    by: str,
    commands: tuple[str, ...],
) -> None:
    """A stranger's run, which the user works in, names a server or a proxy.

    The server that the user has named gets the key.
    """
    settings = names.format(address=listener.address)
    variables = {"WANDB_API_KEY": KEY, "no_proxy": "*"}
    keys: dict[str, list[str | None]] = {name: [] for name in commands}
    processes = {}
    with contextlib.ExitStack() as servers:
        for name in commands:
            server = servers.enter_context(serving())
            server.answers = [recording(keys[name])]
            home = tmp_path / name / "home"
            of_user = home / ".config" / "wandb" / "settings"
            of_user.parent.mkdir(parents=True)
            if by == "variable":
                variables["WANDB_BASE_URL"] = server.address
            else:
                of_user.write_text(f"[default]\nbase_url = {server.address}\n")
            copy = foreign_run(run, tmp_path / name, place, settings)
            processes[name] = workshop.fork(
                tmp_path / f"{name}-{by}",
                *(workshop.text if word == "TEXT" else word for word in WANDB_COMMANDS[name]),
                inside=f"import os; os.chdir({str(copy)!r})",
                HOME=str(home),
                **variables,
            )
        for name, process in processes.items():
            assert process.wait() == 0, process.log.read_text()
            assert "W&B: " in process.log.read_text(), name
            assert keys[name] and set(keys[name]) == {AUTHORIZATION}, name
            unchanged = tmp_path / name / "run" / place
            assert unchanged.read_text() == f"[default]\n{settings}"
    assert listener.heard == []


def test_wandb_that_is_offline_in_the_current_folder_stays_so(
    workshop: Workshop, tmp_path: Path, listener: Listener
) -> None:
    (tmp_path / "wandb").mkdir()
    settings = tmp_path / "wandb" / "settings"
    settings.write_text("[default]\nmode = offline\n")  # as `wandb offline` writes it
    inside = f"import os; os.chdir({str(tmp_path)!r})"
    words = ("train", workshop.text, *WANDB_RUN)
    variables = {"WANDB_API_KEY": KEY, "HOME": str(tmp_path), "no_proxy": "*"}
    variables["WANDB_BASE_URL"] = listener.address
    process = workshop.fork(tmp_path / "at_home", *words, inside=inside, **variables)
    assert process.wait() == 0, process.log.read_text()
    assert [*(process.run / "wandb").glob("offline-run-*/*.wandb")] and listener.heard == []
    said = process.log.read_text()
    assert "W&B: mode = offline in wandb/settings; to upload the curves later:" in said


def test_nobody_waits_for_a_pipe_that_wandb_would_read_in_the_current_folder(
    workshop: Workshop, run: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "wandb").mkdir()
    for name in ("wandb/settings", "config-defaults.yaml"):
        os.mkfifo(copy / name)
    words = ("train", workshop.text, *WANDB_RUN, "logger.mode=offline")
    inside = f"import os; os.chdir({str(copy)!r})"
    process = workshop.fork(tmp_path / "piped", *words, inside=inside)
    assert process.wait() == 0, process.log.read_text()
    assert "W&B: " not in process.log.read_text()
    assert [*(process.run / "wandb").glob("offline-run-*/*.wandb")]
