"""The digest of weights and optimizer state after every training iteration."""
from __future__ import annotations

import hashlib
import json
import sys
from typing import Any, Optional

import torch
from mmengine.hooks import Hook

__all__ = ['PREFIX', 'DigestHook', 'state_digest']

# a line of standard output that starts so carries one iteration as JSON
PREFIX = '@mmrepro-digest '


class DigestHook(Hook):
    """Prints one line per iteration: loss, digest of the weights, digest of the optimizer."""

    priority = 'LOWEST'

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Optional[dict] = None) -> None:
        loss = (outputs or {}).get('loss')
        record = dict(
            iteration=runner.iter + 1,
            epoch=runner.epoch + 1,
            total=runner.max_iters,
            loss=None if loss is None else float(loss.detach()),
            weights=state_digest(runner.model.state_dict()),
            optimizer=state_digest(runner.optim_wrapper.state_dict()))
        print(PREFIX + json.dumps(record), file=sys.stdout, flush=True)


def state_digest(state: Any) -> str:
    """SHA-256 over the bytes of everything in nested dicts, lists and tuples, keys sorted.

    Tensors count with dtype and shape; other values with their ``repr``.
    """
    digest = hashlib.sha256()
    _update(digest, state)
    return digest.hexdigest()


def _update(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        digest.update(f'tensor {tensor.dtype} {tuple(tensor.shape)}'.encode())
        # as bytes, because numpy has no bfloat16
        digest.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
    elif isinstance(value, dict):
        digest.update(f'dict {len(value)}'.encode())
        for key in sorted(value, key=repr):
            digest.update(repr(key).encode())
            _update(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f'list {len(value)}'.encode())
        for item in value:
            _update(digest, item)
    else:
        digest.update(repr(value).encode())
