"""The tests of rtx."""
