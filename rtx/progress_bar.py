"""How far a long piece of work is: tqdm's bar on a terminal or in a notebook, a plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from tqdm.auto import tqdm

QUIET_SECONDS = 3.0
"""Work that is done by then shows no bar."""
PLAIN_SECONDS = 15.0
"""Time between two lines where there is no terminal."""


@contextlib.contextmanager
def progress_bar(unit: str) -> Iterator[Callable[[int, int], None]]:
    """Yield what is called with how many (of `unit`, in the plural) are done and how many there are; on stderr."""
    began = shown = time.monotonic()
    terminal = sys.stderr.isatty() or "ipykernel" in sys.modules
    with tqdm(unit=f" {unit}", delay=QUIET_SECONDS, leave=False, file=sys.stderr, disable=not terminal) as bar:

        def show(done: int, total: int) -> None:
            nonlocal shown
            bar.total = total
            bar.update(done - bar.n)
            if not terminal and time.monotonic() - shown > PLAIN_SECONDS:
                shown = time.monotonic()
                line = tqdm.format_meter(done, total, shown - began, ncols=79, ascii=True, unit=f" {unit}")
                print(line, file=sys.stderr, flush=True)

        yield show
