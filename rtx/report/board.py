"""How a sweep stands, as lines of text that fit a terminal."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from rtx.report.standing import BROKEN_OFF, DONE, FAILED, RUNNING, WAITING, Standing, Sweep, time_left
from rtx.training.progress import clock

ORDER = (DONE, RUNNING, FAILED, *BROKEN_OFF, WAITING)
"""In which states are counted."""

REASON_LINES = 3
"""Lines that a reason may take where there is room for all."""


def board(name: str, sweeps: Sequence[Sweep], width: int, height: int | None = None) -> list[str]:
    """Return the lines that show every cell; where they are more than `height`, cells that wait or are done give way.

    Args:
        name: of the folder.
        sweeps: what to show.
        width: of the terminal; no line is longer.
        height: of the terminal; None: there is room for all.
    """
    cells = [cell for sweep in sweeps for cell in sweep.cells]
    hidden: tuple[str, ...] = ()
    for hide in ((), (WAITING,), (WAITING, DONE)):
        lines, hidden = [*header(name, cells, width), *body(sweeps, width, hide, height is not None)], hide
        if height is None or len(lines) + bool(hide) <= height:
            break
    if hidden:
        count = sum(cell.state in hidden for cell in cells)
        lines = [*lines[: (height or 0) - 1], cut(f"... and {count} {' or '.join(hidden)}, not shown", width)]
    return lines


def header(name: str, cells: Sequence[Standing], width: int) -> list[str]:
    """Return how many cells are in each state, and when all will be done."""
    counts = Counter(cell.state for cell in cells)
    known = [state for state in ORDER if counts[state]] + sorted(set(counts) - set(ORDER))
    said = ", ".join(f"{counts[state]} {state}" for state in known)
    left = time_left(cells)
    tail = f"; about {clock(left)} left" if left is not None and left >= 1 else ""
    whole = f"{name}: {len(cells)} cell{'s' * (len(cells) != 1)}: {said}{tail}"
    return textwrap.wrap(whole, width, subsequent_indent="  ", break_on_hyphens=False)


def body(sweeps: Sequence[Sweep], width: int, hidden: Sequence[str], short: bool) -> list[str]:
    """Return the lines of the cells, below the command of their sweep where there are several."""
    lines = []
    rows = {id(cell): numbers(cell) for sweep in sweeps for cell in sweep.cells}
    titles = ("state", "step", "bits", "left")
    widths = [max(len(row[column]) for row in [titles, *rows.values()]) for column in range(4)]
    room = max(8, width - sum(widths) - 2 * len(widths) - 2)
    longest = max(len(shortened(cell.title, room)) for sweep in sweeps for cell in sweep.cells)
    lines.append(cut(line_of("cell", titles, longest, widths), width))
    for sweep in sweeps:
        if len(sweeps) > 1:
            lines.append(cut(heading(sweep, sweeps), width))
        for cell in sweep.cells:
            if cell.state in hidden:
                continue
            lines.append(cut(line_of(shortened(cell.title, room), rows[id(cell)], longest, widths), width))
            if cell.state == FAILED and cell.reason:
                told = textwrap.wrap(" ".join(cell.reason.split()), width - 7) or [""]
                shown = told[:1] if short else told[:REASON_LINES]
                lines += [f"    {line}" for line in shown[:-1]]
                lines.append(f"    {shown[-1]}" + ("..." if len(told) > len(shown) else ""))
        lines += [cut(line, width) if short else line for line in asleep(sweep)]
    return lines


def heading(sweep: Sweep, sweeps: Sequence[Sweep]) -> str:
    """Return the command of a sweep without the words that those of all others have, too."""
    if not sweep.command:
        return "runs of no sweep"
    others = [set(other.command.split()) for other in sweeps if other.command]
    words = sweep.command.split()
    own = [word for word in words[3:] if not all(word in other for other in others)]
    return " ".join([*words[:3], *own, "..."] if own and len(own) < len(words[3:]) else words)


def asleep(sweep: Sweep) -> list[str]:
    """Return a line where a sweep has cells to run and nobody runs them."""
    states = {cell.state for cell in sweep.cells}
    if not sweep.command or RUNNING in states or not states & {WAITING, *BROKEN_OFF} or sweep.at_work:
        return []
    what = "nobody works on it; it goes on with:" if sweep.at_work is False else "nothing runs; it goes on with:"
    return [f"  {what}", f"  {sweep.command}"]


def numbers(cell: Standing) -> tuple[str, str, str, str]:
    """Return state, steps, bits and time left of a cell."""
    of = f"/{cell.steps:,}" if cell.steps else ""
    step = f"{cell.step:,}{of}" if cell.step or cell.steps else ""
    left = clock(cell.left) if cell.left is not None else ""
    return cell.state, step, "" if cell.bits is None else f"{cell.bits:.4f}", left


def line_of(title: str, values: Sequence[str], room: int, widths: Sequence[int]) -> str:
    """Return a row: the title and the state at the left of their columns, numbers at the right."""
    state, *rest = values
    aligned = [text.rjust(wide) for text, wide in zip(rest, widths[1:], strict=True)]
    return "  ".join(["  " + title.ljust(room), state.ljust(widths[0]), *aligned]).rstrip()


def shortened(title: str, room: int) -> str:
    """Return a cell's title: whole, else its keys without their sections, else cut."""
    if len(title) > room:
        words = [word.partition("=") for word in title.split(" ")]
        title = " ".join(key.rpartition(".")[2] + equals + value for key, equals, value in words)
    return cut(title, room)


def cut(text: str, width: int) -> str:
    """Return a line that is no longer than the terminal is wide."""
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."
