"""What a run leaves on disk. Imports no torch."""
