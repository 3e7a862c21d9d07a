"""`rtx sample RUN [overrides]`: let a run write or draw, one unit at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch

from rtx.config import Config
from rtx.data.imageset import image_shape
from rtx.data.sheet import png_grid
from rtx.data.tokenizers import encode_text
from rtx.errors import UserError
from rtx.model.decoding import generate
from rtx.options import SampleOptions, read_words
from rtx.report.text import TextStream
from rtx.sets import IMAGE_SETS
from rtx.training.inference import LoadedRun, load_run, prepare_device, run_config
from rtx.training.samples import save_sample
from rtx.training.signals import INTERRUPTED, Stopped

TEXT_LENGTH = 1000


def main(arguments: list[str]) -> int:
    """Run `rtx sample RUN [overrides]`: the text on stdout as it comes, or the path of a picture; the rest on stderr.

    Raises:
        UserError: no such run, a wrong option, a length beyond the learned positions, a run without text.
        RunFailed: no checkpoint is whole, or the sample cannot be written.
    """
    words = read_words("sample", arguments)
    folder, options = words.runs[0], words.options
    config = run_config(folder, words.overrides)
    if config.data.name == "recall":
        raise UserError("a run on data=recall has no text to write; rtx eval says how many answers it has right")
    is_image = config.data.name in IMAGE_SETS
    length = options.length or (config.data.length if is_image else TEXT_LENGTH)
    check_options(options, config, is_image, length)
    run = load_run(folder, config, options.checkpoint, prepare_device(config), say=tell)
    return draw_images(run, options, length) if is_image else write_text(run, options, length)


def check_options(options: SampleOptions, config: Config, is_image: bool, length: int) -> None:
    """Raise `UserError` for what an image, or a text, does not have."""
    size = config.data.length
    if is_image and options.prompt:
        raise UserError("sample.prompt has no place in a run on images, which have no text to continue")
    if is_image and length > size:
        raise UserError(f"sample.length={length}: an image has {size} units; for several images: sample.count=<number>")
    if not is_image and options.count != 1:
        raise UserError(f"sample.count={options.count} is for runs on images; for another text: sample.seed=<number>")


def write_text(run: LoadedRun, options: SampleOptions, length: int) -> int:
    """Write a text behind the prompt, keep it, and return the exit code.

    Raises:
        UserError: prompt and length reach beyond the learned positions.
    """
    tokenizer, model, data = run.tokenizer, run.config.model, run.config.data
    prompt_1P = torch.from_numpy(encode_text(tokenizer, options.prompt))[None]
    given = prompt_1P.shape[1]
    if model.positions in ("learned", "axial") and given + length > data.length:
        raise UserError(
            f"sample.length={length}: with a prompt of {given} units that is {given + length}, but model.positions="
            f"{model.positions} covers data.length={data.length}; at most {data.length - given}"
        )
    text, stream = bytearray(tokenizer.decode(prompt_1P[0])), TextStream()
    show(stream.feed(bytes(text)))

    def write(unit_1: torch.Tensor) -> None:
        written = tokenizer.decode(unit_1.tolist())
        text.extend(written)
        show(stream.feed(written))

    done, stopped = draw(run, options, prompt_1P, length, write)
    show(stream.feed(b"", final=True) + "\n")
    if stopped:
        tell(f"stopped after {done:,} of {length:,} units")
    tell(save_sample(run.folder, run.checkpoint["step"], options.seed, bytes(text)))
    return stopped


def draw_images(run: LoadedRun, options: SampleOptions, length: int) -> int:
    """Draw `sample.count` images, keep them as one PNG, print its path, and return the exit code."""
    size = run.config.data.length
    columns: list[np.ndarray] = []
    empty = torch.empty(options.count, 0, dtype=torch.int64)
    done, stopped = draw(run, options, empty, length, lambda unit_B: columns.append(unit_B.numpy()))
    if done < size:
        why = f"stopped after {done:,} of {length:,} units" if stopped else f"{done:,} units"
        tell(f"{why}; an image has {size:,}: the rest is black")
    images_BN = np.zeros((options.count, size), dtype=np.uint8)
    for n, unit_B in enumerate(columns):
        images_BN[:, n] = unit_B
    picture = png_grid(list(images_BN), image_shape(run.config.data, run.checkpoint["data"]))
    print(save_sample(run.folder, run.checkpoint["step"], options.seed, picture, "png"))
    return stopped


def draw(
    run: LoadedRun, options: SampleOptions, prompt_BP: torch.Tensor, length: int, write: Callable[[torch.Tensor], None]
) -> tuple[int, int]:
    """Draw units, handing each `[B]` to `write`; returns how many, and the exit code of a signal that came, or 0."""
    generator = torch.Generator().manual_seed(options.seed)
    choice = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    done = 0
    try:
        with run.autocast():
            for unit_B in generate(run.model, prompt_BP, length, **choice, generator=generator):
                write(unit_B)
                done += 1
    except (KeyboardInterrupt, Stopped) as stop:
        return done, stop.code if isinstance(stop, Stopped) else INTERRUPTED
    return done, 0


def show(text: str) -> None:
    """Print a piece of the text at once."""
    print(text, end="", flush=True)


def tell(line: object) -> None:
    """Print a line beside the text, on stderr."""
    print(line, file=sys.stderr)
