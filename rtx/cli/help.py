"""The pages of `--help`, and completion in bash and zsh.

The scripts of completion call `rtx completion words` with the line so far.
"""

import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rtx.cli.commands import BY_NAME, COMMANDS, Command
from rtx.errors import UserError, nearest, shorten, written
from rtx.settings.fields import Field
from rtx.settings.overrides import check_overrides
from rtx.settings.presets import about, preset
from rtx.settings.schema import GROUPS, SECTIONS, all_fields, flat, settings, to_dict
from rtx.terminal import terminal_width

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
    commands = [entry(command.name, command.about, column=18) for command in COMMANDS]
    return "\n".join([FRONT, *commands, EXAMPLES])


def command_page(word: str, words: Sequence[str]) -> str:
    """Return the page of `rtx <word> --help`.

    Of a command that makes a configuration the values shown are those that overrides among the
    words give. Its other words are groups and keys, which are then all that is on the page;
    `UserError` for one that does not exist.
    """
    commands = [command for command in COMMANDS if command.name.split()[0] == word]
    first = commands[0]
    known: set[str] = set()
    for command in commands:
        # An option may have the name of a group, such as model.
        known |= {*command.known()} - {*command.own}
    values: dict[str, Any] = {}
    topics: list[str] = []
    if first.composes:
        values = values_of(words)
        topics = [text for text in words if "=" not in text]
    lines: list[str] = []
    for topic in topics:
        lines += topic_lines(topic, word, known, values)
    if not topics:
        for command in commands:
            lines += usage_lines(command)
        if first.composes:
            lines += composing_lines()
        lines += setting_lines(known, values)
    # Each part begins with an empty line.
    return "\n".join(lines).removeprefix("\n")


def composing_lines() -> list[str]:
    """Return what commands that make a configuration have in common."""
    alone = f"print this group alone; also {', '.join(TOPICS)}, or one key"
    return [
        entry("--cfg job", "print the configuration and stop"),
        entry(f"--help {GROUPS[1]}", alone),
    ]


def setting_lines(known: Collection[str], values: Mapping[str, Any]) -> list[str]:
    """Return the groups with their options, and the keys, that a command reads."""
    lines = []
    for group in GROUPS:
        if group in known:
            lines += option_lines(group, values)
    for section in (*SECTIONS, ""):
        lines += key_lines(section, known, values)
    return lines


def values_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the value of every key, and the option of every group, that overrides give."""
    from rtx.settings.compose import chosen, compose_unresolved, composed

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
    fields = all_fields()
    if topic in fields:
        return [key_line(fields[topic], values)]
    if topic not in TOPICS:
        near = nearest(topic, [*TOPICS, *fields])
        topics = f"say one of {', '.join(TOPICS)}, or a key{near}"
        raise UserError(f"rtx {word} --help {shorten(topic)}: {topics}")
    options = option_lines(topic, values) if topic in GROUPS else []
    return [*options, *key_lines(topic, known, values)]


def option_lines(group: str, values: Mapping[str, Any]) -> list[str]:
    """Return the options of a group, each with the first line of its file."""
    lines = ["", f"{group}=<option>"]
    for option in settings()[group].values:
        # The short word for options of several experiments is no file.
        if group == "heads" and preset(group, option) is None:
            continue
        mark = " *" if option == values.get(group) else ""
        lines.append(entry(option + mark, about(group, option)))
    return lines


def key_lines(section: str, known: Collection[str], values: Mapping[str, Any]) -> list[str]:
    """Return the keys of a section, or those of none, that a command knows."""
    lines = []
    for key, field in all_fields().items():
        if key in known and key.rpartition(".")[0] == section:
            lines.append(key_line(field, values))
    title = f"{section}.<key>" if section else "other keys"
    return ["", title, *lines] if lines else []


def key_line(field: Field, values: Mapping[str, Any]) -> str:
    """Return a key with its value, where there are values, its docstring and its range."""
    left = f"{field.key}={written(values[field.key])}" if values else field.key
    return entry(left, f"{field.doc} [{field.allowed}]")


def entry(left: str, right: str, column: int = 30) -> str:
    """Return an indented line of two columns, the second wrapped to the width of the terminal."""
    return textwrap.fill(
        right,
        terminal_width(),
        initial_indent=f"  {left}".ljust(column + 2) + "  ",
        subsequent_indent=" " * (column + 4),
        break_on_hyphens=False,
    )


def completion(words: Sequence[str]) -> str:
    """Return the script for a shell, or with `words <line>` how the line may go on, one a line."""
    if len(words) == 1 and words[0] in SCRIPTS:
        return SCRIPTS[words[0]]
    if words[:1] == ["words"] and len(words) == 2:
        return "\n".join(candidates(words[1]))
    raise UserError("rtx completion takes bash or zsh: source <(rtx completion bash)")


def candidates(line: str) -> list[str]:
    """Return what the last word of a line may become.

    Of key=value only the value: bash takes it for a word.
    """
    _, *words, last = line.replace("--multirun", "-m").split(" ")
    names = [name for name in BY_NAME if {*name.split()} <= {*words}]
    if not names:
        return next_words_of_names(words, last)
    command = BY_NAME[max(names, key=len)]
    key, equals, start = last.partition("=")
    if equals:
        return value_candidates(command.own.get(key) or settings().get(key), start)
    starts = [f"{known}=" for known in command.known()]
    if command.positional.takes_runs and not any("=" in word for word in words):
        starts.insert(0, "last ")
    return [text for text in starts if text.startswith(last)]


def next_words_of_names(words: Sequence[str], last: str) -> list[str]:
    """Return the words by which a name of a command may go on."""
    count = len(words)
    parts = [name.split() for name in BY_NAME]
    following = [part[count] for part in parts if part[:count] == list(words)]
    return [f"{word} " for word in dict.fromkeys(following) if word.startswith(last)]


def value_candidates(field: Field | None, start: str) -> list[str]:
    """Return the values of a key that begin so; in a sweep they follow a list."""
    if field is None:
        return []
    values = [*field.words, *field.values]
    if field.kind is bool:
        values += ["true", "false"]
    earlier = start[: start.rfind(",") + 1]
    texts = [f"{earlier}{value} " for value in values]
    return [text for text in texts if text.startswith(start)]
