"""Hooks of MMEngine that a run has for checks, signals and fingerprints."""
from .fingerprint import FingerprintHook
from .operator_guard import OperatorGuardHook
from .preempt import PreemptHook
from .self_check import SelfCheckHook
