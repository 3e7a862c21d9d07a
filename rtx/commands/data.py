"""`rtx data prepare` and `rtx data verify`: make a data set's token store, or check every byte of it."""

from __future__ import annotations

from rtx.data.catalog import data_root, prepare_data, verify_data
from rtx.errors import UserError, nearest

USAGE = """\
rtx data prepare data=<name> [data.path=...]   write the token store, or mend it
rtx data verify  data=<name> [data.path=...]   compare every byte of the store with its checksums

data=stdlib   the Python standard library beside the interpreter (default)
data=text     your own: data.path=<file, folder or glob>
data=enwik8   the benchmark; downloaded, or from data.path=<enwik8.zip, enwik8, or a folder with one>

Stores lie in RTX_DATA (unset: ./data), one folder each, downloads in its folder `downloads`; remove any of them freely:
what is needed again is made again."""


def main(arguments: list[str]) -> int:
    """Run `rtx data <arguments>`; return the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    actions = {"prepare": prepare_data, "verify": verify_data}
    word, *overrides = arguments
    if word not in actions:
        raise UserError(f"rtx data {word}: must be one of {', '.join(actions)}{nearest(word, actions)}")
    if "-h" in overrides or "--help" in overrides:
        print(USAGE)
        return 0
    from rtx.compose import compose  # after the words are known to be right: Hydra takes its time

    store = actions[word](compose(overrides).data, data_root())
    if word == "prepare":
        sizes = ", ".join(f"{name} {len(tokens):,}" for name, tokens in store.splits.items())
        print(f"{store.folder}: {sizes} {store.unit}s; fingerprint {store.fingerprint}")
    return 0
