"""The two runs A and B that are compared, and the fresh processes that train them."""
from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple

from ..run.hooks.fingerprint import FingerprintHook
from ..runs.child import Training
from ..runs.launcher import plan
from ..runs.progress import run_with_progress
from .recording import RecordingPlan, attach

CHECKPOINT = 'localise.pth'  # of a run that is interrupted and resumed
# a self-check would end the run at the difference that is searched for
SETTINGS = {'randomness.self_checks': False}
MEMORY = 'randomness.virtual_ranks.memory'
CHANGED = ('changed in these runs: randomness.self_checks=False; where an iteration is recorded, '
           "randomness.virtual_ranks.memory='separate'")


class RunSpec(NamedTuple):
    """How to train run A or run B."""
    name: str  # 'A' or 'B'
    config: str  # path of a config without bases
    env: Mapping[str, str | None] = {}  # variables to set; None removes one
    ranks: int = 1  # processes
    resume_at: int | None = None  # end before this iteration, continue in another process
    checkpoint: str | None = None  # the run continues from this file
    validate_at: int | None = None  # the run validates before this iteration
    asked: dict[str, Any] = {}  # varied settings and variables; `config` and `env` contain them


def record(runner: Any, **plan: Any) -> None:
    """Attach a plan, whose fields come from JSON, to a runner that is about to train."""
    present = [hook for hook in runner.hooks if isinstance(hook, FingerprintHook)]
    for hook in present:
        hook.interval = 1  # the first iteration that differs is searched for
    if not present:
        runner.register_hook(FingerprintHook(), priority=FingerprintHook.priority)
    keep = {int(rank): number for rank, number in (plan.pop('keep') or {}).items()}
    attach(runner, RecordingPlan(**plan, keep=keep))


def trainings_of(spec: RunSpec, work_dir: str, plan: RecordingPlan) -> list[Training]:
    """Return the consecutive trainings of a run: two when it is interrupted."""
    # only one of the virtual ranks that share an optimizer executes its operators, and which one
    # depends on the number of processes
    separate = {} if plan.record is None or MEMORY in spec.asked else {MEMORY: 'separate'}

    def training(plan: RecordingPlan, **more: Any) -> Training:
        return Training(spec.config, work_dir, {**SETTINGS, **separate},
                        validate_after=spec.validate_at, attach=f'{__name__}:record',
                        given=plan._asdict(), **more)

    whole = dict(resume=spec.checkpoint is not None, checkpoint=spec.checkpoint)
    if spec.resume_at is None or spec.resume_at > plan.stop:
        return [training(plan, **whole)]
    unrecorded = plan._replace(record=None)
    late = plan.record is not None and plan.record >= spec.resume_at
    first, last = (unrecorded, plan) if late else (plan, unrecorded)
    return [training(first._replace(stop=spec.resume_at - 1), save=CHECKPOINT, **whole),
            training(last, resume=True, checkpoint=os.path.join(work_dir, CHECKPOINT))]


def start(spec: RunSpec, work_dir: str, recording: RecordingPlan,
          say: Callable[[str], None] = lambda text: None) -> None:
    """Train in fresh processes; ``say`` is called with a line on the progress."""
    run = plan(spec.name, work_dir, trainings_of(spec, work_dir, recording), spec.env, spec.ranks)
    run_with_progress([run], recording.stop + 1, say)
