"""`rtx sample RUN [overrides]`: let a run write, one unit at a time."""

from __future__ import annotations

import sys

import torch

from rtx.commandline.vocabulary import run_folder
from rtx.config import Config
from rtx.data.tokenizers import ByteTokenizer, encode_text
from rtx.errors import UserError
from rtx.model.decoding import generate
from rtx.report.text import TextStream
from rtx.training.samples import save_sample
from rtx.training.signals import INTERRUPTED, Stopped
from rtx.training.trained import load_trained, run_config


def main(arguments: list[str]) -> int:
    """Run `rtx sample RUN [overrides]`: the text on stdout as it comes, everything else on stderr.

    Raises:
        UserError: no such run, a wrong option, a length beyond the learned positions, a run without text.
        RunFailed: no checkpoint is whole, or the sample cannot be written.
    """
    folder, overrides = run_folder(arguments, "sample")
    config = run_config(folder, overrides, "sample")
    if config.data.name == "recall":
        raise UserError("a run on data=recall has no text to write; rtx eval says how many answers it has right")
    wish = config.sample
    tokenizer = ByteTokenizer()
    prompt = torch.from_numpy(encode_text(tokenizer, wish.prompt))[None]
    check_length(config, prompt.shape[1])
    trained = load_trained(
        folder, config, wish.checkpoint, tokenizer.vocabulary, lambda line: print(line, file=sys.stderr)
    )
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


def check_length(config: Config, prompt: int) -> None:
    """Refuse what learned positions do not cover, before anything is loaded.

    Raises:
        UserError: prompt and length reach beyond data.length.
    """
    total = prompt + config.sample.length
    if config.model.positions in ("learned", "axial") and total > config.data.length:
        raise UserError(
            f"sample.length={config.sample.length}: with a prompt of {prompt} units that is {total}, but "
            f"model.positions={config.model.positions} covers data.length={config.data.length}; "
            f"at most {config.data.length - prompt}"
        )


def show(text: str) -> None:
    """Print a piece of the text at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
