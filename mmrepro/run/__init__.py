"""One run: the Runner, what happens at each of its moments, its hooks."""
