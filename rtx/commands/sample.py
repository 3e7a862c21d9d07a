"""`rtx sample RUN [overrides]`: let a run write or draw, one unit at a time."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import torch

from rtx.config import Config
from rtx.data.imageset import image_shape
from rtx.data.sheet import png_grid
from rtx.data.source import Tokenizer
from rtx.data.tokenizers import encode_text, load_tokenizer
from rtx.errors import RunFailed, UserError
from rtx.model.decoding import generate
from rtx.options import SampleOptions, read_words
from rtx.report.text import TextStream
from rtx.sets import IMAGE_SETS
from rtx.training.samples import save_sample
from rtx.training.signals import INTERRUPTED, Stopped
from rtx.training.trained import Trained, load_trained, run_config

TEXT_LENGTH = 1000


def main(arguments: list[str]) -> int:
    """Run `rtx sample RUN [overrides]`: the text on stdout as it comes, or the path of a picture; the rest on stderr.

    Raises:
        UserError: no such run, a wrong option, a length beyond the learned positions, a run without text.
        RunFailed: no checkpoint is whole, or the sample cannot be written.
    """
    words = read_words("sample", arguments)
    folder, wish = words.runs[0], words.options
    config = run_config(folder, words.overrides)
    if config.data.name == "recall":
        raise UserError("a run on data=recall has no text to write; rtx eval says how many answers it has right")
    if config.data.name in IMAGE_SETS:
        return draw_images(folder, config, wish)
    return write_text(folder, config, dataclasses.replace(wish, length=wish.length or TEXT_LENGTH))


def write_text(folder: Path, config: Config, wish: SampleOptions) -> int:
    """Write text of `sample.length` units, keep it, and return the exit code."""
    if wish.count != 1:
        raise UserError(f"sample.count={wish.count} is for runs on images; for another text: sample.seed=<number>")
    assert wish.length
    trained = load_trained(folder, config, wish.checkpoint, say=lambda line: print(line, file=sys.stderr))
    tokenizer = tokenizer_of(folder, trained)
    prompt = torch.from_numpy(encode_text(tokenizer, wish.prompt))[None]
    check_length(config, prompt.shape[1], wish.length)
    units: list[int] = []
    stream = TextStream()
    show(stream.feed(tokenizer.decode(prompt[0])))
    generator = torch.Generator().manual_seed(wish.seed)
    stopped = 0
    try:
        with trained.arithmetic():
            for unit_B in generate(
                trained.model,
                prompt,
                wish.length,
                temperature=wish.temperature,
                top_k=wish.top_k,
                top_p=wish.top_p,
                generator=generator,
            ):
                units.append(int(unit_B))
                show(stream.feed(tokenizer.decode(units[-1:])))
    except (KeyboardInterrupt, Stopped) as stop:
        stopped = stop.code if isinstance(stop, Stopped) else INTERRUPTED
    show(stream.feed(b"", final=True) + "\n")
    text = tokenizer.decode(prompt[0]) + tokenizer.decode(units)
    if stopped:
        print(f"stopped after {len(units):,} of {wish.length:,} units", file=sys.stderr)
    print(save_sample(folder, trained.checkpoint["step"], wish.seed, text), file=sys.stderr)
    return stopped


def tokenizer_of(folder: Path, trained: Trained) -> Tokenizer:
    """Return the tokenizer that a run was trained with; the file of a trained one lies in its folder.

    Raises:
        RunFailed: that file is gone, or another.
    """
    try:
        return load_tokenizer(trained.checkpoint["data"]["tokenizer"], folder)
    except ValueError as error:
        raise RunFailed(str(error)) from error


def draw_images(folder: Path, config: Config, wish: SampleOptions) -> int:
    """Draw `sample.count` images, keep them as one PNG, print its path, and return the exit code.

    Raises:
        UserError: a prompt, or more units than an image has.
    """
    size = config.data.length
    length = wish.length or size
    if wish.prompt:
        raise UserError("sample.prompt has no place in a run on images, which have no text to continue")
    if length > size:
        raise UserError(f"sample.length={length}: an image has {size} units; for several images: sample.count=<number>")
    trained = load_trained(folder, config, wish.checkpoint, say=lambda line: print(line, file=sys.stderr))
    image = image_shape(config.data, trained.checkpoint["data"])
    canvas = np.zeros((wish.count, size), dtype=np.uint8)
    empty = torch.empty(wish.count, 0, dtype=torch.int64)
    draw = {"temperature": wish.temperature, "top_k": wish.top_k, "top_p": wish.top_p}
    generator = torch.Generator().manual_seed(wish.seed)
    stopped = done = 0
    try:
        with trained.arithmetic():
            for unit_B in generate(trained.model, empty, length, **draw, generator=generator):
                canvas[:, done] = unit_B.numpy()
                done += 1
    except (KeyboardInterrupt, Stopped) as stop:
        stopped = stop.code if isinstance(stop, Stopped) else INTERRUPTED
    if done < size:
        why = f"stopped after {done:,} of {length:,} units" if stopped else f"{done:,} units"
        print(f"{why}; an image has {size:,}: the rest is black", file=sys.stderr)
    print(save_sample(folder, trained.checkpoint["step"], wish.seed, png_grid(list(canvas), image), "png"))
    return stopped


def check_length(config: Config, prompt: int, length: int) -> None:
    """Refuse what learned positions do not cover.

    Raises:
        UserError: prompt and length reach beyond data.length.
    """
    total = prompt + length
    if config.model.positions in ("learned", "axial") and total > config.data.length:
        raise UserError(
            f"sample.length={length}: with a prompt of {prompt} units that is {total}, but "
            f"model.positions={config.model.positions} covers data.length={config.data.length}; "
            f"at most {config.data.length - prompt}"
        )


def show(text: str) -> None:
    """Print a piece of the text at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
