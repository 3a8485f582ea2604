"""Two recordings of an iteration: the first record that differs, and why."""
