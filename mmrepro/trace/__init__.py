"""Record what a run does, compare runs, and name the first thing that differs."""
