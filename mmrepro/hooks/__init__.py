"""What happens during a run."""
from .seed import SeedHook, TurnSeedHook

__all__ = ['SeedHook', 'TurnSeedHook']
