"""What happens during a run."""
from .preempt import PreemptHook
from .resume import ResumeHook
from .seed import SeedHook, TurnSeedHook

__all__ = ['PreemptHook', 'ResumeHook', 'SeedHook', 'TurnSeedHook']
