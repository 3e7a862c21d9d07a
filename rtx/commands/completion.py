"""`rtx completion bash`: a script by which bash completes commands, groups, options, keys and values.

To try it: source <(rtx completion bash). The script asks `rtx completion words` with the line up to the cursor.
"""

from __future__ import annotations

from rtx.config import GROUPS, all_fields
from rtx.errors import UserError
from rtx.keys import Field, options
from rtx.options import READS, offered

SCRIPT = """_rtx() {
  local IFS=$'\\n'
  COMPREPLY=($(rtx completion words "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
}
complete -o nospace -o default -F _rtx rtx
"""

VALUED = ("--cfg", "-c", "--package", "-p")
"""Flags that a word belongs to."""


def main(arguments: list[str]) -> int:
    """Print the script (`bash`), or what may stand at the end of a line (`words <line>`), one a line.

    Raises:
        UserError: other words.
    """
    match arguments:
        case ["bash"]:
            print(SCRIPT, end="")
        case ["words", line]:
            print("\n".join(candidates(line)))
        case _:
            raise UserError("rtx completion takes bash; for now: source <(rtx completion bash)")
    return 0


def candidates(line: str) -> list[str]:
    """Return what the last word of a line may become; bash takes what stands behind its "=" for a word."""
    *before, last = line.split(" ")
    words = [word for word in before if word]
    if len(words) < 2:
        from rtx.cli import COMMANDS

        return matching(last, [f"{word} " for word in COMMANDS])
    name = command_of(words)
    actions = [each.partition(" ")[2] for each in READS if each.startswith(f"{words[1]} ") and words[1] != "train"]
    if not name:
        return matching(last, [f"{action} " for action in actions])
    key, equals, start = last.partition("=")
    if equals:
        listed = start[: start.rfind(",") + 1]  # of a sweep
        return matching(start, [f"{listed}{value} " for value in values_of(name, key)])
    behind = words[1 + len(name.removesuffix(" -m").split()) :]
    plain = [word for former, word in zip(["", *behind], behind, strict=False) if former not in VALUED]
    runs = any("=" not in word and not word.startswith("-") for word in plain)
    return matching(last, [f"{key}=" for key in offered(name, READS[name].composes and not runs)])


def command_of(words: list[str]) -> str:
    """Return the name, as `READS` has it, of the command of a line, or an empty string where it says not which."""
    names = ("train -m" if {"-m", "--multirun"} & set(words) else "", " ".join(words[1:3]), words[1])
    return next((name for name in names if name in READS and name.split()[0] == words[1]), "")


def matching(start: str, known: list[str]) -> list[str]:
    """Return what begins with `start`."""
    return [word for word in known if word.startswith(start)]


def values_of(name: str, key: str) -> list[str]:
    """Return the options of a group, or the values of a key that has a list of them."""
    if key in GROUPS:
        return list(options(key))
    own = READS[name].option(key, READS[name].composes)
    field: Field | None = READS[name].own[own] if own else all_fields().get(key)
    if field is None:
        return []
    listed = ["true", "false"] if field.kind is bool else [*field.choices, *field.metadata.get("parts", ())]
    return [*["auto"] * ("auto" in field.metadata), *listed]
