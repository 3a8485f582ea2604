"""Checkpoint files, where a run resumes, and state that lives in Python attributes."""
