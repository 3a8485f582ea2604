"""Faults, each planted in side B of the tiny run (or in both), with what has to be said of it."""
from faults import in_data, in_operators, in_state  # noqa: F401  they fill FAULTS
from faults.fault import FAULTS

__all__ = ['FAULTS']
