"""The pages of `--help`, and completion in bash: both tell groups, options, keys, and what is a command's own.

To try completion: source <(rtx completion bash). The script asks `rtx completion words` with the line up to the cursor.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from rtx.config import GROUPS, SECTIONS, all_fields, settings
from rtx.errors import UserError, written
from rtx.keys import Field, conf_dir
from rtx.options import COMMANDS, READS, check_overrides

FRONT = """rtx: Routing Transformer experiments

usage: rtx <command> [group=option ...] [key=value ...]
"""
EXAMPLES = """
  rtx train                                  train on the embedded default
  rtx train data=text data.path=book.txt     on text of your own
  rtx train data=enwik8 model=rt24           the paper's enwik-8 model
  rtx train -m routing.heads=2,4 seed=1,2,3  a sweep

rtx <command> --help lists its options; rtx --version."""
SCRIPT = """_rtx() {
  local IFS=$'\\n'
  COMPREPLY=($(rtx completion words "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
}
complete -o nospace -o default -F _rtx rtx
"""


def front_page() -> str:
    """Return the page of `rtx --help`."""
    return "\n".join([FRONT, *(entry(command.name, command.about, column=18) for command in COMMANDS), EXAMPLES])


def command_page(word: str, words: Sequence[str]) -> str:
    """Return the page of `rtx <word> --help`; the values shown are those that overrides among the words give."""
    commands = [command for command in COMMANDS if command.name.split()[0] == word]
    first, lines = commands[0], []
    values = composed_values([text for text in words if "=" in text]) if first.composes and not first.runs else {}
    for command in commands:
        lines += [textwrap.fill(text, terminal_width()) for text in ("", f"usage: {command.usage()}", command.about)]
        lines += [entry(f"{key}={written(own.default)}", told(own)) for key, own in command.own.items()]
    lines += [entry("--cfg job", "print the configuration and stop")] if values else []
    known = first.known(first.composes)
    for group in (group for group in GROUPS if group in known):
        lines += ["", f"{group}=<option>"]
        for option in settings()[group].values:
            lines.append(entry(option + " *" * (option == values.get(group)), option_doc(group, option)))
    for section in (*SECTIONS, ""):
        keys = [field for key, field in all_fields().items() if key in known and key.rpartition(".")[0] == section]
        lines += ["", f"{section}.<key>" if section else "other keys"] if keys else []
        shown = [f"{field.key}={written(values[field.key])}" if values else field.key for field in keys]
        lines += [entry(left, told(field)) for left, field in zip(shown, keys, strict=True)]
    return "\n".join(lines[1:])


def composed_values(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the value of every key, and the option of every group, that these overrides give."""
    from rtx.compose import chosen, compose_unresolved, composed, flat, to_dict

    checked = check_overrides(overrides)
    return flat(to_dict(compose_unresolved(checked))) | dict(composed(chosen(checked)).hydra.runtime.choices)


def option_doc(group: str, option: str) -> str:
    """Return the first comment line of an option's file, Hydra's own directive (`# @package`) apart."""
    lines = (conf_dir() / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if not line.startswith("# @")).removeprefix("#").strip()


def told(field: Field) -> str:
    """Return the docstring of a key with what it takes."""
    return f"{field.doc} [{field.allowed}]"


def entry(left: str, right: str, column: int = 30) -> str:
    """Return an indented line of two columns, wrapped below the second where the terminal is too narrow."""
    head, indent = f"  {left}".ljust(column + 2) + "  ", " " * (column + 4)
    width = terminal_width()
    return textwrap.fill(right, width, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)


def terminal_width() -> int:
    """Return COLUMNS where it is set, else the columns of the terminal, else 100."""
    return shutil.get_terminal_size(fallback=(100, 24)).columns


def completion(words: Sequence[str]) -> str:
    """Return the script for bash (`bash`), or what may stand at the end of a line (`words <line>`), one a line."""
    match words:
        case ["bash"]:
            return SCRIPT
        case ["words", line]:
            return "\n".join(candidates(line))
    raise UserError("rtx completion takes bash; for now: source <(rtx completion bash)")


def candidates(line: str) -> list[str]:
    """Return what the last word of a line may become; bash takes what stands behind its "=" for a word."""
    _, *words, last = line.replace("--multirun", "-m").split(" ")
    name = max((name for name in READS if {*name.split()} <= {*words}), key=len, default="")
    if not name:
        later = [each.split()[len(words) :] for each in READS if each.split()[: len(words)] == words]
        return [f"{word} " for word in dict.fromkeys(each[0] for each in later) if word.startswith(last)]
    command = READS[name]
    composing = command.composes and not (command.runs and len(words) > 1 and "=" not in words[1])
    key, equals, start = last.partition("=")
    if not equals:
        return [f"{known}=" for known in command.known(composing) if known.startswith(last)]
    if not (field := command.own.get(command.option(key, composing)) or settings().get(key)):
        return []
    values = (*("auto",) * field.auto, *("true", "false") * (field.kind is bool), *field.values)
    listed = start[: start.rfind(",") + 1]  # of a sweep
    return [f"{listed}{value} " for value in values if f"{listed}{value}".startswith(start)]
