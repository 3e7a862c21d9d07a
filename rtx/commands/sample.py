"""`rtx sample RUN [overrides]`: let a run write or draw, one unit at a time; `rtx train` ends with
a short one.
"""

import codecs
import contextlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from rtx.cli.options import SampleOptions
from rtx.cli.request import Request
from rtx.data.images import png
from rtx.data.sets import SETS
from rtx.data.tokenizers import encode_text
from rtx.errors import UserError, printable
from rtx.model.decoding import generate
from rtx.runs.folder import save
from rtx.runs.signals import INTERRUPTED, Stopped
from rtx.training.inference import LoadedRun, load_run, prepare_device


def main(request: Request) -> int:
    """Print the text on stdout, on a terminal as it comes, or the path of a picture.

    All else goes to stderr.
    """
    options = request.options
    config = request.config
    run = load_run(request.run, config, options.checkpoint, prepare_device(config), say=tell)
    return draw_image(run, options) if SETS[config.data.name].image else write_text(run, options)


def write_text(run: LoadedRun, options: SampleOptions) -> int:
    """Print a text and keep it; returns the exit code of a signal that stopped it, or 0.

    A terminal gets it unit by unit, a file or a pipe at once: what reads those may take each piece
    for a line.
    """
    tokenizer, length, most = run.tokenizer, options.length or 1000, run.config.data.length
    prompt_1P = torch.from_numpy(encode_text(tokenizer, options.prompt))[None]
    given = prompt_1P.shape[1]
    if run.model.embedding.positions is not None and given + length > most:
        positions = f"model.positions={run.config.model.positions} covers data.length={most}"
        raise UserError(f"length={length}: {positions}; with the prompt, at most {most - given}")
    text, decoder = bytearray(), codecs.getincrementaldecoder("utf-8")("replace")
    is_terminal = sys.stdout.isatty()

    def write(units: torch.Tensor) -> None:
        text.extend(written := tokenizer.decode(units.tolist()))
        if is_terminal:
            print(printable(decoder.decode(written)), end="", flush=True)

    write(prompt_1P[0])
    done, stopped = draw(run, options, prompt_1P, length, write)
    rest = b"" if is_terminal else bytes(text)
    print(printable(decoder.decode(rest, final=True)), flush=True)
    if stopped:
        tell(f"stopped after {done:,} of {length:,} units")
    with contextlib.redirect_stdout(sys.stderr):
        save_sample(run, options.seed, bytes(text), "txt")
    return stopped


def draw_image(run: LoadedRun, options: SampleOptions) -> int:
    """Keep an image as PNG, in which what was not drawn is black; returns as `write_text`."""
    size, empty, units = run.config.data.length, torch.empty(1, 0, dtype=torch.int64), bytearray()
    done, stopped = draw(
        run, options, empty, options.length or size, lambda unit_1: units.append(int(unit_1))
    )
    if done < size:
        tell(
            f"{'stopped after ' if stopped else ''}{done:,} units; an image has {size:,}: the rest is black"
        )
    image_N = np.frombuffer(units.ljust(size, b"\0"), dtype=np.uint8)
    save_sample(run, options.seed, png(image_N, tuple(run.checkpoint["data"]["image"])), "png")
    return stopped


def draw(
    run: LoadedRun,
    options: SampleOptions,
    prompt_1P: torch.Tensor,
    length: int,
    write: Callable[[torch.Tensor], None],
) -> tuple[int, int]:
    """Draw units behind a prompt, handing each to `write`.

    Returns how many, and the exit code of a signal, or 0.
    """
    done, generator = 0, torch.Generator().manual_seed(options.seed)
    choice = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    try:
        with run.autocast():
            for unit_1 in generate(run.model, prompt_1P, length, **choice, generator=generator):
                write(unit_1)
                done += 1
    except (KeyboardInterrupt, Stopped) as stop:
        return done, stop.code if isinstance(stop, Stopped) else INTERRUPTED
    return done, 0


def save_sample(run: LoadedRun, seed: int, content: bytes, kind: str) -> None:
    """Keep a text (with its prompt) or a PNG under a name that no earlier sample has, and print its
    path.
    """
    begin = run.folder / "samples" / f"step{run.checkpoint['step']}-seed{seed}"
    save(
        next(
            path for n in itertools.count(1) if not (path := Path(f"{begin}-{n}.{kind}")).exists()
        ),
        content,
    )


def tell(line: object) -> None:
    print(line, file=sys.stderr)
