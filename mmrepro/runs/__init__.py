"""Start, watch, cut down, kill and report one training."""
