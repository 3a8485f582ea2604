"""What happens during a run."""
from .guard import OperatorGuardHook
from .preempt import PreemptHook
from .resume import ResumeHook
from .seed import SeedHook, TurnSeedHook

__all__ = ['OperatorGuardHook', 'PreemptHook', 'ResumeHook', 'SeedHook', 'TurnSeedHook']
