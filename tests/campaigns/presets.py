"""Prove every preset of conf/model and conf/experiment with all commands, made small.

Run `make presets`, or `python -m tests.campaigns.presets --only model/tiny experiment/pg19` for a
few. It writes `benchmarks/results/presets-cpu.json`, each row when it is finished (rows of other
presets stay), and at the end `docs/results/presets.md`. It needs the test tools
(pip install -e '.[dev]') and no network.

A preset runs as its header says (of an experiment with axes the first cell), by the commands of
`rtx`, with fewer layers and heads, a width of 64 and two sequences a step. Its patterns, windows,
clusters, positions, norms, dropouts, embedding, optimizer and sequence length N stay, except that N
is divided (with clusters and memories) until a step is short and fits 8 GiB, and that learning rate
and warm-up suit 20 steps. Data are small files in the published layouts, made here: text of
Python's standard library, and drawn images. The plan is that of the unchanged preset.

A run of 20 steps must lower its training loss. The same run, stopped by SIGTERM at step 10 and
resumed, must log the same bits at every step. It is scored on two windows as the header says,
writes a sample, is exported, and the export must have the same score. A failure is printed with its
step and reason, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import itertools
import json
import math
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rtx.commands.train
from benchmarks.ending import end_with_children
from benchmarks.machine import code, machine
from rtx.analysis.cost import cost
from rtx.analysis.micro_batch import choose_micro_batch
from rtx.cli.main import main as rtx_main
from rtx.data import images, sets, text
from rtx.errors import UserError
from rtx.settings.compose import compose
from rtx.settings.data_sets import IMAGE_SETS, MADE
from rtx.settings.identity import config_hash
from rtx.settings.overrides import check_overrides
from rtx.settings.presets import conf_dir, options
from rtx.settings.schema import CLUSTERED, Config
from rtx.sweeps.cells import lay_out
from rtx.training import module
from tests.helpers.made_sets import (
    encoded,
    kernel_tarball,
    kernel_tree,
    publish_enwik8,
    publish_wikitext,
    remote,
    write_images,
    write_tar,
)

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "presets-cpu.json"
PAGE = ROOT / "docs" / "results" / "presets.md"
STEPS = 20
STOP = 10
LAYERS = 2
HEADS = 2
WIDTH = 64
MEMORY = 8 * 2**30
"""Bytes that a step may take."""
SECONDS = 900
"""Time that one preset may take."""
MOST_PAIRS = {"fast": 3e7, "soft": 8e6, "hashed": 5e5}
"""Pairs that the heads of a step may read: by torch's kernels, our softmax, rounds of hashing."""
CUTOFFS = ("200", "800", "2000")
WORD_TYPES = 3_000
SCORED_TOKENS = 1_024
"""Stride of the score of a model with a memory."""
GIB = {"GiB": 1, "MiB": 2**-10, "KiB": 2**-20}

Row = dict[str, Any]
TOOK: dict[str, float] = {}
"""Seconds that each command has taken in this process."""


class Failed(Exception):
    """A preset does not do what it must; the message has the step and the reason."""


def make_data(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Write small files in the layouts of all data sets of presets; return options for them."""
    modules = [path.read_bytes() for path in text.library_files()[:400]]
    (folder / "book.txt").write_bytes(b"".join(modules[:60])[:1_000_000])
    publish_enwik8(folder / "enwik8.zip", b"".join(modules)[:2_000_000], patch)
    words = b"".join(modules).decode(errors="replace")
    publish_wikitext(patch, articles(folder / "wikitext", words))
    write_pg19(folder / "pg19", modules, patch)
    for split, count in (("train", 40), ("test", 6)):
        rows: list[bytes | None] = [encoded(picture(32, number)) for number in range(count)]
        write_images(folder / "cifar10" / f"{split}-00000-of-00001.parquet", rows)
    pictures(folder / "imagenet64", patch)
    sources = {f"fs/module{number}.c": module for number, module in enumerate(modules)}
    kernel = kernel_tarball(folder / "linux-6.1.tar.xz", kernel_tree() | sources)
    held_out = "data.held_out=4"
    overrides: dict[str, list[str]] = {name: [] for name in ("stdlib", *MADE)}
    return overrides | {
        "text": [f"data.path={folder / 'book.txt'}"],
        "kernel": [f"data.path={kernel}"],
        "enwik8": [f"data.path={folder / 'enwik8.zip'}"],
        "wikitext103": [f"data.path={folder / 'wikitext'}"],
        "pg19": [f"data.path={folder / 'pg19'}", "data.vocabulary=1000"],
        "cifar10": [f"data.path={folder / 'cifar10'}", held_out],
        "imagenet64": [f"data.path={folder / 'imagenet64'}", held_out],
    }


def write_pg19(folder: Path, modules: list[bytes], patch: pytest.MonkeyPatch) -> None:
    """Write modules as books, and let the published counts be theirs."""
    counts = books(folder, modules)
    patch.setattr(text, "PG19_BOOKS", {split: number for split, (number, _) in counts.items()})
    for split, (_, words) in counts.items():
        patch.setitem(sets.WORDS["pg19"], split, words)


def articles(folder: Path, source: str) -> dict[str, bytes]:
    """Write Wikitext's files with words of a text, rare ones as <unk>; return them by split."""
    words = re.findall(r"\w+|[^\w\s]", source)[:300_000]
    frequent = {word for word, _ in Counter(words).most_common(WORD_TYPES)}
    words = [word if word in frequent else "<unk>" for word in words]
    folder.mkdir()
    bounds = {"train": (0, 240_000), "valid": (240_000, 270_000), "test": (270_000, 300_000)}
    texts = {}
    for split, (start, stop) in bounds.items():
        lines = []
        for first in range(start, stop, 20):
            lines.append(f" {' '.join(words[first : first + 20])} \n")
        texts[split] = "".join(lines).encode()
        (folder / f"wiki.{split}.tokens").write_bytes(texts[split])
    return texts


def books(folder: Path, modules: list[bytes]) -> dict[str, tuple[int, int]]:
    """Write modules as folders of books; return the number of books and words of each split."""
    bounds = {"train": (0, 60), "valid": (60, 75), "test": (75, 90)}
    counts = {}
    for split, (start, stop) in bounds.items():
        inner = folder / ("validation" if split == "valid" else split)
        inner.mkdir(parents=True)
        words = 0
        for number, content in enumerate(modules[start:stop]):
            book = content[:60_000]
            (inner / f"{number}.txt").write_bytes(book)
            words += len(book.split())
        counts[split] = (stop - start, words)
    return counts


def picture(side: int, seed: int) -> np.ndarray:
    """Return an image of smooth colours with a little noise: uint8 `[side, side, 3]`."""
    draw = np.random.default_rng(seed)
    row, column = np.mgrid[:side, :side][..., None] / side
    slopes = draw.uniform(-90, 90, (3, 3))
    smooth = 128 + slopes[0] * (row - 0.5) + slopes[1] * (column - 0.5) + 0.3 * slopes[2]
    return (smooth + draw.normal(0, 4, smooth.shape)).clip(0, 255).astype(np.uint8)


def pictures(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Write ImageNet's two tars with a few images, and let these be the published ones."""
    folder.mkdir()
    counts = {"train": 24, "valid": 4}
    published = {}
    for split, count in counts.items():
        members = {f"{split}_64x64/{n}.png": encoded(picture(64, n)) for n in range(count)}
        published[split] = remote(write_tar(folder / f"{split}_64x64.tar", members))
    patch.setattr(images, "IMAGENET64", published)
    patch.setitem(images.PUBLISHED, "imagenet64", counts)


def header(group: str, name: str) -> str:
    """Return the comment at the top of a preset as one line."""
    lines = (conf_dir() / group / f"{name}.yaml").read_text().splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.lstrip("# ") for line in comment)


def overrides_in(comment: str, command: str) -> list[str]:
    """Return the overrides after the first mention of a command in a comment."""
    plain = re.sub(r"<[^>]*>", "-", comment)
    match = re.search(rf"rtx (?:{command})\b([^;]*)", plain)
    words = match[1].split() if match else []
    if command == "eval":
        # The first word is the run.
        words = words[1:]
    return list(itertools.takewhile(lambda word: "=" in word, words))


def presets() -> dict[str, list[str]]:
    """Return the overrides of every preset, by `<group>/<name>`."""
    overrides = {}
    for name in options("model"):
        overrides[f"model/{name}"] = model_overrides(name)
    for name in options("experiment"):
        cells = lay_out(check_overrides([f"experiment={name}"], sweep=True))
        overrides[f"experiment/{name}"] = list(cells[0].overrides)
    for name in options("heads"):
        words = overrides_in(header("heads", name), "train")
        overrides[f"heads/{name}"] = [word for word in words if not word.startswith("data.path=")]
    return overrides


def model_overrides(name: str) -> list[str]:
    """Return the overrides with which the header of a model preset trains it."""
    comment = header("model", name)
    words = overrides_in(comment, "train|plan")
    images_of = re.search("cifar10|imagenet64", comment)
    if images_of and not any(word.startswith("data=") for word in words):
        words.append(f"data={images_of[0]}")
    if f"model={name}" not in words:
        words.insert(0, f"model={name}")
    return words


def reduced(config: Config, part: int) -> list[str]:
    """Return overrides that make a preset small, with a sequence that is `part` times shorter."""
    length = config.data.length // part
    side = 0
    if config.data.name in IMAGE_SETS:
        side = math.isqrt(config.data.length // 3 // part)
        length = 3 * side**2
    values: Row = {}
    if side and part > 1:
        values["data.size"] = side
    else:
        values["data.length"] = length
    values |= reduced_model(config, part, length, side)
    values |= reduced_routing(config, part, length)
    values["optimizer.warmup"] = 3
    if config.optimizer.name != "adafactor":
        values["optimizer.lr"] = 3e-3
    if config.trainer.micro_batch_size != "auto":
        values["trainer.micro_batch_size"] = 1
    values |= {
        "trainer.steps": STEPS,
        "trainer.batch_size": 2,
        "trainer.log_every": 1,
        "trainer.val_every": STEPS,
        "trainer.checkpoint_every": STOP,
        "trainer.val_windows": 1,
        "trainer.final_windows": 1,
        "hardware": "cpu",
        "hardware.threads": 1,
        "logger": "jsonl",
        "data.processes": 1,
    }
    return [f"{key}={value}" for key, value in values.items()]


def reduced_model(config: Config, part: int, length: int, side: int) -> Row:
    """Return the keys of group model of a small preset; `side`: of an image, else 0."""
    model = config.model
    values: Row = {
        "model.layers": min(model.layers, LAYERS),
        "model.heads": min(model.heads, HEADS),
        "model.hidden": WIDTH,
        "model.ffn_hidden": 2 * WIDTH,
    }
    if model.window > length:
        values["model.window"] = length
    if isinstance(model.embedding, int):
        values["model.embedding"] = WIDTH // 2
    if model.cutoffs:
        count = model.cutoffs.count("x") + 1
        values["model.cutoffs"] = "x".join(CUTOFFS[:count])
    if model.axes and side:
        values["model.axes"] = f"{side}x{side}x3"
    elif model.axes:
        first, *rest = model.axes.split("x")
        values["model.axes"] = "x".join([str(int(first) // part), *rest])
    for key in ("memory", "compressed"):
        if getattr(model, key):
            values[f"model.{key}"] = getattr(model, key) // part
    if "lsh" in model.base.split("+") and model.hash_buckets:
        values["model.hash_buckets"] = max(2, model.hash_buckets // part // 2 * 2)
    return values


def reduced_routing(config: Config, part: int, length: int) -> Row:
    """Return the keys of group routing of a small preset."""
    routing = config.routing
    model = config.model
    if not (routing.heads and routing.layers):
        return {}
    layers = min(model.layers, LAYERS)
    heads = min(model.heads, HEADS)
    values: Row = {
        "routing.heads": max(1, routing.heads * heads // model.heads),
        "routing.layers": layers if routing.layers == model.layers else 1,
        "routing.window": min(routing.window, length),
    }
    if routing.selection in CLUSTERED:
        values["routing.clusters"] = max(1, (routing.clusters or 1) // part)
    if routing.warmup:
        values["routing.warmup"] = STEPS // 4
    return values


def made_small(words: list[str]) -> tuple[list[str], Config]:
    """Return the overrides of a small preset: the longest sequence that time and memory allow."""
    whole = compose(words)
    parts = (1, 4, 16, 64) if whole.data.name in IMAGE_SETS else (1, 2, 4, 8, 16, 32)
    for part in parts:
        small = [*words, *reduced(whole, part)]
        config = compose(small)
        is_fast = pairs_read(config) <= MOST_PAIRS[speed(config)]
        if is_fast and choose_micro_batch(config, WORD_TYPES, MEMORY).fits:
            return small, config
    raise Failed(f"no sequence is short enough for {MOST_PAIRS} pairs and 8 GiB")


def pairs_read(config: Config) -> float:
    """Return how many pairs of positions the heads of a step read."""
    model = config.model
    operations = config.trainer.batch_size * cost(config, WORD_TYPES).attention
    return operations / (4 * model.hidden / model.heads)


def speed(config: Config) -> str:
    """Return which of MOST_PAIRS holds for the heads of a model."""
    model = config.model
    if model.base == "lsh":
        return "hashed"
    has_own_softmax = model.positions in ("shaw", "xl") or model.attention_dropout
    if has_own_softmax or model.base in ("fixed", "adaptive_span"):
        return "soft"
    return "fast"


def command(*words: str, code: int = 0, run: Path | None = None) -> str:
    """Run a command of rtx in this process; return its output; Failed for another exit code."""
    os.environ["RTX_RUN"] = str(run or "")
    out = io.StringIO()
    err = io.StringIO()
    began = time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        actual = rtx_main(words)
    TOOK[words[0]] = round(TOOK.get(words[0], 0.0) + time.monotonic() - began, 1)
    if actual != code:
        output = err.getvalue().strip() or out.getvalue().strip()
        last = " / ".join(output.splitlines()[-3:])
        raise Failed(f"rtx {words[0]}: exit code {actual}, not {code}: {last}")
    return out.getvalue() + err.getvalue()


def prove(name: str, words: list[str], data: dict[str, list[str]], folder: Path) -> Row:
    """Run a preset with all commands and return its row; Failed where it does not do as it must."""
    row = planned(words)
    small, config = made_small([*words, *data[compose(words).data.name]])
    row |= {"N": config.data.length, "data": config.data.name, "heads": config.model.base}
    whole = folder / "whole"
    bits = train(small, whole)
    row["first_bits"] = bits[1]
    row["last_bits"] = sum(bits[step] for step in range(STEPS - 2, STEPS + 1)) / 3
    if not row["last_bits"] < row["first_bits"]:
        raise Failed(f"rtx train: the loss does not fall: {bits}")
    check_resume(small, folder / "stopped", bits)
    options = score_options(overrides_in(header(*name.split("/", 1)), "eval"), config)
    row["scored_bits"] = scored(whole, options)
    sample(whole, config)
    command("export", str(whole), f"output={folder / 'export'}")
    exported = scored(folder / "export", options)
    if exported != row["scored_bits"]:
        raise Failed(f"rtx export: the export scores {exported}, the run {row['scored_bits']} bits")
    return row | {"scored_as": " ".join(options), "overrides": " ".join(words)}


def train(words: list[str], run: Path) -> dict[int, float]:
    """Train a run to its end, and return its training losses."""
    command("train", *words, run=run)
    return training_bits(run)


def check_resume(words: list[str], run: Path, bits: dict[int, float]) -> None:
    """Stop a run in the middle and resume it; Failed where a step has other bits."""
    with stop_at(STOP):
        command("train", *words, code=143, run=run)
    saved = max(training_bits(run))
    if saved != STOP:
        raise Failed(f"rtx train: stopped at step {saved}, not {STOP}")
    command("resume", str(run))
    resumed = training_bits(run)
    for step in range(1, STEPS + 1):
        if bits[step] != resumed.get(step):
            difference = f"{resumed.get(step)} bits, not {bits[step]} as without a stop"
            raise Failed(f"rtx resume: step {step} has {difference}")


def planned(words: list[str]) -> Row:
    """Return the parameters and the memory of a device that `rtx plan` prints for a preset."""
    output = " ".join(command("plan", *words).split())
    match = re.search(r"parameters ([\d,]+) .* memory about ([\d.]+) ([GMK]iB)", output)
    if not match:
        raise Failed(f"rtx plan: parameters or memory are missing: {output}")
    return {
        "own_N": compose(words).data.length,
        "parameters": int(match[1].replace(",", "")),
        "planned_gib": round(float(match[2]) * GIB[match[3]], 4),
    }


def training_bits(run: Path) -> dict[int, float]:
    """Return the training loss of every step in bits; of a step logged twice the last one."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["train/bits"] for row in rows if "train/bits" in row}


@contextlib.contextmanager
def stop_at(step: int) -> Iterator[None]:
    """Send this process SIGTERM in a training step, as a scheduler may."""
    original = module.after_step
    steps = itertools.count(1)

    def stopping(*arguments: Any) -> None:
        original(*arguments)
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "after_step", stopping)
        yield


def score_options(words: list[str], config: Config) -> list[str]:
    """Return the options of `rtx eval`: those of the header, for two windows."""
    options = [*words, "limit=2"]
    has_stride = any(word.startswith("stride=") for word in words)
    if config.model.memory and not has_stride:
        options.append(f"stride={SCORED_TOKENS}")
    return options


def scored(run: Path, options: list[str]) -> float:
    """Return the score of a run or an export in bits a token, of all lengths together."""
    command("eval", str(run), *options)
    results = [json.loads(path.read_text()) for path in run.glob("eval/*.json")]
    nats = sum(result["nats"] for result in results)
    units = sum(result["units"] for result in results)
    return nats / units / math.log(2)


def sample(run: Path, config: Config) -> None:
    """Let a run write a sample, which it must refuse where its data have no text."""
    if config.data.name in MADE:
        command("sample", str(run), code=2)
        return
    before = set(run.glob("samples/*"))
    command("sample", str(run), "length=16", "top_k=9", "seed=1")
    if not set(run.glob("samples/*")) - before:
        raise Failed("rtx sample: no file was written")


def in_child(name: str, work: Callable[[], Row], result: Path) -> int:
    """Start `work` in a child process, which writes its row or a failure; return its number."""
    sys.stdout.flush()
    number = os.fork()
    if number:
        return number
    # The child must not run the parent's handler.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.alarm(SECONDS)
    began = time.monotonic()
    row: Row = {"what": "preset", "preset": name}
    try:
        row |= work()
    except Failed as failed:
        row["failed"] = str(failed)
    except BaseException as error:
        row["failed"] = f"{type(error).__name__}: {error}"
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row["seconds_of"] = TOOK
    row["seconds"] = round(time.monotonic() - began, 1)
    row["peak_gib"] = round(peak_bytes / 2**30, 2)
    result.write_text(json.dumps(row))
    os._exit(0)


def setting(words: list[str]) -> str:
    """Return what presets share that are the same run; the reason for overrides that are wrong."""
    try:
        return config_hash(compose(words))
    except UserError as error:
        return str(error)


def first_names(overrides: dict[str, list[str]]) -> dict[str, str]:
    """Return for each setting the preset that is run: a file without axes where there is one."""

    def has_axes(name: str) -> bool:
        return name.replace("/", "=") not in overrides[name]

    names: dict[str, str] = {}
    for name in sorted(overrides, key=has_axes):
        names.setdefault(setting(overrides[name]), name)
    return names


def prove_all(
    overrides: dict[str, list[str]],
    names: list[str],
    jobs: int,
    folder: Path,
    data: dict[str, list[str]],
) -> Iterator[Row]:
    """Prove presets, some side by side, and yield their rows; equal settings are one run."""
    first = first_names(overrides)
    waiting = list(names)
    running: dict[int, tuple[str, Path]] = {}
    while waiting or running:
        if waiting and len(running) < jobs:
            name = waiting.pop(0)
            same = first[setting(overrides[name])]
            if same != name:
                yield {"what": "preset", "preset": name, "as": same}
                continue
            place = folder / name.replace("/", "-")
            place.mkdir()
            work = functools.partial(prove, name, overrides[name], data, place)
            running[in_child(name, work, place / "row.json")] = (name, place)
            continue
        number, status = os.wait()
        name, place = running.pop(number)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            yield json.loads((place / "row.json").read_text())
        else:
            reason = f"its process ended with {code} (-14: it took too long)"
            yield {"what": "preset", "preset": name, "failed": reason}


def line(row: Row) -> str:
    """Return a row as a line for the terminal."""
    name = f"{row['preset']:<42}"
    if "failed" in row:
        return f"{name} FAILED: {row['failed']}"
    if "as" in row:
        return f"{name} the setting of {row['as']}"
    bits = f"{row['first_bits']:.3f} -> {row['last_bits']:.3f}, scored {row['scored_bits']:.3f}"
    return f"{name} N {row['N']:>6,} of {row['own_N']:>6,}  {bits}  {row['seconds']:.0f} s"


INTRODUCTION = """# Every preset, on two CPU cores

The times of all presets in `make presets` add up to {total}.
`tests/campaigns/presets.py` describes how each preset is made small.
`benchmarks/results/presets-cpu.json` has the overrides of each row.

Each row below passed these checks, unless it says **failed**:

- A run of 20 steps lowered its training loss.
- A second run, stopped by SIGTERM at step 10 and resumed, logged the same bits at every step.
- The first run was scored on two windows and exported, and the export had the same score.
- The first run wrote a sample, except for recall tasks, which have no text.

The models are reduced to {layers} layers of width {width} and at most {heads} heads. Attention
patterns, windows, positions, norms, dropouts and optimizers are those of the preset. Some sequences
are shorter: N is the sequence length of the run, "N of the preset" the unreduced one. The mean
training bits of the last three steps are in the column "bits, last 3 steps". The last two columns
are what `rtx plan` prints for the unreduced preset on this machine; the memory is that of one
device. The bits do not measure the quality of a preset.

"""
COLUMNS = (
    *("preset", "data", "N", "N of the preset", "bits, step 1", "bits, last 3 steps"),
    *("bits, scored", "parameters of the preset", "memory of the preset, GiB"),
)
RULES = ("---", "---", *("---:",) * 7)


def page(rows: list[Row]) -> str:
    """Return docs/results/presets.md."""
    seconds = sum(row.get("seconds", 0) for row in rows)
    total = f"{seconds / 60:.0f} minutes on {rows[0]['machine']}"
    introduction = INTRODUCTION.format(total=total, layers=LAYERS, width=WIDTH, heads=HEADS)
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'|'.join(RULES)}|"]
    lines += [page_line(row) for row in rows]
    return introduction + "\n".join(lines) + "\n"


def page_line(row: Row) -> str:
    """Return a row of the table of docs/results/presets.md."""
    if "as" in row:
        return f"| {row['preset']} | not run again: its first cell equals {row['as']} ||||||||"
    if "failed" in row:
        return f"| {row['preset']} | **failed**: {row['failed']} ||||||||"
    values = [
        row["preset"],
        row["data"],
        f"{row['N']:,}",
        f"{row['own_N']:,}",
        f"{row['first_bits']:.3f}",
        f"{row['last_bits']:.3f}",
        f"{row['scored_bits']:.3f}",
        f"{row['parameters']:,}",
        f"{row['planned_gib']:.2f}",
    ]
    return f"| {' | '.join(values)} |"


def main() -> int:
    """Prove, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="model/tiny experiment/pg19")
    parser.add_argument("--jobs", type=int, default=2, help="presets side by side, a thread each")
    args = parser.parse_args()
    end_with_children()
    overrides = presets()
    names = args.only or list(overrides)
    unknown = [name for name in names if name not in overrides]
    if unknown:
        parser.error(f"{unknown[0]}: no such preset; there are {', '.join(overrides)}")
    began = time.monotonic()
    rows = prove_and_write(overrides, names, args.jobs)
    PAGE.write_text(page(rows))
    failed = sum("failed" in row for row in rows)
    minutes = (time.monotonic() - began) / 60
    print(f"{len(rows)} presets, {failed} failed; {minutes:.1f} minutes")
    return 1 if failed else 0


def prove_and_write(overrides: dict[str, list[str]], names: list[str], jobs: int) -> list[Row]:
    """Prove presets, print and write each row when it is finished; return all rows of the file."""
    rows: dict[str, Row] = {}
    if len(names) < len(overrides) and RESULTS.exists():
        rows = {row["preset"]: row for row in json.loads(RESULTS.read_text())}
    facts = {"machine": machine("cpu", 1), "versions": code()}
    # Each preset's process would import these anew.
    for name in ("eval", "export", "plan", "resume", "sample"):
        importlib.import_module(f"rtx.commands.{name}")
    with tempfile.TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patch:
        folder = Path(home)
        files = folder / "files"
        files.mkdir()
        patch.setenv("RTX_DATA", str(folder / "stores"))
        patch.setenv("RTX_OUTPUTS", str(folder / "outputs"))
        patch.setattr(rtx.commands.train, "SAMPLE_LENGTH", 16)
        patch.setattr(rtx.commands.train, "SAMPLE_TOKENS", 16)
        data = make_data(files, patch)
        for row in prove_all(overrides, names, jobs, folder, data):
            print(line(row), flush=True)
            rows[row["preset"]] = row | facts
            ordered = [rows[name] for name in overrides if name in rows]
            RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    return [rows[name] for name in overrides if name in rows]


if __name__ == "__main__":
    sys.exit(main())
