"""What stands between the words of a command line and a checked configuration: flags, overrides, help, sweeps."""
