"""`rtx data <action>`: make, check, look at, list and remove token stores."""

from __future__ import annotations

from collections.abc import Callable

from rtx.config import DataConfig
from rtx.data.catalog import data_root, make_recipe, open_files, prepare_data, prepared_folder, verify_data
from rtx.data.inventory import listing, named_store, remove_store
from rtx.data.look import summary
from rtx.data.recall import HELD_OUT, RecallStore
from rtx.errors import UserError, nearest


def main(arguments: list[str]) -> int:
    """Run `rtx data <action> <words>`; stores lie below RTX_DATA, or ./data.

    Raises:
        UserError: no such action, a wrong option or source, a damaged store, nothing to remove.
        RunFailed: a download or a full disk.
    """
    word, words = (arguments[0], arguments[1:]) if arguments else ("", [])
    if word == "list":
        if words:
            raise UserError(f"rtx data list {words[0]}: takes no words; rtx data info says more of one store")
        print("\n".join(listing(data_root())))
    elif word == "remove" and words and not any("=" in name for name in words):
        for folder in [named_store(data_root(), name) for name in words]:
            remove_store(data_root(), folder)
    elif word == "remove" and not any(name.startswith(("data=", "data.name=")) for name in words):
        raise UserError("rtx data remove: name a store, as rtx data list has it, or say data=<set>")
    elif word in ACTIONS:
        from rtx.compose import compose_data  # once the action is known to be right: Hydra takes its time

        ACTIONS[word](compose_data(words))
    else:
        known, said = [*ACTIONS, "list"], f"rtx data {word}".rstrip()
        raise UserError(f"{said}: say {', '.join(known[:-1])} or {known[-1]}{nearest(word, known)}")
    return 0


def prepare(data: DataConfig) -> None:
    """Make the store, or make sure of every byte of the one that is there."""
    store = prepare_data(data, data_root())
    if isinstance(store, RecallStore):
        print(f"data=recall: made on the fly, nothing to prepare; {answers(store)}; fingerprint {store.fingerprint}")
    else:
        sizes = ", ".join(f"{name} {len(tokens):,}" for name, tokens in store.splits.items())
        print(f"{store.folder}: {sizes} {store.unit}s; fingerprint {store.fingerprint}")


def verify(data: DataConfig) -> None:
    """Compare every byte with its checksums."""
    verify_data(data, data_root())


def info(data: DataConfig) -> None:
    """Say what is in a store that is there."""
    if data.name == "recall":
        store = RecallStore(data)
        print(f"data=recall: made on the fly; {answers(store)}; {store.vocabulary} ids; chance {store.chance:.4g}")
        print(f"fingerprint {store.fingerprint}")
        return
    root = data_root()
    prepared_folder(make_recipe(data, root), root)
    print("\n".join(summary(open_files(data, root), root)))


def answers(store: RecallStore) -> str:
    """Return how many answers the held-out splits have."""
    return ", ".join(f"{name} {store.count(name):,}" for name in HELD_OUT) + " answers"


def remove(data: DataConfig) -> None:
    """Remove a store and what is unfinished of it."""
    if data.name == "recall":
        raise UserError("data=recall: made on the fly, nothing on disk to remove")
    remove_store(data_root(), make_recipe(data, data_root()).folder(data_root()))


ACTIONS: dict[str, Callable[[DataConfig], None]] = {
    "prepare": prepare,
    "verify": verify,
    "info": info,
    "remove": remove,
}
