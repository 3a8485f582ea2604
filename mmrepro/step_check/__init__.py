"""A training step is repeated from the same state on the same batch, and its bits are compared."""
