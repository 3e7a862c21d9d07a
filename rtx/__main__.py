"""`python -m rtx`, the same as `rtx`."""

from rtx.cli.main import entry

if __name__ == "__main__":
    entry()
