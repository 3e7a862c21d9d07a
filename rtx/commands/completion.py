"""`rtx completion bash`: a script by which bash completes commands, groups, options, keys and values.

To try it: source <(rtx completion bash). The script asks `rtx completion words` with the line up to the cursor.
"""

from __future__ import annotations

from rtx.config import GROUPS, all_fields
from rtx.errors import UserError
from rtx.keys import options
from rtx.options import READS, actions, offered

SCRIPT = """_rtx() {
  local IFS=$'\\n'
  COMPREPLY=($(rtx completion words "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
}
complete -o nospace -o default -F _rtx rtx
"""


def main(arguments: list[str]) -> int:
    """Print the script (`bash`), or what may stand at the end of a line (`words <line>`), one a line."""
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
    _, *words = filter(None, before)
    key, equals, start = last.partition("=")
    listed = start[: start.rfind(",") + 1]  # of a sweep
    found: list[str] = []
    if not words:
        from rtx.cli import COMMANDS

        found = [f"{word} " for word in COMMANDS]
    elif len(words) == 1 and actions(words[0]):
        found = [f"{action} " for action in actions(words[0])]
    else:
        name = "train -m" if {"-m", "--multirun"} & {*words} else " ".join(words[: 1 + bool(actions(words[0]))])
        if name in READS and not equals:
            runs = any("=" not in word and not word.startswith("-") for word in words[len(name.split()) :])
            found = [
                f"{known}=" for known in offered(name, READS[name].composes and not (runs and READS[name].runs[1]))
            ]
        elif name in READS:
            found = [f"{listed}{value} " for value in values_of(name, key)]
    return [word for word in found if word.startswith(start if equals else last)]


def values_of(name: str, key: str) -> tuple[str, ...]:
    """Return the options of a group, or the values of a key that has a list of them."""
    own = READS[name].option(key, READS[name].composes)
    field = READS[name].own[own] if own else all_fields().get(key)
    if field is None:
        return options(key) if key in GROUPS else ()
    return ("auto",) * ("auto" in field.metadata) + (("true", "false") if field.kind is bool else field.values)
