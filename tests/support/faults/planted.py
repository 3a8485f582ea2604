"""Faults, each planted in run B of the tiny network (or in both), with the expected diagnosis."""
from faults import in_data, in_operators, in_state  # noqa: F401  they fill FAULTS
from faults.fault import FAULTS

__all__ = ['FAULTS']
