"""Long campaigns, which pytest does not collect: make presets, make fuzz, make faults."""
