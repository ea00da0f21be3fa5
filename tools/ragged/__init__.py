"""Which bucket a batch of unequal contexts should be looked up in, by regret."""
