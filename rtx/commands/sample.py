"""`rtx sample RUN [overrides]`: generate a text or an image from a run, token by token.

`rtx train` ends with a short sample.
"""

import codecs
import contextlib
import itertools
import sys
from collections.abc import Callable

import numpy as np
import torch

from rtx.cli.options import SampleOptions
from rtx.cli.request import Request
from rtx.data.images import png
from rtx.data.tokenizers import encode_text
from rtx.disk import status_inside
from rtx.errors import UserError, printable
from rtx.model.decoding import generate
from rtx.runs.folder import save
from rtx.runs.signals import INTERRUPTED, Stopped
from rtx.settings.data_sets import SETS
from rtx.training.inference import LoadedRun, load_run, prepare_device

TEXT_LENGTH = 1000
"""Tokens of a text whose length is unset."""


def main(request: Request) -> int:
    """Print the text on stdout, on a terminal as it comes, or the path of a picture.

    All else goes to stderr.
    """
    options = request.options
    config = request.config
    run = load_run(request.run, config, options.checkpoint, prepare_device(config), say=tell)
    if SETS[config.data.name].image:
        return draw_image(run, options)
    return write_text(run, options)


def write_text(run: LoadedRun, options: SampleOptions) -> int:
    """Print a text and save it; returns the exit code of a signal that stopped it, or 0.

    A terminal gets it token by token; a file or a pipe gets it at once, because its reader may take
    each piece for a line.
    """
    tokenizer = run.tokenizer
    length = options.length or TEXT_LENGTH
    prompt_1P = torch.from_numpy(encode_text(tokenizer, options.prompt))[None]
    refuse_too_long(run, length, prompt_1P.shape[1])
    text = bytearray()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    is_terminal = sys.stdout.isatty()

    def write(tokens: torch.Tensor) -> None:
        piece = tokenizer.decode(tokens.tolist())
        text.extend(piece)
        if is_terminal:
            print(printable(decoder.decode(piece)), end="", flush=True)

    write(prompt_1P[0])
    done, stopped = draw(run, options, prompt_1P, length, write)
    rest = b"" if is_terminal else bytes(text)
    print(printable(decoder.decode(rest, final=True)), flush=True)
    if stopped:
        tell(f"stopped after {done:,} of {length:,} units")
    with contextlib.redirect_stdout(sys.stderr):
        save_sample(run, options.seed, bytes(text), "txt")
    return stopped


def refuse_too_long(run: LoadedRun, length: int, prompt: int) -> None:
    """Raise `UserError` for more tokens than the learned positions of a model cover."""
    most = run.config.data.length
    if run.model.embedding.positions is None or prompt + length <= most:
        return
    covered = f"model.positions={run.config.model.positions} covers data.length={most}"
    raise UserError(f"length={length}: {covered}; with the prompt, at most {most - prompt}")


def draw_image(run: LoadedRun, options: SampleOptions) -> int:
    """Save an image as PNG, black where nothing was drawn; returns as `write_text`."""
    size = run.config.data.length
    values = bytearray()
    empty_10 = torch.empty(1, 0, dtype=torch.int64)

    def write(token_1: torch.Tensor) -> None:
        values.append(int(token_1))

    done, stopped = draw(run, options, empty_10, options.length or size, write)
    if done < size:
        line = f"{done:,} units; an image has {size:,}: the rest is black"
        tell(f"stopped after {line}" if stopped else line)
    image_N = np.frombuffer(values.ljust(size, b"\0"), dtype=np.uint8)
    shape = tuple(run.checkpoint["data"]["image"])
    save_sample(run, options.seed, png(image_N, shape), "png")
    return stopped


def draw(
    run: LoadedRun,
    options: SampleOptions,
    prompt_1P: torch.Tensor,
    length: int,
    write: Callable[[torch.Tensor], None],
) -> tuple[int, int]:
    """Draw tokens after a prompt, handing each to `write`.

    Returns how many, and the exit code of a signal, or 0.
    """
    done = 0
    generator = torch.Generator().manual_seed(options.seed)
    choice = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    try:
        with run.autocast():
            for token_1 in generate(run.model, prompt_1P, length, **choice, generator=generator):
                write(token_1)
                done += 1
    except KeyboardInterrupt:
        return done, INTERRUPTED
    except Stopped as stop:
        return done, stop.code
    return done, 0


def save_sample(run: LoadedRun, seed: int, content: bytes, kind: str) -> None:
    """Save a text (with its prompt) or a PNG under a name of its own, and print its path."""
    begin = f"samples/step{run.checkpoint['step']}-seed{seed}"
    names = (f"{begin}-{number}.{kind}" for number in itertools.count(1))
    name = next(name for name in names if status_inside(run.folder, name) is None)
    save(run.folder, name, content)


def tell(line: object) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr)
