"""Servers that behave badly on purpose, all on 127.0.0.1, and the answers they give."""

import contextlib
import hashlib
import http.server
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rtx.data.download import Remote

CONTENT = np.random.default_rng(1).integers(0, 256, 1_000_000, dtype=np.uint8).tobytes()

NOBODY = "http://127.0.0.1:1"
"""An address where nobody listens."""

Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


@dataclass
class Server:
    """A server whose answer to its n-th request is the n-th of `answers`, the last one for ever."""

    address: str
    content: bytes
    certificate: Path | None
    answers: list[Answer] = field(default_factory=list)
    ranges: list[str | None] = field(default_factory=list)  # which one each request has asked for

    @property
    def remote(self) -> Remote:
        return Remote(
            f"{self.address}/file.zip", len(self.content), hashlib.sha256(self.content).hexdigest()
        )


@contextlib.contextmanager
def serving(content: bytes = CONTENT, certificate: Path | None = None) -> Iterator[Server]:
    """Run a server of one file on localhost; with a `certificate` (with its key) by HTTPS."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.ranges.append(self.headers["Range"])
            answer = state.answers.pop(0) if len(state.answers) > 1 else state.answers[0]
            with contextlib.suppress(ConnectionError):  # the other side was killed
                answer(self)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            running.socket = context.wrap_socket(running.socket, server_side=True)
        where = "https://localhost" if certificate else "http://127.0.0.1"
        state = Server(f"{where}:{running.server_port}", content, certificate)
        running.content = content  # type: ignore[attr-defined]
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield state
        finally:
            running.shutdown()
            thread.join()


def send(
    handler: http.server.BaseHTTPRequestHandler, status: int, body: bytes, **headers: str | int
) -> None:
    handler.send_response(status)
    for name, value in ({"Content_Length": len(body)} | headers).items():
        handler.send_header(name.replace("_", "-"), str(value))
    handler.end_headers()
    handler.wfile.write(body)


def whole(handler: http.server.BaseHTTPRequestHandler) -> None:
    send(handler, 200, handler.server.content)  # type: ignore[attr-defined]


def ranged(handler: http.server.BaseHTTPRequestHandler, limit: int | None = None) -> None:
    """Answer a Range request as it should be answered, then end after `limit` bytes."""
    content: bytes = handler.server.content  # type: ignore[attr-defined]
    first = int((handler.headers["Range"] or "bytes=0-").removeprefix("bytes=").rstrip("-"))
    span = f"bytes {first}-{len(content) - 1}/{len(content)}"
    status = 206 if handler.headers["Range"] else 200
    rest = content[first:]
    send(handler, status, rest[:limit], Content_Length=len(rest), Content_Range=span)


def broken(handler: http.server.BaseHTTPRequestHandler) -> None:
    ranged(handler, 250_000)


def silent(handler: http.server.BaseHTTPRequestHandler) -> None:
    broken(handler)
    handler.wfile.flush()
    threading.Event().wait(600)


def refuse(status: int) -> Answer:
    return lambda handler: send(handler, status, b"<html>no</html>", Content_Type="text/html")


def redirect(target: str) -> Answer:
    return lambda handler: send(handler, 302, b"", Location=target)
