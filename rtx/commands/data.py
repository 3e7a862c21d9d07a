"""`rtx data prepare` and `rtx data verify`: make a data set's token store, or check every byte of it."""

from __future__ import annotations

from rtx.data.catalog import data_root, prepare_data, verify_data
from rtx.data.recall import HELD_OUT, RecallStore
from rtx.data.store import TokenStore
from rtx.errors import UserError, nearest

ACTIONS = {"prepare": prepare_data, "verify": verify_data}


def main(arguments: list[str]) -> int:
    """Run `rtx data <action> <overrides>`; stores lie below RTX_DATA, or ./data.

    Raises:
        UserError: no such action, a wrong option or source, a damaged store.
        RunFailed: a download or a full disk.
    """
    word, overrides = (arguments[0], arguments[1:]) if arguments else ("", [])
    if word not in ACTIONS:
        raise UserError(f"rtx data {word}".rstrip() + f": say {' or '.join(ACTIONS)}{nearest(word, ACTIONS)}")
    from rtx.compose import compose_data  # once the action is known to be right: Hydra takes its time

    store = ACTIONS[word](compose_data(overrides), data_root())
    if isinstance(store, RecallStore) and word == "prepare":
        sizes = ", ".join(f"{name} {store.count(name):,}" for name in HELD_OUT)
        print(f"data=recall: made on the fly, nothing to prepare; {sizes} answers; fingerprint {store.fingerprint}")
    elif isinstance(store, TokenStore) and word == "prepare":
        sizes = ", ".join(f"{name} {len(tokens):,}" for name, tokens in store.splits.items())
        print(f"{store.folder}: {sizes} {store.unit}s; fingerprint {store.fingerprint}")
    return 0
