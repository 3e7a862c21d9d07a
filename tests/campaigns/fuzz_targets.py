"""The readers that `tests/campaigns/fuzz.py` fuzzes: for each the first bytes and a function.

They are those of a small run in outputs/rtx/run of the current folder, beside sweeps.jsonl; its data are in data/, and
export/ has its model. The functions raise only what no user may see.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import random
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rtx import load
from rtx.cli.main import check_first
from rtx.cli.options import read_words
from rtx.commands.sweep import board
from rtx.data.store import RECORD, open_store, record_sha256
from rtx.data.tokenizers import learn_subwords, learn_words
from rtx.errors import RunFailed, UserError
from rtx.machine import out_of_memory
from rtx.report.contents import build, markdown
from rtx.report.run_records import collect
from rtx.runs.checksum import COMMENT_BYTES, TAG
from rtx.runs.resumption import already_done
from rtx.runs.status import read_status, run_state
from rtx.settings.compose import compose_data
from rtx.settings.overrides import check_overrides
from rtx.settings.run_config import load_run_config
from rtx.settings.schema import GROUPS, all_fields
from rtx.sweeps.cells import lay_out
from rtx.training.inference import run_tokenizer
from tests.helpers.bad_lines import GOOD, VALUES

Read = Callable[[bytes], None]
RUN = Path("outputs", "rtx", "run").absolute()
TEXT = b"the cat sat on the mat and the dog ate the hat of the cat\n" * 60
ON_RUNS = (
    "eval",
    "audit",
    "analyze",
    "sample",
    "export",
    "resume",
    "plan",
)  # `plan` is on none, and as harmless
JSON = (
    "null",
    "true",
    "NaN",
    "-Infinity",
    "-1",
    "0",
    "1",
    "0.5",
    "2147483648",
    "9" * 400,
    "{}",
    "[]",
    "[[1]]",
    '""',
)
JSON += (
    '"\\u001b[31m"',
    '"\\ud800"',
    '"../../x"',
    '"last"',
    '"running"',
    '"done"',
    '"bits"',
    '{"a": null}',
    "[1, 2]",
    '"7"',
)
YAML = (
    "&a ",
    "*a",
    "<<: *a",
    "? ",
    "- ",
    "!!python/name:os.system ",
    "|\n",
    "---\n",
    "...\n",
    "\u0085",
    "\t",
)
TYPED = [
    word.encode(errors="surrogateescape")
    for word in (*JSON, *YAML, *VALUES, *GROUPS, *all_fields())
]
WORDS = [word for word in TYPED if 0 < len(word) <= 64]  # libFuzzer takes no longer ones
"""What stands in such files, or in none of them, for a fuzzer to put there."""


def mutated(
    content: bytes, longest: int, seed: int, by_bytes: Callable[[bytes, int], bytes]
) -> bytes:
    """Return other content: where a line of it is JSON mostly with one value less or another, else by its bytes."""
    draw, lines = random.Random(seed), content.split(b"\n")
    at = draw.randrange(len(lines))
    with contextlib.suppress(ValueError, RecursionError):
        changed: dict[str, Any] = {"": json.loads(lines[at])}
        inner: Any = changed
        key: Any = ""
        while isinstance(inner[key], dict | list) and inner[key] and draw.random() < 0.9:
            inner = inner[key]
            key = draw.choice([*(inner if isinstance(inner, dict) else range(len(inner)))])
        if inner is not changed and draw.random() < 0.2:
            del inner[key]
        else:
            inner[key] = json.loads(draw.choice(JSON))
        lines[at] = json.dumps(changed[""]).encode()
        if len(made := b"\n".join(lines)) <= longest and draw.random() < 0.7:
            return made
    return by_bytes(content, longest)


def refusing(read: Read) -> Read:
    """Return a function that reads, and passes over what users are told in a line."""

    @functools.wraps(read)
    def read_or_refuse(content: bytes) -> None:
        try:
            read(content)
        except (UserError, RunFailed):
            pass
        except Exception as error:
            if not out_of_memory(error):
                Path("found").write_bytes(content)
                raise

    return read_or_refuse


def one_line(path: Path) -> bytes:
    """Return the content of a file of JSON, an object on one line."""
    content = path.read_bytes()
    return content if path.suffix == ".jsonl" else json.dumps(json.loads(content)).encode()


def configuration() -> tuple[Sequence[bytes], Read]:
    path = RUN / "config.yaml"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        found = collect([RUN]).cells[0].config
        config = load_run_config(RUN)
        assert found.get("seed", config.seed) == config.seed

    return [path.read_bytes()], read


def record(name: str) -> tuple[Sequence[bytes], Read]:
    path, config = RUN / name, load_run_config(RUN)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        assert run_state(RUN) and (read_status(RUN) or True)
        assert "\x1b" not in markdown(build(collect([RUN.parent]), ""))
        board(RUN.parent, width=100)
        already_done(RUN, config)

    return [one_line(path)], read


def checkpoint() -> tuple[Sequence[bytes], Read]:
    """Of the file's parts the pickle alone, which torch reads in Python."""
    path = RUN / "checkpoints" / "last.ckpt"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in members if name.endswith("/data.pkl"))

    def read(content: bytes) -> None:
        with zipfile.ZipFile(made := io.BytesIO(), "w") as archive:
            archive.comment = bytes(COMMENT_BYTES)
            for name, part in {**members, pickled: content}.items():
                archive.writestr(name, part)
        whole = made.getvalue()[:-COMMENT_BYTES]
        path.write_bytes(whole + TAG + hashlib.sha256(whole).hexdigest().encode())
        load(RUN, "last", "cpu").tokenizer  # noqa: B018

    return [members[pickled]], read


def export() -> tuple[Sequence[bytes], Read]:
    path = Path("export", "export.json").absolute()

    def read(content: bytes) -> None:
        path.write_bytes(content)
        load(path.parent, device="cpu").tokenizer  # noqa: B018

    return [one_line(path)], read


def store() -> tuple[Sequence[bytes], Read]:
    """With the right checksum of whatever the record says."""
    path = next(Path("data").absolute().glob(f"text-*/{RECORD}"))

    def read(content: bytes) -> None:
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            said = json.loads(content)
            content = json.dumps({**said, "sha256": record_sha256(said)}).encode()
        path.write_bytes(content)
        open_store(path.parent, "data=text").describe()

    return [one_line(path)], read


def tokenizer() -> tuple[Sequence[bytes], Read]:
    """A line of what is said of it, and its file."""
    known = [
        learn_words([TEXT], "", lambda line: None),
        learn_subwords([TEXT], 300, 10_000, "", lambda line: None),
    ]

    def read(content: bytes) -> None:
        head, _, learned = content.partition(b"\n")
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            said = {**json.loads(head), "sha256": hashlib.sha256(learned).hexdigest()}
            for each in known:
                Path(each.file).write_bytes(learned)
            found = run_tokenizer(Path(), said)
            found.decode(found.encode(b"a word  \xff\n of text").tolist())

    return [json.dumps(each.describe()).encode() + b"\n" + each.content for each in known], read


def line() -> tuple[Sequence[bytes], Read]:
    """A word of a command line on each line; that of `train` as a sweep of one cell or several."""

    def read(content: bytes) -> None:
        command, *words = content.decode(errors="surrogateescape").replace("\0", "").split("\n")
        if command == "train":
            lay_out(check_overrides(read_words("train -m", words).overrides, sweep=True))
        elif command == "data":
            compose_data(read_words("data", words[1:]).overrides)
        elif command in ON_RUNS:
            check_first(command, words)

    return ["\n".join(word for word in words if word[0] != "-").encode() for words in GOOD], read


TARGETS = {
    "config.yaml": configuration,
    "status.json": functools.partial(record, "status.json"),
    "metrics.jsonl": functools.partial(record, "metrics.jsonl"),
    "checkpoint": checkpoint,
    "export": export,
    "tokenizer": tokenizer,
    "command line": line,
    "store": store,
    "environment.json": functools.partial(record, "environment.json"),
    "eval": functools.partial(record, "eval/a.json"),
    "sweeps.jsonl": functools.partial(record, "../sweeps.jsonl"),
}
