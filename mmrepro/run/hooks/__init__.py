"""Hooks of MMEngine that a run has for checks, signals and fingerprints."""
from .fingerprint import FingerprintHook
from .preempt import PreemptHook
from .self_check import OperatorGuardHook, SelfCheckHook
