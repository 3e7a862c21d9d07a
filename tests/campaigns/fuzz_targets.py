"""The readers that `tests/campaigns/fuzz.py` fuzzes: for each the first bytes and a function.

The files are those of a small run in outputs/rtx/run of the current folder, beside sweeps.jsonl;
its data are in data/, its exported model in export/. The functions raise only what no user may see.
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
from rtx.cli.commands import BY_NAME, find_command
from rtx.cli.request import read_request, startable, with_configuration
from rtx.commands.sweep import board
from rtx.data.store import RECORD, open_store, record_sha256
from rtx.data.tokenizers import learn_subwords, learn_words
from rtx.errors import RunFailed, UserError
from rtx.machine import out_of_memory
from rtx.report.contents import build
from rtx.report.formats import markdown
from rtx.report.run_records import collect
from rtx.runs.checksum import COMMENT_BYTES, TAG
from rtx.runs.resumption import already_done
from rtx.runs.status import read_status, run_state
from rtx.settings.compose import compose_data_checked
from rtx.settings.run_config import load_run_config
from rtx.settings.schema import GROUPS, all_fields
from rtx.sweeps.cells import lay_out
from rtx.training.inference import run_tokenizer
from tests.helpers.bad_lines import GOOD, VALUES

Read = Callable[[bytes], None]
Target = tuple[Sequence[bytes], Read]
"""First inputs, and the function that reads an input."""
RUN = Path("outputs", "rtx", "run").absolute()
TEXT = b"the cat sat on the mat and the dog ate the hat of the cat\n" * 60
# `plan` is not about a run, but as harmless.
ON_RUNS = ("eval", "audit", "analyze", "sample", "export", "resume", "plan")
JSON = (
    *("null", "true", "NaN", "-Infinity", "-1", "0", "1", "0.5", "2147483648", "9" * 400),
    *("{}", "[]", "[[1]]", '""', '"\\u001b[31m"', '"\\ud800"', '"../../x"', '"last"', '"running"'),
    *('"done"', '"bits"', '{"a": null}', "[1, 2]", '"7"'),
)
YAML = (
    *("&a ", "*a", "<<: *a", "? ", "- ", "!!python/name:os.system ", "|\n", "---\n", "...\n"),
    *("\u0085", "\t"),
)
TYPED = [
    word.encode(errors="surrogateescape")
    for word in (*JSON, *YAML, *VALUES, *GROUPS, *all_fields())
]
LONGEST_WORD = 64
"""Bytes of the longest word that libFuzzer accepts."""
WORDS = [word for word in TYPED if 0 < len(word) <= LONGEST_WORD]
"""What such files have, or must not have, for a fuzzer to insert."""


def mutated(
    content: bytes, longest: int, seed: int, by_bytes: Callable[[bytes, int], bytes]
) -> bytes:
    """Return other content of at most `longest` bytes.

    Where a line is JSON, mostly one of its values is removed or replaced; else its bytes change.
    """
    draw = random.Random(seed)
    lines = content.split(b"\n")
    index = draw.randrange(len(lines))
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(lines[index])
        lines[index] = json.dumps(mutated_json(value, draw)).encode()
        other = b"\n".join(lines)
        if len(other) <= longest and draw.random() < 0.7:
            return other
    return by_bytes(content, longest)


def mutated_json(value: Any, draw: random.Random) -> Any:
    """Return a JSON value with one inner value removed or replaced."""
    root: dict[str, Any] = {"": value}
    inner: Any = root
    key: Any = ""
    while isinstance(inner[key], dict | list) and inner[key] and draw.random() < 0.9:
        inner = inner[key]
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        key = draw.choice(keys)
    if inner is not root and draw.random() < 0.2:
        del inner[key]
    else:
        inner[key] = json.loads(draw.choice(JSON))
    return root[""]


def refusing(read: Read) -> Read:
    """Return a function that reads an input and ignores what users would read in one line."""

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
    if path.suffix == ".jsonl":
        return content
    return json.dumps(json.loads(content)).encode()


def configuration() -> Target:
    path = RUN / "config.yaml"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        reported = collect([RUN]).cells[0].config
        config = load_run_config(RUN)
        assert reported.get("seed", config.seed) == config.seed

    return [path.read_bytes()], read


def record(name: str) -> Target:
    path = RUN / name
    config = load_run_config(RUN)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        assert run_state(RUN)
        read_status(RUN)
        assert "\x1b" not in markdown(build(collect([RUN.parent]), ""))
        board(RUN.parent, width=100)
        already_done(RUN, config)

    return [one_line(path)], read


def checkpoint() -> Target:
    """Inputs are the pickle alone, which torch reads in Python."""
    path = RUN / "checkpoints" / "last.ckpt"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in members if name.endswith("/data.pkl"))

    def read(content: bytes) -> None:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.comment = bytes(COMMENT_BYTES)
            for name, part in {**members, pickled: content}.items():
                archive.writestr(name, part)
        whole = buffer.getvalue()[:-COMMENT_BYTES]
        path.write_bytes(whole + TAG + hashlib.sha256(whole).hexdigest().encode())
        load(RUN, "last", "cpu").tokenizer  # noqa: B018

    return [members[pickled]], read


def export() -> Target:
    path = Path("export", "export.json").absolute()

    def read(content: bytes) -> None:
        path.write_bytes(content)
        load(path.parent, device="cpu").tokenizer  # noqa: B018

    return [one_line(path)], read


def store() -> Target:
    """Inputs are records, which get the right checksum."""
    path = next(Path("data").absolute().glob(f"text-*/{RECORD}"))

    def read(content: bytes) -> None:
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            values = json.loads(content)
            content = json.dumps({**values, "sha256": record_sha256(values)}).encode()
        path.write_bytes(content)
        open_store(path.parent, "data=text").describe()

    return [one_line(path)], read


def tokenizer() -> Target:
    """Inputs are a line with the description of a tokenizer, and its file."""
    tokenizers = [
        learn_words([TEXT], "", lambda line: None),
        learn_subwords([TEXT], 300, 10_000, "", lambda line: None),
    ]
    inputs = [json.dumps(each.describe()).encode() + b"\n" + each.content for each in tokenizers]

    def read(content: bytes) -> None:
        head, _, file = content.partition(b"\n")
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            described = {**json.loads(head), "sha256": hashlib.sha256(file).hexdigest()}
            for each in tokenizers:
                Path(each.file).write_bytes(file)
            loaded = run_tokenizer(Path(), described)
            loaded.decode(loaded.encode(b"a word  \xff\n of text").tolist())

    return inputs, read


def line() -> Target:
    """Inputs have a word of a command line on each line; `train` is a sweep."""

    def read(content: bytes) -> None:
        command, *words = content.decode(errors="surrogateescape").replace("\0", "").split("\n")
        if command == "train":
            lay_out(read_request(BY_NAME["train -m"], words).overrides)
        elif command == "data":
            compose_data_checked(read_request(BY_NAME["data"], words[1:]).overrides)
        elif command in ON_RUNS:
            known, rest = find_command(command, words, sweep=False)
            startable(with_configuration(read_request(known, rest)))

    inputs = []
    for words in GOOD:
        inputs.append("\n".join(word for word in words if word[0] != "-").encode())
    return inputs, read


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
