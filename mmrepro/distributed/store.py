"""Parts of the store of a process group that cannot be mixed up."""
from __future__ import annotations

import torch.distributed as dist

__all__ = ['round_prefix', 'round_store']


def round_prefix(store: dist.Store, topic: str, world: int) -> str:
    """Of the keys of one round of a topic; each of ``world`` members calls it once for a round."""
    prefix = f'mmrepro/{topic}/{world}'
    # one comes again only when all have come, so tickets count rounds, the same for all
    return f'{prefix}/{(dist.PrefixStore(prefix, store).add("tickets", 1) - 1) // world}'


def round_store(store: dist.Store, topic: str, world: int) -> dist.Store:
    """The part of the store with these keys."""
    return dist.PrefixStore(round_prefix(store, topic, world), store)
