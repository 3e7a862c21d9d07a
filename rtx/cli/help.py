"""The pages of `--help`, and completion, whose scripts ask `rtx completion words` with the line so far."""

import shutil
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rtx.cli.commands import BY_NAME, COMMANDS, Command
from rtx.errors import UserError, nearest, shorten, written
from rtx.settings.fields import Field
from rtx.settings.overrides import check_overrides
from rtx.settings.presets import about, preset
from rtx.settings.schema import GROUPS, SECTIONS, all_fields, settings

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
TOPICS = tuple(dict.fromkeys((*GROUPS, *SECTIONS)))
"""Groups and sections, each of which `rtx train --help <topic>` prints alone."""
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
    return "\n".join(
        [FRONT, *(entry(command.name, command.about, column=18) for command in COMMANDS), EXAMPLES]
    )


def command_page(word: str, words: Sequence[str]) -> str:
    """Return the page of `rtx <word> --help`; the values shown are those that overrides among the words give.

    Of a command that makes a configuration the other words are groups and keys, which are then all that is on the page;
    `UserError` for one that does not exist.
    """
    commands = [command for command in COMMANDS if command.name.split()[0] == word]
    first = commands[0]
    values = values_of(words) if first.composes else {}
    known = first.known()
    topics = [text for text in words if "=" not in text] if first.composes else []
    if topics:
        return "\n".join(
            line for topic in topics for line in topic_lines(topic, word, known, values)
        ).lstrip("\n")
    lines = [line for command in commands for line in usage_lines(command)]
    if first.composes:
        lines.append(entry("--cfg job", "print the configuration and stop"))
        lines.append(
            entry(
                f"--help {GROUPS[1]}",
                f"print this group alone; also {', '.join(TOPICS)}, or one key",
            )
        )
    for group in GROUPS:
        lines += option_lines(group, values) if group in known else []
    for section in (*SECTIONS, ""):
        lines += key_lines(section, known, values)
    return "\n".join(lines[1:])


def values_of(words: Sequence[str]) -> dict[str, Any]:
    """Return what overrides make of a configuration: the value of every key, and the option of every group."""
    from rtx.settings.compose import chosen, compose_unresolved, composed
    from rtx.settings.schema import flat, to_dict

    checked = check_overrides([text for text in words if "=" in text])
    choices = composed(chosen(checked)).hydra.runtime.choices
    return {**flat(to_dict(compose_unresolved(checked))), **choices}


def usage_lines(command: Command) -> list[str]:
    """Return how a command is called, what it is for, and its own options."""
    texts = ("", f"usage: {command.usage()}", command.about)
    lines = [textwrap.fill(text, terminal_width()) for text in texts]
    for key, field in command.own.items():
        lines.append(entry(f"{key}={written(field.default)}", f"{field.doc} [{field.allowed}]"))
    return lines


def topic_lines(
    topic: str, word: str, known: Collection[str], values: Mapping[str, Any]
) -> list[str]:
    """Return the lines of one group or key; `UserError` where there is none of this name."""
    if topic in TOPICS:
        options = option_lines(topic, values) if topic in GROUPS else []
        return [*options, *key_lines(topic, known, values)]
    if topic in all_fields():
        return [key_line(all_fields()[topic], values)]
    near = nearest(topic, [*TOPICS, *all_fields()])
    raise UserError(
        f"rtx {word} --help {shorten(topic)}: say one of {', '.join(TOPICS)}, or a key{near}"
    )


def option_lines(group: str, values: Mapping[str, Any]) -> list[str]:
    """Return a group's options, each with what the comment on top of its file says first."""
    lines = ["", f"{group}=<option>"]
    for option in settings()[group].values:
        # The short word for options of several experiments is no file.
        if group == "heads" and preset(group, option) is None:
            continue
        left = f"{option} *" if option == values.get(group) else option
        lines.append(entry(left, about(group, option)))
    return lines


def key_lines(section: str, known: Collection[str], values: Mapping[str, Any]) -> list[str]:
    """Return the keys of a section, or those of none, that a command knows."""
    keys = [
        field
        for key, field in all_fields().items()
        if key in known and key.rpartition(".")[0] == section
    ]
    title = f"{section}.<key>" if section else "other keys"
    return ["", title, *(key_line(field, values) for field in keys)] if keys else []


def key_line(field: Field, values: Mapping[str, Any]) -> str:
    """Return a key with its value, where there are values, its docstring and its range."""
    left = f"{field.key}={written(values[field.key])}" if values else field.key
    return entry(left, f"{field.doc} [{field.allowed}]")


def entry(left: str, right: str, column: int = 30) -> str:
    """Return an indented line of two columns, wrapped below the second where the terminal is too narrow."""
    head, indent = f"  {left}".ljust(column + 2) + "  ", " " * (column + 4)
    width = terminal_width()
    return textwrap.fill(
        right, width, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
    )


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
    name = max((name for name in BY_NAME if {*name.split()} <= {*words}), key=len, default="")
    if not name:
        later = [
            each.split()[len(words) :] for each in BY_NAME if each.split()[: len(words)] == words
        ]
        return [
            f"{word} " for word in dict.fromkeys(each[0] for each in later) if word.startswith(last)
        ]
    command = BY_NAME[name]
    key, equals, start = last.partition("=")
    if not equals:
        runs = (
            ["last "]
            if command.positional.takes_runs and not any("=" in word for word in words)
            else []
        )
        return [
            each
            for each in (*runs, *(f"{known}=" for known in command.known()))
            if each.startswith(last)
        ]
    if not (field := command.own.get(key) or settings().get(key)):
        return []
    values = (*field.words, *("true", "false") * (field.kind is bool), *field.values)
    listed = start[: start.rfind(",") + 1]  # of a sweep
    return [f"{listed}{value} " for value in values if f"{listed}{value}".startswith(start)]
