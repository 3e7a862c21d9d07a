"""The command line: finds a command, reads its words, prints help."""
