"""Facts on a run beside its bits, written by each rank at the end of the training."""
from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmrepro.distributed.unwrap import unwrap
from mmrepro.objects.digests import local_part

__all__ = ['RunFactsHook', 'facts_of']

FILE = 'facts.rank{}.json'
MEMORY = {'sharing': 'shared', 'sharding': 'sharded', '': 'separate'}  # by attribute of the wrapper


@HOOKS.register_module()
class RunFactsHook(Hook):
    """Writes how weights were held, what was repeated, and whether losses were numbers."""
    priority = 'LOWEST'  # behind those that count

    def __init__(self) -> None:
        self._finite = True

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        self._finite &= all(math.isfinite(float(torch.as_tensor(value).detach()))
                            for value in (outputs or {}).values())

    def after_train(self, runner: Any) -> None:
        from mmrepro.run.hooks.self_check import self_checks
        memory = [name for name in ('sharing', 'sharding')
                  if getattr(runner.model, name, None) is not None]
        finite = self._finite and all(bool(torch.isfinite(local_part(one)).all())
                                      for one in unwrap(runner.model).parameters())
        facts = dict(process=os.getpid(), memory=MEMORY[memory[0] if memory else ''],
                     finite=finite,
                     repeated=self_checks(runner), check_steps=runner.repro.self_checks.steps,
                     check_samples=runner.repro.self_checks.samples)
        Path(runner.work_dir, FILE.format(runner.rank)).write_text(json.dumps(facts))


def facts_of(work_dir: Any) -> dict[str, Any]:
    """Return the facts of all ranks of a run.

    Returns:
        dict(memory: 'sharded', or 'shared' or 'separate' in the processes that have several ranks,
        'mixed' if ranks of one process differ; finite; checks: the settings; steps and samples: how
        many were repeated, by all ranks).
    """
    ranks: list[dict[str, Any]] = [json.loads(path.read_text())
                                   for path in sorted(Path(work_dir).glob(FILE.format('*')))]
    processes = [one['process'] for one in ranks]
    found = {one['memory'] for one in ranks
             if processes.count(one['process']) > 1 or one['memory'] == 'sharded'}
    return dict(
        memory='mixed' if len(found) > 1 else min(found, default='separate'),
        finite=all(one['finite'] for one in ranks),
        checks=sorted({(one['check_steps'], one['check_samples']) for one in ranks}),
        steps=sum(one['repeated'].get('steps', 0) for one in ranks),
        samples=sum(one['repeated'].get('samples', 0) for one in ranks))
