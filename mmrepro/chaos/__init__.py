"""Kill a training run at random moments, resume it, and compare it with the uninterrupted run."""
from .command import main

__all__ = ['main']
