"""Record one iteration of a run: data, operators, hooks, and the states in between.

The two runs A and B that are compared train in fresh processes. Recording draws no random number
and changes no bit of the training.
"""
from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Callable, NamedTuple

import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from torch.utils._python_dispatch import _disable_current_modes

from ..data import position_of_loader
from ..distributed.unwrap import optim_wrappers, param_schedulers, unwrap
from ..fingerprint import generator_states, records
from ..fingerprint.attributes import record_attributes
from ..fingerprint.digest import named_averages
from ..fingerprint.operator_recorder import OperatorRecorder, method_site
from ..fingerprint.records import Record, read_records, write_records
from ..objects.walks import named_tensors
from ..run.hooks.fingerprint import FingerprintHook
from ..runs.child import Training
from ..runs.launcher import plan, run_with_progress
from ..runs.stopping import StopTraining
from ..util.scoped import replaced, stock_class
from .compare_modules import ValueDifference, compare_tensors
from .diagnosis import Diagnosis, diagnose
from .sample_recorder import SampleRecorder, read_samples

# methods of hooks between two training steps; the iterations of a validation change no weights
HOOK_METHODS = (
    'before_train_epoch', 'before_train_iter', 'after_train_iter', 'after_train_epoch',
    'before_val', 'before_val_epoch', 'after_val_epoch', 'after_val', 'before_save_checkpoint',
    '_before_epoch', '_before_iter', '_after_iter', '_after_epoch')
OPERATORS_FILE, BATCH_FILE = 'operators.rank{}.jsonl', 'batch.rank{}.json'
KEPT_FILE = 'kept.rank{}.pt'  # results of one operator
OWN = 'mmrepro.'  # hooks of this package change nothing that the training uses
PLAIN = (bool, int, float, str)
LONGEST = 15  # items of a list that is a plain value


class RecordingPlan(NamedTuple):
    """The records that a run writes, and where it ends."""
    folder: str  # for the files; it exists
    stop: int  # the run ends after this iteration, counted from 0
    record: int | None = None  # iteration to record; None for none
    positions: tuple[int, ...] | None = None  # of its samples, in any epoch; None for all
    keep: dict[int, int] | None = None  # rank -> record of an operator whose tensors are kept


def attach(runner: Any, plan: RecordingPlan) -> None:
    """Make a runner record according to ``plan``; call it before ``runner.train()``.

    ``runner.train()`` will raise :class:`~mmrepro.runs.stopping.StopTraining`.
    """
    hook = _RecordingHook(runner, plan)
    runner.register_hook(hook, priority=hook.priority)
    if plan.record is not None:
        hook.instrument_loaders()


def read_stream(folder: str, rank: int, *others: str) -> list[Record]:
    """Read all records of a run: the samples of the batch, then the iteration in its order.

    Samples in the batches of ``others``, folders of other runs, are included: when a transform
    rejects a sample, the batch has another sample instead, and the rejected one may differ.
    """
    batches = []
    for batch_folder in (folder, *others):
        with open(os.path.join(batch_folder, BATCH_FILE.format(rank)), encoding='utf-8') as file:
            batches.append(json.load(file))
    samples = read_samples(folder, rank)
    if all(batches):
        wanted = {(epoch, position) for batch in batches for epoch, position in batch}
        samples = [record for record in samples if record.sample in wanted]
    return samples + read_records(os.path.join(folder, OPERATORS_FILE.format(rank)))


def diagnose_ranks(iteration: int, folder_a: str, folder_b: str,
                   ranks: Sequence[int]) -> Diagnosis | None:
    """Diagnose the first difference on any rank."""
    diagnoses = [diagnose(iteration, rank, read_stream(folder_a, rank, folder_b),
                          read_stream(folder_b, rank, folder_a)) for rank in ranks]
    return min(filter(None, diagnoses), key=Diagnosis.order, default=None)


def compare_kept(folder_a: str, folder_b: str, rank: int) -> ValueDifference | None:
    """Compare the tensors that both runs kept; return the first difference, None when all agree."""
    kept = [torch.load(os.path.join(folder, KEPT_FILE.format(rank)), weights_only=True)['outputs']
            for folder in (folder_a, folder_b)]
    differences = (compare_tensors(a, b) for a, b in zip(*kept)
                   if a.shape == b.shape and a.dtype == b.dtype)
    return next(filter(None, differences), None)


class _RecordingHook(Hook):
    """Wraps the loaders, the training step and the hooks of a runner."""
    priority = 0  # before_train has to come before any hook that could train

    def __init__(self, runner: Any, plan: RecordingPlan) -> None:
        self._runner, self._plan = runner, plan
        self._recorder: Any = None  # OperatorRecorder while hooks are recorded
        self._wrapped = ExitStack()  # methods of hooks
        self._asked: tuple[str, ...] = ()  # for clock, entropy, ... when the data were built

    def instrument_loaders(self) -> None:
        """Record the transforms of the training data; called before worker processes exist."""
        plan, runner = self._plan, self._runner
        samples = SampleRecorder(plan.folder, get_rank(), plan.positions)
        build_loop, build_loader = runner.build_train_loop, runner.build_dataloader

        def recorded_loader(*args: Any, **kwargs: Any) -> Any:
            watch = generator_states.Watch(only_user=True)
            with watch:
                loader = build_loader(*args, **kwargs)
            self._asked = watch.take()
            samples.instrument(loader.dataset)
            return loader

        def recorded_loop(loop: Any) -> Any:
            with replaced(runner, build_dataloader=recorded_loader):
                return build_loop(loop)

        runner.build_train_loop = recorded_loop

    def before_train(self, runner: Any) -> None:
        loop = runner.train_loop  # the loop exists from here on
        run_iter = loop.run_iter

        def recorded_run_iter(*args: Any) -> None:
            iteration, record = loop.iter, self._plan.record
            if record == iteration + 1:
                self._start()
            with self._recording(args[-1]) if record == iteration else nullcontext():
                run_iter(*args)
            if iteration >= self._plan.stop:
                for hook in runner.hooks:
                    if isinstance(hook, FingerprintHook):
                        hook.record_variables()
                raise StopTraining

        loop.run_iter = recorded_run_iter
        if self._plan.record == loop.iter:
            self._start()

    @contextmanager
    def _recording(self, batch: Any) -> Iterator[None]:
        """Record the iteration that runs in this block."""
        recorder = self._recorder
        self._write_batch()
        self._record_state('start', '', records.BEFORE_ITERATION)
        self._write_explanations()
        recorder.note('data', 'batch', 'batch', dict(named_tensors(batch)))
        with recorder:
            yield
        self._record_state('start', '', records.AFTER_ITERATION)
        self._wrapped.close()
        write_records(self._path(OPERATORS_FILE), recorder.records())
        if recorder.kept:
            torch.save(recorder.kept, self._path(KEPT_FILE))

    def _write_explanations(self) -> None:
        """Add records that are not compared: the process, attributes, globals, calls while data
        were built."""
        explain = self._recorder.explanation
        record_attributes(self._recorder, self._runner)
        explain('', records.DATASET, calls=self._asked)
        batches = self._runner.train_dataloader.batch_sampler
        explain('', records.SAMPLER, stack=(method_site(stock_class(
            getattr(batches, 'sampler', batches)), '__iter__'), ))

    def _path(self, file: str) -> str:
        return os.path.join(self._plan.folder, file.format(get_rank()))

    def _write_batch(self) -> None:
        """Write the samples of this batch: workers have loaded later samples already."""
        loader_position = position_of_loader(self._runner.train_dataloader)
        drawn: Sequence[Any] = ()
        if loader_position is not None and loader_position.drawn:
            drawn = loader_position.drawn[0]
        samples = [[index.epoch, index.position] for index in drawn if hasattr(index, 'position')]
        with open(self._path(BATCH_FILE), 'w', encoding='utf-8') as file:
            json.dump(samples or None, file)

    def _start(self) -> None:
        """Begin to record hooks, in the iteration before the recorded one."""
        if self._recorder is not None:
            return
        keep = (self._plan.keep or {}).get(get_rank())
        self._recorder = OperatorRecorder(unwrap(self._runner.model), keep)
        for hook in self._runner.hooks:
            for name in HOOK_METHODS:
                overrides = getattr(type(hook), name, None) is not getattr(Hook, name, None)
                if overrides and not type(hook).__module__.startswith(OWN):
                    self._wrapped.enter_context(
                        replaced(hook, **{name: self._recorded(hook, name)}))

    def _recorded(self, hook: Hook, name: str) -> Callable[..., Any]:
        method, path = getattr(hook, name), f'{type(hook).__name__}.{name}'
        stack = (method_site(type(hook), name), )

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get('mode', 'train') != 'train':
                return method(*args, **kwargs)
            if not self._recorder.at_note:
                self._record_state('hook', path, records.BEFORE_HOOK, stack)
            self._recorder.sites.hook = path
            result = method(*args, **kwargs)
            self._recorder.sites.hook = ''
            self._record_state('hook', path, records.AFTER_HOOK, stack)
            return result

        return recorded

    def _record_state(self, phase: records.Phase, path: str, name: str, stack: Any = ()) -> None:
        with _disable_current_modes():
            self._recorder.note(phase, path, name, _tensors(self._runner),
                                _numbers(self._runner), stack)


def _tensors(runner: Any) -> dict[str, torch.Tensor]:
    """Return parameters, gradients, buffers, and state of optimizers and averages, by name."""
    model = unwrap(runner.model)
    result: dict[str, torch.Tensor] = {}
    names = {}
    for name, parameter in model.named_parameters():
        result[f'parameter {name}'] = parameter.detach()
        names[id(parameter)] = name
        if parameter.grad is not None:
            result[f'gradient {name}'] = parameter.grad
    result.update((f'buffer {name}', buffer) for name, buffer in model.named_buffers())
    for prefix, optimizer in _optimizers(runner).items():
        for tensor, state in optimizer.state.items():
            owner = names.get(id(tensor), 'of no parameter of the model')
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    result[f'{prefix}{key} {owner}'] = value
    result.update((f'average {name}', value) for name, value in named_averages(runner.hooks))
    return result


def _numbers(runner: Any) -> list[str]:
    """Return the settings of parameter groups, schedulers and loss scaling, as ``name=value``."""
    settings = []
    for prefix, optimizer in _optimizers(runner).items():
        for number, group in enumerate(optimizer.param_groups):
            settings += _named(f'{prefix}group {number} ', group)
    for number, scheduler in enumerate(sum(param_schedulers(runner).values(), [])):
        settings += _named(f'{type(scheduler).__name__} {number} ', vars(scheduler))
    scaler = getattr(runner.optim_wrapper, 'loss_scaler', None)
    if scaler is not None and hasattr(scaler, 'state_dict'):
        settings += [f'loss scaler {key}={value!r}' for key, value in scaler.state_dict().items()]
    return settings


def _optimizers(runner: Any) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers by the prefix of their names in a record."""
    return {f'optimizer {name} ' if name else 'optimizer ': wrapper.optimizer
            for name, wrapper in optim_wrappers(runner.optim_wrapper).items()}


def _named(prefix: str, values: dict[str, Any]) -> list[str]:
    return [f'{prefix}{name}={value!r}' for name, value in sorted(values.items())
            if _is_plain(value)]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, PLAIN) or (
        isinstance(value, (tuple, list)) and len(value) <= LONGEST and all(map(_is_plain, value)))


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
          on_progress: Callable[[str], None] = lambda text: None) -> None:
    """Train in fresh processes; ``on_progress`` is called with a line on the progress."""
    run = plan(spec.name, work_dir, trainings_of(spec, work_dir, recording), spec.env, spec.ranks)
    run_with_progress([run], recording.stop + 1, on_progress)
