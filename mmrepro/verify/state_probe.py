"""Name the state that a config loses when it resumes: why the variation ``resume`` differs."""
from __future__ import annotations

import json
import os
from typing import Any

from mmengine.dist import is_main_process
from mmengine.hooks import Hook

from ..checkpoint.lost_state import Lost, lost_state, snapshot
from ..errors import TrainingError
from ..reading import read_json

SEEN = 'seen.json'  # in the work directory of a run


def attach(runner: Any, **given: Any) -> None:
    """Let a runner that is about to train write what a :class:`ProbeHook` sees."""
    runner.register_hook(ProbeHook(**given), priority=ProbeHook.priority)


class ProbeHook(Hook):
    """Writes the attributes before iteration ``at`` and after the last iteration."""
    priority = 99  # before the hook that ends the training

    def __init__(self, at: int, iterations: int) -> None:
        self._at, self._iterations = at, iterations
        self._seen: dict[str, Any] = {}

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == self._at:
            self._seen['before'] = snapshot(runner)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: dict | None = None) -> None:
        if runner.iter + 1 == self._iterations and is_main_process():
            self._seen['after'] = snapshot(runner)
            with open(os.path.join(runner.work_dir, SEEN), 'w', encoding='utf-8') as file:
                json.dump(self._seen, file)


def lost_attributes(resumed: str, *runs: str) -> list[Lost]:
    """Return attributes that a resumed run lacks, even after its last iteration.

    Args:
        resumed: work directory of a run that was watched.
        runs: those of uninterrupted runs; what differs among them is not lost.

    Raises:
        TrainingError: a run ended before it wrote its attributes.
    """
    seen = []
    for folder in (*runs, resumed):
        if not os.path.exists(os.path.join(folder, SEEN)):
            raise TrainingError(f'the run in {folder} ended before its last iteration')
        seen.append(read_json(os.path.join(folder, SEEN), TrainingError))
    before, after = (lost_state([run[key] for run in seen[:-1]], seen[-1][key])
                     for key in ('before', 'after'))
    still = {(row.owner, row.attribute) for row in after}
    # an attribute that is there again after a few iterations is a cache
    return [row for row in before if (row.owner, row.attribute) in still]
