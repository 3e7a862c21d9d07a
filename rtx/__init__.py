"""rtx: Routing Transformer experiments from the command line, and its attention patterns as a library."""

__version__ = "0.2.0"
