"""What can be set for a run: keys, presets, rules of what fits together, extensions.

Read `schema.py` first: every fact of a key is on the key. `compose.py` makes a configuration of the
words of a command line. No torch.
"""
