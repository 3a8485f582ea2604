"""The digest of weights and optimizer state after every training iteration."""
from __future__ import annotations

import json
import sys
from typing import Any, Optional

from mmengine.hooks import Hook

from ..digests import state_digest

__all__ = ['PREFIX', 'DigestHook']

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
