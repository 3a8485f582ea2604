"""What happens during a run."""
from .resume import ResumeHook
from .seed import SeedHook, TurnSeedHook

__all__ = ['ResumeHook', 'SeedHook', 'TurnSeedHook']
