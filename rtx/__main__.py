"""`python -m rtx`, the same as `rtx`."""

from rtx.cli import entry

if __name__ == "__main__":
    entry()
