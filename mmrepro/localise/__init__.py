"""Name the first thing that differs between two runs."""
