"""Start, watch, reduce, kill and report one training."""
