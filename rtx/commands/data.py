"""`rtx data <action>`: make, check, look at, list and remove token stores."""

from collections.abc import Callable

from rtx.cli.options import read_words
from rtx.data import catalog
from rtx.data.recall import RecallStore
from rtx.errors import UserError, nearest, printable, shorten
from rtx.settings.schema import DataConfig


def main(arguments: list[str]) -> int:
    """Run `rtx data <action> <words>`; stores lie below RTX_DATA, or ./data."""
    word, words = (arguments[0], arguments[1:]) if arguments else ("", [])
    if word == "list" and not words:
        print("\n".join(catalog.listing(catalog.data_root())))
    elif word == "remove" and words:
        for name in words:
            catalog.remove_store(catalog.data_root(), name)
    elif word in ACTIONS:
        # Imported once the action is known to be right: Hydra takes its time.
        from rtx.settings.compose import compose_data

        ACTIONS[word](compose_data(read_words("data", words).overrides))
    else:
        known, said = [*ACTIONS, "list", "remove"], shorten(" ".join(["rtx data", *arguments]))
        near = "" if word in known else nearest(word, known)
        raise UserError(
            f"{said}: say {', '.join(ACTIONS)} data=<set>, list, or remove <a store of that list>{near}"
        )
    return 0


def show(store: catalog.Store) -> None:
    """Print what is in a store: where it is from, its stamps, and the sizes of its splits."""
    if isinstance(store, RecallStore):
        each = ", ".join(
            f"{store.scored(tokens):,} answers in {name}" for name, tokens in store.held_out.items()
        )
        print(f"data={store.name}: made on the fly; {each}; {store.vocabulary} ids")
    else:
        print(f"{store.folder}: {store.name}, {catalog.disk_size(store.folder)} on disk")
        for name in ("source", "tokenizer", "stamps"):
            facts = ", ".join(f"{key} {value}" for key, value in store.describe()[name].items())
            print(printable(f"  {name:<12} {facts or 'none'}"))
        for name, of in store.facts.items():
            sizes = ", ".join(f"{of[kind]:,} {kind}" for kind in ("documents", "bytes", "words"))
            print(f"  {name:<12} {of['units']:,} {store.unit}s, {sizes}")
    print(f"  fingerprint  {store.fingerprint}")


ACTIONS: dict[str, Callable[[DataConfig], object]] = {
    "prepare": lambda data: show(catalog.prepare_data(data, catalog.data_root())),
    "verify": lambda data: catalog.verify_data(data, catalog.data_root()),
    "info": lambda data: show(catalog.find_data(data, catalog.data_root())),
}
