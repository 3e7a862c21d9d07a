"""Prove every preset of conf/model and conf/experiment: it trains, resumes, is scored, sampled, exported and planned.

Run `make presets`, or `python -m tests.campaigns.presets --only model/tiny experiment/pg19` for a few. It writes
`benchmarks/results/presets-cpu.json`, a row as soon as it is there (rows of other presets stay), and at the end
`docs/results/presets.md`. It needs the tools of the tests (pip install -e '.[dev]') and no network.

A preset runs as its header commands it (an experiment with axes: its first cell), by the commands of `rtx` themselves,
with fewer layers and heads, a width of 64 and two sequences a step; its patterns, windows, clusters, positions, norm,
dropouts, embedding, optimizer and sequence length N stay, but that N is halved (with clusters and memories) until a
step is short and fits 8 GiB, and that learning rate and warm-up suit 20 steps. Data are small files made here in the
published layouts: text of Python's standard library, and drawn images. Its plan is that of the preset as it stands.

A run of 20 steps must lower its training loss. The same run, stopped by SIGTERM at step 10 and resumed, must log the
same bits at every step. It is scored on two windows as the header says, writes a sample, is exported, and the export
must have the same score. What fails is told with the step and the reason, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
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

import rtx.commands.eval
import rtx.commands.export
import rtx.commands.plan
import rtx.commands.resume
import rtx.commands.train
from benchmarks.ending import end_with_children
from benchmarks.machine import code, machine
from rtx.analysis.cost import cost
from rtx.analysis.footprint import choose_micro_batch
from rtx.cli.main import main as rtx_main
from rtx.data import images, text
from rtx.data.sets import IMAGE_SETS, MADE, SETS
from rtx.errors import UserError
from rtx.settings.compose import compose
from rtx.settings.identity import config_hash
from rtx.settings.overrides import check_overrides
from rtx.settings.presets import (
    conf_dir,
    options,
)
from rtx.settings.schema import CLUSTERED, Config
from rtx.sweeps.cells import lay_out
from rtx.training.callbacks import Watch
from tests.helpers.made_sets import (
    encoded,
    publish_enwik8,
    publish_wikitext,
    remote,
    write_images,
    write_tar,
)

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20
STOP = 10
LAYERS = 2
HEADS = 2
WIDTH = 64
ROOM = 8 * 2**30
SECONDS = 900  # that one preset may take
MOST_PAIRS = {"fast": 3e7, "soft": 8e6, "hashed": 5e5}
"""Pairs that a step's heads may read: by torch's kernels, by the softmax of our own, by rounds of hashing."""
CUTOFFS = ("200", "800", "2000")
KNOWN_WORDS = 3_000

RESULTS = ROOT / "benchmarks" / "results" / "presets-cpu.json"
Row = dict[str, Any]
TOOK: dict[str, float] = {}
"""Seconds that each command has taken in this process."""


class Failed(Exception):
    """A preset does not do what it must; the message says in which step, and why."""


def make_data(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Write small files in the layouts of all data sets that presets read; return the options that mean them."""
    modules = [path.read_bytes() for path in text.library_files()[:400]]
    (folder / "book.txt").write_bytes(b"".join(modules[:60])[:1_000_000])
    publish_enwik8(folder / "enwik8.zip", b"".join(modules)[:2_000_000], patch)
    publish_wikitext(
        patch, articles(folder / "wikitext", b"".join(modules).decode(errors="replace"))
    )
    counts = books(folder / "pg19", modules)
    patch.setattr(text, "PG19_BOOKS", {split: count for split, (count, _) in counts.items()})
    for split, (_, words) in counts.items():
        patch.setitem(SETS["pg19"].words, split, words)  # type: ignore[arg-type]
    for split, count in (("train", 40), ("test", 6)):
        rows: list[bytes | None] = [encoded(picture(32, n)) for n in range(count)]
        write_images(folder / "cifar10" / f"{split}-00000-of-00001.parquet", rows)
    pictures(folder / "imagenet64", patch)
    held = "data.held_out=4"
    return {
        **{"stdlib": [], "text": [f"data.path={folder / 'book.txt'}"]},
        "enwik8": [f"data.path={folder / 'enwik8.zip'}"],
        "wikitext103": [f"data.path={folder / 'wikitext'}"],
        "pg19": [f"data.path={folder / 'pg19'}", "data.vocabulary=1000"],
        "cifar10": [f"data.path={folder / 'cifar10'}", held],
        "imagenet64": [f"data.path={folder / 'imagenet64'}", held],
        **{name: [] for name in MADE},
    }


def articles(folder: Path, source: str) -> dict[str, bytes]:
    """Write Wikitext's three files with the words of a text, the rare ones as <unk>; return them by split."""
    words = re.findall(r"\w+|[^\w\s]", source)[:300_000]
    known = {word for word, _ in Counter(words).most_common(KNOWN_WORDS)}
    words = [word if word in known else "<unk>" for word in words]
    folder.mkdir()
    texts = {}
    for split, first, stop in (
        ("train", 0, 240_000),
        ("valid", 240_000, 270_000),
        ("test", 270_000, 300_000),
    ):
        lines = [" ".join(words[start : start + 20]) for start in range(first, stop, 20)]
        texts[split] = "".join(f" {line} \n" for line in lines).encode()
        (folder / f"wiki.{split}.tokens").write_bytes(texts[split])
    return texts


def books(folder: Path, modules: list[bytes]) -> dict[str, tuple[int, int]]:
    """Write modules as the published folders of books; return how many books and words each split has."""
    counts = {}
    for split, first, stop in (("train", 0, 60), ("valid", 60, 75), ("test", 75, 90)):
        place = folder / {"valid": "validation"}.get(split, split)
        place.mkdir(parents=True)
        for number, content in enumerate(modules[first:stop]):
            (place / f"{number}.txt").write_bytes(content[:60_000])
        counts[split] = (
            stop - first,
            sum(len(content[:60_000].split()) for content in modules[first:stop]),
        )
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
    published, counts = {}, {"train": 24, "valid": 4}
    for split, count in counts.items():
        members = {f"{split}_64x64/{n}.png": encoded(picture(64, n)) for n in range(count)}
        published[split] = remote(write_tar(folder / f"{split}_64x64.tar", members))
    patch.setattr(images, "IMAGENET64", published)
    patch.setitem(images.PUBLISHED, "imagenet64", counts)


def header(group: str, name: str) -> str:
    """Return the comment on top of a preset as one line."""
    lines = (conf_dir() / group / f"{name}.yaml").read_text().splitlines()
    return " ".join(
        line.lstrip("# ") for line in itertools.takewhile(lambda line: line.startswith("#"), lines)
    )


def words_behind(said: str, command: str) -> list[str]:
    """Return the words key=value behind the first mention of a command."""
    found = re.search(rf"rtx (?:{command})\b([^;]*)", re.sub(r"<[^>]*>", "-", said))
    words = (found[1] if found else "").split()
    run = int(command == "eval")
    return list(itertools.takewhile(lambda word: "=" in word, words[run:]))


def presets() -> dict[str, list[str]]:
    """Return the words by which every preset is run, by `<group>/<name>`."""
    found = {}
    for name in options("model"):
        said = header("model", name)
        words = words_behind(said, "train|plan")
        images_of = re.search("cifar10|imagenet64", said)
        if images_of and not any(word.startswith("data=") for word in words):
            words.append(f"data={images_of[0]}")
        found[f"model/{name}"] = words if f"model={name}" in words else [f"model={name}", *words]
    for name in options("experiment"):
        found[f"experiment/{name}"] = list(
            lay_out(check_overrides([f"experiment={name}"], sweep=True))[0].overrides
        )
    return found


def reduced(config: Config, part: int) -> list[str]:
    """Return the words that make a preset small, with a sequence that is `part` times shorter."""
    data, model, routing, optimizer = config.data, config.model, config.routing, config.optimizer
    patterns, heads, layers = (
        model.base.split("+"),
        min(model.heads, HEADS),
        min(model.layers, LAYERS),
    )
    length, side = data.length // part, 0
    if data.name in IMAGE_SETS:
        side = math.isqrt(data.length // 3 // part)
        length = 3 * side**2
    values: Row = {
        "model.layers": layers,
        "model.heads": heads,
        "model.hidden": WIDTH,
        "model.ffn_hidden": 2 * WIDTH,
    }
    values |= {"data.size": side} if side and part > 1 else {"data.length": length}
    values |= {"model.window": min(model.window, length)} if model.window > length else {}
    values |= {"model.embedding": WIDTH // 2} if isinstance(model.embedding, int) else {}
    if model.cutoffs:
        values["model.cutoffs"] = "x".join(CUTOFFS[: model.cutoffs.count("x") + 1])
    if model.axes:
        first, *rest = model.axes.split("x")
        values["model.axes"] = (
            f"{side}x{side}x3" if side else "x".join([str(int(first) // part), *rest])
        )
    values |= {
        f"model.{key}": getattr(model, key) // part
        for key in ("memory", "compressed")
        if getattr(model, key)
    }
    if "lsh" in patterns and model.hash_buckets:
        values["model.hash_buckets"] = max(2, model.hash_buckets // part // 2 * 2)
    if routing.heads and routing.layers:
        values["routing.heads"] = max(1, routing.heads * heads // model.heads)
        values["routing.layers"] = layers if routing.layers == model.layers else 1
        values["routing.window"] = min(routing.window, length)
        values |= (
            {"routing.clusters": max(1, (routing.clusters or 1) // part)}
            if routing.selection in CLUSTERED
            else {}
        )
        values |= {"routing.warmup": STEPS // 4} if routing.warmup else {}
    values |= {"optimizer.warmup": 3} | (
        {} if optimizer.name == "adafactor" else {"optimizer.lr": 3e-3}
    )
    values |= {"trainer.micro_batch_size": 1} if config.trainer.micro_batch_size != "auto" else {}
    values |= {
        "trainer.steps": STEPS,
        "trainer.batch_size": 2,
        "trainer.log_every": 1,
        "trainer.val_every": STEPS,
    }
    values |= {
        "trainer.checkpoint_every": STOP,
        "trainer.val_windows": 1,
        "trainer.final_windows": 1,
    }
    values |= {"hardware": "cpu", "hardware.threads": 1, "logger": "jsonl", "data.processes": 1}
    return [f"{key}={value}" for key, value in values.items()]


def taken(words: list[str]) -> tuple[list[str], Config]:
    """Return the words of a preset made small, its sequence as long as a step and its memory allow."""
    whole = compose(words)
    for part in (1, 4, 16, 64) if whole.data.name in IMAGE_SETS else (1, 2, 4, 8, 16, 32):
        small = [*words, *reduced(whole, part)]
        config = compose(small)
        model = config.model
        own_softmax = model.positions in ("shaw", "xl") or model.attention_dropout
        kind = "soft" if own_softmax or model.base in ("fixed", "adaptive_span") else "fast"
        kind = "hashed" if model.base == "lsh" else kind
        pairs = (
            config.trainer.batch_size
            * cost(config, KNOWN_WORDS).attention
            / (4 * model.hidden / model.heads)
        )
        if pairs <= MOST_PAIRS[kind] and choose_micro_batch(config, KNOWN_WORDS, ROOM).fits:
            return small, config
    raise Failed(f"no sequence is short enough for {MOST_PAIRS} pairs and 8 GiB")


def command(*words: str, code: int = 0, run: Path | None = None) -> str:
    """Run a command of rtx in this process and return what it printed; `Failed` for another exit code."""
    os.environ["RTX_RUN"] = str(run or "")
    out, err, began = io.StringIO(), io.StringIO(), time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        returned = rtx_main(words)
    TOOK[words[0]] = round(TOOK.get(words[0], 0.0) + time.monotonic() - began, 1)
    if returned != code:
        last = " / ".join((err.getvalue().strip() or out.getvalue().strip()).splitlines()[-3:])
        raise Failed(f"rtx {words[0]}: exit code {returned}, not {code}: {last}")
    return out.getvalue() + err.getvalue()


def prove(name: str, words: list[str], data: dict[str, list[str]], folder: Path) -> Row:
    """Take a preset through all commands; returns its row, `Failed` where it does not do what it must."""
    group, _, file = name.partition("/")
    row = planned(words)
    small, config = taken([*words, *data[compose(words).data.name]])
    row |= {"N": config.data.length, "data": config.data.name, "heads": config.model.base}
    whole, stopped = folder / "whole", folder / "stopped"
    command("train", *small, run=whole)
    bits = training_bits(whole)
    row |= {
        "first_bits": bits[1],
        "last_bits": sum(bits[step] for step in range(STEPS - 2, STEPS + 1)) / 3,
    }
    if not row["last_bits"] < row["first_bits"]:
        raise Failed(f"rtx train: the loss does not fall: {bits}")
    with stop_at(STOP):
        command("train", *small, code=143, run=stopped)
    if (saved := max(training_bits(stopped))) != STOP:
        raise Failed(f"rtx train: stopped at step {saved}, not {STOP}")
    command("resume", str(stopped))
    again = training_bits(stopped)
    if different := [step for step in range(1, STEPS + 1) if bits[step] != again.get(step)]:
        step = different[0]
        raise Failed(
            f"rtx resume: step {step} has {again.get(step)} bits, not {bits[step]} as without a stop"
        )
    how = scored_how(words_behind(header(group, file), "eval"), config)
    row["scored_bits"] = scored(whole, how)
    sample(whole, config)
    command("export", str(whole), f"output={folder / 'export'}")
    if (exported := scored(folder / "export", how)) != row["scored_bits"]:
        raise Failed(f"rtx export: the export scores {exported}, the run {row['scored_bits']} bits")
    return row | {"scored_as": " ".join(how), "overrides": " ".join(words)}


def planned(words: list[str]) -> Row:
    """Return the parameters and the memory of a device that `rtx plan` tells of the preset as it stands."""
    said = " ".join(command("plan", *words).split())
    found = re.search(r"parameters ([\d,]+) .* memory about ([\d.]+) ([GMK]iB)", said)
    if not found:
        raise Failed(f"rtx plan: neither parameters nor memory are told: {said}")
    gib = float(found[2]) * {"GiB": 1, "MiB": 2**-10, "KiB": 2**-20}[found[3]]
    length = compose(words).data.length
    return {
        "own_N": length,
        "parameters": int(found[1].replace(",", "")),
        "planned_gib": round(gib, 4),
    }


def training_bits(run: Path) -> dict[int, float]:
    """Return the training loss of every step, in bits; of a step that was logged twice the last."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["train/bits"] for row in rows if "train/bits" in row}


@contextlib.contextmanager
def stop_at(step: int) -> Iterator[None]:
    """Send this process SIGTERM behind a training step, as a scheduler may."""
    usual = Watch.on_train_batch_end

    def stopping(self: Watch, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        usual(self, trainer, *rest)

    Watch.on_train_batch_end = stopping  # type: ignore[method-assign]
    try:
        yield
    finally:
        Watch.on_train_batch_end = usual  # type: ignore[method-assign]


def scored_how(told: list[str], config: Config) -> list[str]:
    """Return the options of `rtx eval`: those of the header, for two windows, of 1,024 units each in a stream."""
    given = {word.partition("=")[0] for word in told}
    return [
        *told,
        "limit=2",
        *(["stride=1024"] if config.model.memory and "stride" not in given else []),
    ]


def scored(run: Path, how: list[str]) -> float:
    """Return the score of a run or an export in bits a unit."""
    command("eval", str(run), *how)
    (path,) = run.glob("eval/*.json")
    result = json.loads(path.read_text())
    return result["nats"] / result["units"] / math.log(2)


def sample(run: Path, config: Config) -> None:
    """Let a run write, or refuse to where its data have no text."""
    if config.data.name in MADE:
        command("sample", str(run), code=2)
        return
    before = set(run.glob("samples/*"))
    command("sample", str(run), "length=16", "top_k=9", "seed=1")
    if not set(run.glob("samples/*")) - before:
        raise Failed("rtx sample: no file was written")


def in_child(name: str, work: Callable[[], Row], result: Path) -> int:
    """Do work in a process of its own, which writes a row or why there is none; returns its number."""
    sys.stdout.flush()
    if number := os.fork():
        return number
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's handler is not this one's
    began, row = time.monotonic(), {"what": "preset", "preset": name}
    signal.alarm(SECONDS)
    try:
        row |= work()
    except Failed as failed:
        row["failed"] = str(failed)
    except BaseException as error:
        row["failed"] = f"{type(error).__name__}: {error}"
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row |= {
        "seconds_of": TOOK,
        "seconds": round(time.monotonic() - began, 1),
        "peak_gib": round(peak / 2**30, 2),
    }
    result.write_text(json.dumps(row))
    os._exit(0)


def setting(words: list[str]) -> str:
    """Return what two presets share that are the same run; of words that are none, what is wrong with them."""
    try:
        return config_hash(compose(words))
    except UserError as error:
        return str(error)


def prove_all(
    every: dict[str, list[str]],
    wanted: list[str],
    jobs: int,
    folder: Path,
    data: dict[str, list[str]],
) -> Iterator[Row]:
    """Prove presets, some side by side; equal settings are one run, that of the file that is no grid."""
    first: dict[str, str] = {}
    for name in sorted(
        every, key=lambda name: name.replace("/", "=") not in every[name]
    ):  # grids last
        first.setdefault(setting(every[name]), name)
    waiting, running = list(wanted), {}
    while waiting or running:
        if waiting and len(running) < jobs:
            name = waiting.pop(0)
            if (same := first[setting(every[name])]) != name:
                yield {"what": "preset", "preset": name, "as": same}
                continue
            place = folder / name.replace("/", "-")
            place.mkdir()
            work = lambda name=name, place=place: prove(name, every[name], data, place)  # noqa: E731
            running[in_child(name, work, place / "row.json")] = (name, place)
            continue
        number, status = os.wait()
        name, place = running.pop(number)
        ended = os.waitstatus_to_exitcode(status)
        lost = {
            "what": "preset",
            "preset": name,
            "failed": f"its process ended with {ended} (-14: it took too long)",
        }
        yield json.loads((place / "row.json").read_text()) if ended == 0 else lost


def line(row: Row) -> str:
    """Return a row as a line for the terminal."""
    if "failed" in row:
        return f"{row['preset']:<42} FAILED: {row['failed']}"
    if "as" in row:
        return f"{row['preset']:<42} the setting of {row['as']}"
    bits = f"{row['first_bits']:.3f} -> {row['last_bits']:.3f}, scored {row['scored_bits']:.3f}"
    return f"{row['preset']:<42} N {row['N']:>6,} of {row['own_N']:>6,}  {bits}  {row['seconds']:.0f} s"


INTRODUCTION = """# Every preset, on two CPU cores

`make presets`: {where}.
`tests/campaigns/presets.py` says what is made small; `benchmarks/results/presets-cpu.json` has the words of each row.

Every row trained 20 steps; another run of it was stopped by SIGTERM at step 10 and resumed to the same bits; it was
scored on two windows, sampled (recall tasks have no text), exported, and its export scored the same. Models have
{layers} layers of width {width} and at most {heads} heads; patterns, windows, positions, norms, dropouts and optimizers
are the preset's own. N is what was taken, of what the preset has. Plans are of presets as they stand, on this machine.
The bits say nothing of a preset's quality.

| preset | data | N taken | of | bits, step 1 | last 3 steps | scored | parameters planned | GiB planned |
|---|---|---:|---:|---:|---:|---:|---:|---:|
"""


def page(rows: list[Row]) -> str:
    """Return docs/results/presets.md."""
    seconds = sum(row.get("seconds", 0) for row in rows)
    where = f"{seconds / 60:.0f} minutes, one preset after the other, on {rows[0]['machine']}"
    lines = [
        *INTRODUCTION.format(where=where, layers=LAYERS, width=WIDTH, heads=HEADS).splitlines()
    ]
    for row in rows:
        if "as" in row:
            lines.append(f"| {row['preset']} | its first row is {row['as']} ||||||||")
        elif "failed" in row:
            lines.append(f"| {row['preset']} | **failed**: {row['failed']} ||||||||")
        else:
            bits = " | ".join(
                f"{row[key]:.3f}" for key in ("first_bits", "last_bits", "scored_bits")
            )
            plan = f"{row['parameters']:,} | {row['planned_gib']:.2f}"
            lines.append(
                f"| {row['preset']} | {row['data']} | {row['N']:,} | {row['own_N']:,} | {bits} | {plan} |"
            )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Prove, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="such as model/tiny experiment/pg19"
    )
    parser.add_argument("--jobs", type=int, default=2, help="presets side by side, a thread each")
    args = parser.parse_args()
    end_with_children()
    every, began, done = presets(), time.monotonic(), []
    if unknown := [name for name in args.only or () if name not in every]:
        parser.error(f"{unknown[0]}: no such preset; there are {', '.join(every)}")
    rows = (
        {row["preset"]: row for row in json.loads(RESULTS.read_text())}
        if args.only and RESULTS.exists()
        else {}
    )
    with tempfile.TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patch:
        folder = Path(home)
        (folder / "files").mkdir()
        patch.setenv("RTX_DATA", str(folder / "stores"))
        patch.setenv("RTX_OUTPUTS", str(folder / "outputs"))
        patch.setattr(rtx.commands.train, "SAMPLE_LENGTH", 16)
        patch.setattr(rtx.commands.train, "SAMPLE_UNITS", 16)
        data, where = (
            make_data(folder / "files", patch),
            {"machine": machine("cpu", 1), "versions": code()},
        )
        for row in prove_all(every, args.only or list(every), args.jobs, folder, data):
            print(line(row), flush=True)
            rows[row["preset"]] = row | where
            done = [rows[name] for name in every if name in rows]
            RESULTS.write_text(json.dumps(done, indent=1) + "\n")
    (ROOT / "docs" / "results" / "presets.md").write_text(page(done))
    failed, minutes = sum("failed" in row for row in done), (time.monotonic() - began) / 60
    print(f"{len(done)} presets, {failed} failed; {minutes:.1f} minutes")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
