"""Train again under varied conditions that must not matter, and compare the bits."""
