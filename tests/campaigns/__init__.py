"""Long test campaigns, each run by `make`: presets, fuzz and faults. pytest does not collect them."""
