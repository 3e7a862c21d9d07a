"""Files on disk -> batches of token ids."""
