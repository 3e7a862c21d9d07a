"""The version of rtx."""

__version__ = "0.4.0"
