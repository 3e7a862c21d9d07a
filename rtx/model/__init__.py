"""The decoder: from tokens to the likelihood of each."""
