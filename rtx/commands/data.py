"""`rtx data <action>`: make, check, look at, list and remove token stores."""

from collections.abc import Callable, Sequence
from typing import NoReturn

from rtx.cli.request import Request
from rtx.data import catalog
from rtx.data.store import Store
from rtx.errors import UserError, nearest, printable, shorten
from rtx.settings.schema import DataConfig


def main(request: Request) -> int:
    """Run `rtx data <action> <words>`; stores lie below RTX_DATA, or ./data."""
    action = request.names[0] if request.names else ""
    stores = request.names[1:]
    if action == "list" and len(request.words) == 1:
        print("\n".join(catalog.listing(catalog.data_root())))
    elif action == "remove" and stores:
        for name in stores:
            catalog.remove_store(catalog.data_root(), name)
    elif action in ACTIONS and not stores:
        # Imported once the action is known to be right: Hydra takes its time.
        from rtx.settings.compose import compose_data_checked

        ACTIONS[action](compose_data_checked(request.overrides))
    elif action in ACTIONS:
        raise UserError(f"{shorten(stores[0])!r} is not of the form key=value")
    else:
        refuse_action(action, request.words)
    return 0


def refuse_action(action: str, words: Sequence[str]) -> NoReturn:
    """Raise `UserError` for words that are no action, with those that are."""
    actions = [*ACTIONS, "list", "remove"]
    line = shorten(" ".join(["rtx data", *words]))
    near = "" if action in actions else nearest(action, actions)
    several = f"{', '.join(ACTIONS)} data=<set>, list, or remove <a store of that list>"
    raise UserError(f"{line}: say {several}{near}")


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
