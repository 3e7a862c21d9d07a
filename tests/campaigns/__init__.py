"""Long campaigns, which pytest does not collect: make presets, fuzz, attacks, faults."""
