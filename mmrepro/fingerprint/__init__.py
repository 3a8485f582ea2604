"""Fingerprints and manifest of a run, by which two runs are compared."""
