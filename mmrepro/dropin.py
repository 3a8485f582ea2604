"""Names that training scripts already call; change the import and nothing else."""
from __future__ import annotations

import random

import numpy as np
import torch

from . import seeds

__all__ = ['init_random_seed', 'seed_worker', 'seeded_generator', 'set_random_seed',
           'worker_init_fn']


def init_random_seed(seed: int | None = None, device: str = 'cuda') -> int:
    """Return the seed to use on every rank: ``seed``, or a number that rank 0 draws.

    Args:
        seed: 0 to 2**32 - 1, or None to draw from the operating system.
        device: accepted for MMDetection 2.x; the process group decides where it communicates.

    Raises:
        TypeError, ValueError: for a seed that is not an integer in range.
    """
    from .distributed.agreement import broadcast_seed
    return broadcast_seed(None if seed is None else seeds.check_seed(seed))


def set_random_seed(seed: int | None = None, deterministic: bool = False,
                    diff_rank_seed: bool = False) -> int:
    """Seed Python, NumPy, torch and all accelerators.

    ``deterministic=True`` also sets the determinism flags. Unlike with MMEngine's function,
    neighboring seeds share no random numbers, and with ``diff_rank_seed`` neither do ranks.
    A runner that is built later seeds everything by its own ``randomness``, with a warning where
    the seed is another; see :func:`mmrepro.activate` for one that a program configures.

    Returns:
        The seed in effect, the same on all ranks.

    Raises:
        TypeError, ValueError: for a seed that is not an integer in range.
        DeterminismError: a setting contradicts determinism.
    """
    from mmengine.dist import get_rank

    from . import determinism
    from .checkpoint.training_start import seeded_by_script
    from .config import RandomnessConfig
    seed = init_random_seed(seed)
    if deterministic:
        determinism.enable(**RandomnessConfig(deterministic=deterministic).flags)
    seeds.set_root(seed, of_a_run=False)
    seeded_by_script(seed)
    seeds.seed_all(seed, 'init', 'model', *((get_rank(),) if diff_rank_seed else ()))
    return seed


def worker_init_fn(worker_id: int, num_workers: int, rank: int, seed: int) -> None:
    """Seed a worker by the classic formula, ``num_workers * rank + worker_id + seed``.

    The stream repeats every epoch with ``persistent_workers=False``, and neighboring seeds overlap;
    with :func:`seed_worker`, neither happens.
    """
    worker_seed = num_workers * rank + worker_id + seed
    random.seed(worker_seed)
    np.random.seed(worker_seed)
    torch.manual_seed(worker_seed)


def seed_worker(worker_id: int) -> None:
    """Seed a worker of a plain PyTorch ``DataLoader``, as ``worker_init_fn``.

    Use it with :func:`seeded_generator`. The key is the loader's base seed of this pass and the
    worker, so every epoch draws new numbers.
    """
    info = torch.utils.data.get_worker_info()
    base = info.seed - info.id if info is not None else torch.initial_seed()
    seeds.seed_all(base % 2**64, 'worker', worker_id)


def seeded_generator(seed: int, name: str = 'loader') -> torch.Generator:
    """Return a generator for a plain PyTorch ``DataLoader``: its order, its workers' base seeds.

    >>> from torch.utils.data import DataLoader
    >>> loader = DataLoader(range(8), shuffle=True, generator=seeded_generator(42),
    ...                     worker_init_fn=seed_worker)
    >>> len(list(loader))
    8
    """
    return torch.Generator().manual_seed(
        seeds.derive(seeds.check_seed(seed), 'sampler', name).torch)
