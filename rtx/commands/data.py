"""`rtx data <action>`: make, check, look at, list and remove token stores."""

from collections.abc import Callable

from rtx.cli.options import read_words
from rtx.data import catalog
from rtx.data.store import Store
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


def show(store: Store) -> None:
    """Print what a store contains: its source, stamps, and the sizes of its splits."""
    for line in store.summary():
        print(printable(line))
    print(f"  fingerprint  {store.fingerprint}")


ACTIONS: dict[str, Callable[[DataConfig], object]] = {
    "prepare": lambda data: show(catalog.prepare_data(data, catalog.data_root())),
    "verify": lambda data: catalog.verify_data(data, catalog.data_root()),
    "info": lambda data: show(catalog.find_data(data, catalog.data_root())),
}
