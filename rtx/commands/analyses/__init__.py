"""The analyses of `rtx analyze`, a file each: what it computes of a run, prints and draws."""
