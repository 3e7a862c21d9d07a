"""What a run can be asked for: keys, presets, rules of what fits together, extensions. Imports no torch."""
