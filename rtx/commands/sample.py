"""`rtx sample RUN [overrides]`: let a run write or draw, one unit at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from rtx.data.sets import IMAGE_SETS
from rtx.data.tokenizers import encode_text
from rtx.errors import UserError
from rtx.options import SampleOptions, read_words
from rtx.training.inference import LoadedRun, draw, load_run, prepare_device, run_config, save_images, save_sample
from rtx.training.signals import INTERRUPTED, Stopped
from rtx.wording import TextStream

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
    is_image, size = config.data.name in IMAGE_SETS, config.data.length
    if config.data.name == "recall":
        raise UserError("a run on data=recall has no text to write; rtx eval says how many answers it has right")
    if is_image and options.prompt:
        raise UserError("sample.prompt has no place in a run on images, which have no text to continue")
    if is_image and (options.length or 0) > size:
        several = "for several images: sample.count=<number>"
        raise UserError(f"sample.length={options.length}: an image has {size} units; {several}")
    if not is_image and options.count != 1:
        raise UserError(f"sample.count={options.count} is for runs on images; for another text: sample.seed=<number>")
    run = load_run(folder, config, options.checkpoint, prepare_device(config), say=tell)
    return draw_images(run, options) if is_image else write_text(run, options)


def write_text(run: LoadedRun, options: SampleOptions) -> int:
    tokenizer, length, most = run.tokenizer, options.length or TEXT_LENGTH, run.config.data.length
    prompt_1P = torch.from_numpy(encode_text(tokenizer, options.prompt))[None]
    given = prompt_1P.shape[1]
    if run.model.embedding.positions is not None and given + length > most:
        raise UserError(
            f"sample.length={length}: with a prompt of {given} units that is {given + length}, but model.positions="
            f"{run.config.model.positions} covers data.length={most}; at most {most - given}"
        )
    text, stream = bytearray(), TextStream()

    def write(units: torch.Tensor) -> None:
        text.extend(written := tokenizer.decode(units.tolist()))
        print(stream.feed(written), end="", flush=True)

    write(prompt_1P[0])
    done, stopped = drawn(run, options, prompt_1P, length, write)
    print(stream.feed(b"", final=True), flush=True)
    if stopped:
        tell(f"stopped after {done:,} of {length:,} units")
    tell(save_sample(run, options.seed, bytes(text)))
    return stopped


def draw_images(run: LoadedRun, options: SampleOptions) -> int:
    size, columns = run.config.data.length, []
    empty = torch.empty(options.count, 0, dtype=torch.int64)
    done, stopped = drawn(run, options, empty, options.length or size, columns.append)
    if done < size:
        tell(f"{'stopped after ' if stopped else ''}{done:,} units; an image has {size:,}: the rest is black")
    print(save_images(run, options.seed, columns, options.count))
    return stopped


def drawn(
    run: LoadedRun, options: SampleOptions, prompt_BP: torch.Tensor, length: int, write: Callable[[torch.Tensor], None]
) -> tuple[int, int]:
    """Draw units, handing each `[B]` to `write`; returns how many, and the exit code of a signal that came, or 0."""
    done = 0
    try:
        for unit_B in draw(run, options, prompt_BP, length):
            write(unit_B)
            done += 1
    except (KeyboardInterrupt, Stopped) as stop:
        return done, stop.code if isinstance(stop, Stopped) else INTERRUPTED
    return done, 0


def tell(line: object) -> None:
    print(line, file=sys.stderr)
