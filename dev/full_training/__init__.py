"""Trainings to their end: what a difference in the last bit costs, beside what a seed costs."""
