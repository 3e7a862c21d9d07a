"""`rtx completion bash`: a script by which bash completes commands, groups, options, keys and values.

To try it: source <(rtx completion bash). The script asks `rtx completion words` with the line up to the cursor.
"""

from __future__ import annotations

from rtx.config import GROUPS, all_fields
from rtx.errors import UserError
from rtx.keys import options
from rtx.options import READS

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
    _, *words, last = line.replace("--multirun", "-m").split(" ")
    name = max((name for name in READS if {*name.split()} <= {*words}), key=len, default="")
    key, equals, start = last.partition("=")
    if not name:
        later = [each.split()[len(words) :] for each in READS if each.split()[: len(words)] == words]
        return [f"{word} " for word in dict.fromkeys(each[0] for each in later) if word.startswith(last)]
    composing = READS[name].composes and not (READS[name].runs and len(words) > 1 and "=" not in words[1])
    if not equals:
        return [f"{known}=" for known in READS[name].known(composing) if known.startswith(last)]
    field = READS[name].own.get(READS[name].option(key, composing)) or all_fields().get(key)
    values = options(key) if key in GROUPS else field.values if field else ()
    if field:
        values = (*("auto",) * field.auto, *("true", "false") * (field.kind is bool), *values)
    listed = start[: start.rfind(",") + 1]  # of a sweep
    return [f"{listed}{value} " for value in values if f"{listed}{value}".startswith(start)]
