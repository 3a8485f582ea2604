"""What happens during a run."""
from .fingerprint import FingerprintHook
from .operator_guard import OperatorGuardHook
from .preempt import PreemptHook
from .resume import ResumeHook
from .seed import HookSeedHook, SeedHook

__all__ = ['FingerprintHook', 'HookSeedHook', 'OperatorGuardHook', 'PreemptHook', 'ResumeHook',
           'SeedHook']
