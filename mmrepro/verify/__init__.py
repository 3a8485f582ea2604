"""Train again, vary what must not matter, and compare the bits."""
