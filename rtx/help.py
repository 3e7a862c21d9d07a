"""The pages of `--help`, and completion, whose scripts ask `rtx completion words` with the line so far."""

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from rtx.config import GROUPS, SECTIONS, all_fields, settings
from rtx.errors import UserError, written
from rtx.keys import preset
from rtx.options import COMMANDS, READS, check_overrides

MOST_PROSE = 120  # columns beyond which lines of text are hard to read
FRONT = """rtx: Routing Transformer experiments

usage: rtx <command> [group=option ...] [key=value ...]
"""
EXAMPLES = """
  rtx train                                  train on the embedded default
  rtx train data=text data.path=book.txt     on text of your own
  rtx train data=enwik8 model=rt24           the paper's model; selection sees
                                             the future, routing=causal does not
  rtx train -m routing.heads=2,4 seed=1,2,3  a sweep
  rtx eval last                              score the newest run (rtx runs)

rtx <command> --help lists its options; rtx --version."""
SCRIPTS = {
    "bash": """_rtx() {
  local IFS=$'\\n'
  COMPREPLY=($(rtx completion words "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
}
complete -o nospace -o default -F _rtx rtx
""",
    "zsh": """_rtx() {
  local -a found=("${(@f)$(rtx completion words "${words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}")
  compset -P '*='
  [[ -n "$found" ]] || _files
  compadd -S '' -- ${found:#* }
  compadd -- ${${(M)found:#* }% }
}
compdef _rtx rtx
""",
}


def front_page() -> str:
    """Return the page of `rtx --help`."""
    return "\n".join([FRONT, *(entry(command.name, command.about, column=18) for command in COMMANDS), EXAMPLES])


def command_page(word: str, words: Sequence[str]) -> str:
    """Return the page of `rtx <word> --help`; the values shown are those that overrides among the words give."""
    commands = [command for command in COMMANDS if command.name.split()[0] == word]
    first, lines = commands[0], []
    values: dict[str, Any] = {}
    if first.composes:
        from rtx.compose import chosen, compose_unresolved, composed, flat, to_dict

        checked = check_overrides([text for text in words if "=" in text])
        values = flat(to_dict(compose_unresolved(checked))) | dict(composed(chosen(checked)).hydra.runtime.choices)
    for command in commands:
        lines += [textwrap.fill(text, terminal_width()) for text in ("", f"usage: {command.usage()}", command.about)]
        own = command.own.items()
        lines += [entry(f"{key}={written(field.default)}", f"{field.doc} [{field.allowed}]") for key, field in own]
    lines += [entry("--cfg job", "print the configuration and stop")] if values else []
    known = first.known()
    for group in (group for group in GROUPS if group in known):
        lines += ["", f"{group}=<option>"]
        for option in settings()[group].values:
            path = preset(group, option)
            texts = path.read_text("utf-8").splitlines() if path else ["of an extension"]
            about = next((text for text in texts if not text.startswith("# @")), "")  # Hydra's own directive
            lines.append(entry(option + " *" * (option == values.get(group)), about.removeprefix("#").strip()))
    for section in (*SECTIONS, ""):
        keys = [field for key, field in all_fields().items() if key in known and key.rpartition(".")[0] == section]
        lines += ["", f"{section}.<key>" if section else "other keys"] if keys else []
        shown = [f"{field.key}={written(values[field.key])}" if values else field.key for field in keys]
        lines += [entry(left, f"{field.doc} [{field.allowed}]") for left, field in zip(shown, keys, strict=True)]
    return "\n".join(lines[1:])


def entry(left: str, right: str, column: int = 30) -> str:
    """Return an indented line of two columns, wrapped below the second where the terminal is too narrow."""
    head, indent = f"  {left}".ljust(column + 2) + "  ", " " * (column + 4)
    width = terminal_width()
    return textwrap.fill(right, width, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)


def terminal_width() -> int:
    """Return COLUMNS where it is set, else the columns of the terminal, else 100."""
    return shutil.get_terminal_size(fallback=(100, 24)).columns


def prose_width() -> int:
    """Return how long a line of text may be: as the terminal is wide, 120 columns at the most, 80 without one."""
    return min(MOST_PROSE, shutil.get_terminal_size(fallback=(80, 24)).columns)


def completion(words: Sequence[str]) -> str:
    """Return the script for a shell, or what may stand at the end of a line (`words <line>`), one a line."""
    if len(words) == 1 and words[0] in SCRIPTS:
        return SCRIPTS[words[0]]
    if words[:1] == ["words"] and len(words) == 2:
        return "\n".join(candidates(words[1]))
    raise UserError("rtx completion takes bash or zsh: source <(rtx completion bash)")


def candidates(line: str) -> list[str]:
    """Return what the last word of a line may become; bash takes what stands behind its "=" for a word."""
    _, *words, last = line.replace("--multirun", "-m").split(" ")
    name = max((name for name in READS if {*name.split()} <= {*words}), key=len, default="")
    if not name:
        later = [each.split()[len(words) :] for each in READS if each.split()[: len(words)] == words]
        return [f"{word} " for word in dict.fromkeys(each[0] for each in later) if word.startswith(last)]
    command = READS[name]
    key, equals, start = last.partition("=")
    if not equals:
        runs = ["last "] if "<run" in command.runs and not any("=" in word for word in words) else []
        return [each for each in (*runs, *(f"{known}=" for known in command.known())) if each.startswith(last)]
    if not (field := command.own.get(key) or settings().get(key)):
        return []
    values = (*("auto",) * field.auto, *("true", "false") * (field.kind is bool), *field.values)
    listed = start[: start.rfind(",") + 1]  # of a sweep
    return [f"{listed}{value} " for value in values if f"{listed}{value}".startswith(start)]
