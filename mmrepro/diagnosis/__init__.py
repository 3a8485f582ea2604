"""Find the first difference of two recordings of an iteration, and its cause."""
