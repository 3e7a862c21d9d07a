"""The decoder: token ids to likelihoods."""
