"""The actions of mmrepro in a run, from its first moment to its last, in order.

:class:`mmrepro.ReproRunner` calls the method of each moment. Methods with the name of an event of
MMEngine are generators: the code before ``yield`` runs before all hooks of the event, the code
after it when all of them have run, whatever their priority.
"""
from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from mmengine.device import get_device
from mmengine.dist import get_rank, get_world_size, is_distributed, is_main_process
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.runner import BaseLoop, EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from .. import determinism, seeds, virtual
from ..checkpoint.choosing import plan_resume, writing
from ..checkpoint.files import without_code
from ..checkpoint.fit import left_out as left_out_weights
from ..checkpoint.kept_attributes import keep_orders
from ..checkpoint.rank_state import EvaluatedModel
from ..checkpoint.resuming import Comparison, Restoration, check_streams, continue_loop
from ..checkpoint.saving import CheckpointWriter
from ..checkpoint.training_start import TrainingStart
from ..config import RandomnessConfig
from ..data import position_of_loader, use_stream
from ..data.sample_check import left_out
from ..distributed import agreement
from ..distributed.scheduler import current, isolate_class_attributes
from ..distributed.unwrap import unwrap
from ..errors import RandomnessError
from ..facts import own_code
from ..facts.collect import collect_facts, variable_facts
from ..facts.compatibility import HISTORY
from ..facts.own_code import code_facts
from ..facts.training_data import compared_files, training_facts
from ..objects.digests import exact_digest
from ..ops.contract import run_deferred_checks
from ..selfcheck.validation import ValidationCheck
from ..selfcheck.witness import RESUMED_ITERATIONS, witness_of
from ..util.scoped import replaced
from ..util.text import listed
from ..version import __version__
from .hooks import FingerprintHook, OperatorGuardHook, PreemptHook, SelfCheckHook
from .hooks.preempt import signal_handlers
from .hooks.witness_records import WitnessRecords, begin_witness, save_for_witness
from .identity import digests_of, end_of, outcome, track_results, track_start
from .process_settings import ProcessSettings


class RunLifecycle:
    """The moments of one run.

    Args:
        settings: arguments of the runner that is being built, changed in place.

    Attributes:
        config: the randomness in effect, the seed included.
        facts: settings, versions and hardware, see :mod:`mmrepro.facts.collect`.
        process: flags, variables and replacements in this process.
        resume: the plan: the checkpoint that the run continues from, and why no other.
        comparison: how the run differs from the one that it continues.
        restoration: brings back what MMEngine does not.
        checkpoints: writes checkpoints.
        start: weights and loops at the start of ``train()``.
        evaluated: buffers of the model that is validated or tested.
        validation: compares the state that a validation may not change.
    """
    resuming = False  # MMEngine resumes from the checkpoint that it loads
    # what has ended, and what the loops of MMEngine count when all hooks have been called
    _epochs_ahead = _iterations_ahead = 0
    _begun = False  # an iteration
    _ended: int | None = None  # the last iteration that has
    _overridden: int | None = None  # seed that the program had set before

    # ------------------------------------------------------------------ the runner is built

    def __init__(self, settings: dict[str, Any], runner_class: type = Runner) -> None:
        variables, as_given = dict(os.environ), dict(settings)
        self._objects = [name for name, value in settings.items()
                         if isinstance(value, (Dataset, DataLoader, Module, BaseLoop,
                                               OptimWrapper))]
        given = virtual.settings_on_ranks(settings)
        self.witness = witness_of(given, runner_class, as_given, variables)
        self.records = WitnessRecords()
        self._configured: list[Hook] = []  # hooks of the config
        self._by_code: list[Hook] = []  # hooks that were registered later
        self.resume = plan_resume(settings, given.resume_strict)
        self.comparison = Comparison(self.resume)
        self.restoration = Restoration(self.resume)
        self.differences: list[str] = []  # lines for the log, of the start of a resumed run
        self.train_loop: Any = None  # once it was built and moved
        settings.update(self.resume.settings)
        # now, because the model, the loaders and their workers are built from this seed
        self.config = self.resume.seeded(given)
        self.facts: dict[str, Any] = {}
        self.process = ProcessSettings(self.config)
        self.checkpoints = CheckpointWriter(self.config.uses_stock_streams)
        self.start = TrainingStart(
            self.config, settings, self.resume.point is not None)
        self.evaluated = EvaluatedModel(self.config.uses_stock_streams)
        self.validation = ValidationCheck(self.config)

    def set_seed(self, config: RandomnessConfig, cfg: Any) -> None:
        """Put the randomness in force, once all ranks know the seed; ``cfg`` is the run's."""
        self.config = config
        self._overridden = seeds.seed_of_program()
        self.process.apply(config)
        self.facts = {**collect_facts(cfg, config.as_dict(), get_world_size()), **variable_facts()}
        self.differences = self.comparison.compare(self.facts)
        if is_distributed():
            agreement.check_files('code', own_code.files())
            agreement.check_agreement(agreement.start_fields(cfg.pretty_text, config.as_dict()))

    def hooks(self, present: Sequence[Hook]) -> list[Hook]:
        """Return the hooks to register beside ``present``, those of the config."""
        hooks: list[Hook] = [PreemptHook()]
        if self.config.deterministic:
            hooks.insert(0, self._guard())
        if self.config.deterministic is True:
            hooks.insert(1, SelfCheckHook())
        if self.config.wants_witness:
            hooks.append(self.records)
        # a hook of the config, with other settings, replaces ours
        return [hook for hook in hooks
                if not any(isinstance(other, type(hook)) for other in present)]

    def _guard(self) -> OperatorGuardHook:
        """Return the operator guard; a portable run has a table of torch's operators anyway."""
        if self.config.numerics.cpu != 'portable' or get_device() != 'cpu':
            return OperatorGuardHook()
        on_unknown = 'error' if self.config.deterministic is True else 'warn'
        return OperatorGuardHook(allow=['aten::*'], devices=['cpu'], on_unknown=on_unknown)

    def built(self, logger: Any, hooks: Sequence[Hook]) -> None:
        """Log the resume and the randomness in effect; the log file has every value and flag."""
        self._configured = list(hooks)
        for line in self.resume.passed_over:
            logger.warning(line)
        if self.resume.point is not None:
            logger.info('\n'.join([self.resume.point.report, *self.differences]))
        if self._overridden not in (None, self.config.seed):
            logger.warning(
                f'mmrepro.set_random_seed({self._overridden}) was called before, and this run has '
                f'the seed {self.config.seed} of its own randomness: call mmrepro.activate('
                f'randomness=dict(seed={self._overridden})) instead, or write it into the config')
        report = self.process.report
        changes = len(report.changes) if report is not None else 0
        summary, table = self.config.summary(), self.config.table()
        conditions = [self.start.condition] if self.start.condition else []
        if self.comparison.history:
            conditions.append(f'if no bit depends on what differs ({self.comparison.history})')
        for condition in conditions:
            what, _, promises = summary.partition('\n')
            summary, table = f'{what}\n  {condition}:\n{promises}', f'{table}\n  {condition}'
        logger.info(f'mmrepro {__version__}: {summary}\n  {changes} flags and '
                    'variables were changed: the log file says which, and why')
        details = logger.makeRecord(
            logger.name, logging.INFO, __file__, 0,
            f'mmrepro {__version__}\n{table}\n\n{report}', (), None)
        for handler in logger.handlers:
            if isinstance(handler, logging.FileHandler) and logger.isEnabledFor(logging.INFO):
                handler.handle(details)

    # ------------------------------------------------------------------- train() is called

    @contextmanager
    def training(self, runner: Any) -> Iterator[None]:
        """Call MMEngine's ``train`` in this block."""
        self.process.hold()
        if self.config.deterministic is True:
            determinism.check_compiled(runner.model, runner.cfg.get('compile'),
                                       self.config.numerics.cpu)
        try:
            with writing(runner.work_dir), signal_handlers(runner), self.start.training(runner):
                yield
                virtual.check_shared_weights(runner)  # hooks of ``after_run`` were the last
        finally:
            self.witness.close()
            for hook in runner.hooks:  # an error ends a training without ``after_train``
                if isinstance(hook, FingerprintHook):
                    hook.close()

    def train_loop_built(self, runner: Any, loop: Any) -> None:
        """Compare the training data with those of the resumed run, and continue its loop."""
        data = {**training_facts(loop.dataloader.dataset), **agreement.late_fields()}
        self.facts.update(data)
        for line in self.comparison.check_data(data):
            runner.logger.warning(line)
        point = self.resume.point
        self._observe(runner.logger, () if point is None else point.facts)
        continue_loop(self.resume, loop)
        self.train_loop = loop

    def _observe(self, logger: Any, then: Iterable[str] = ()) -> None:
        """Add facts on what was imported or read since the last look, and compare them.

        Variables that only the resumed run has read by now have the value that they have here.
        """
        known = {**code_facts(), **variable_facts(then)}
        new = {name: value for name, value in known.items() if name not in self.facts}
        self.facts.update(new)
        for line in self.comparison.compare_late(new):
            logger.warning(line)
        if self.comparison.history:
            self.facts[HISTORY] = self.comparison.history

    def before_run(self, runner: Any) -> Iterator[None]:
        yield
        loops = (runner._train_loop, runner._val_loop, runner._test_loop)
        for name in left_out(self.config, [
                runner._train_dataloader, runner._val_dataloader, runner._test_dataloader,
                *(getattr(loop, 'dataloader', None) for loop in loops)]):
            runner.logger.info(f'samples of {name} are not checked: '
                               'randomness.self_checks.nonrepeatable_datasets')
        self._by_code = [hook for hook in runner.hooks if hook not in self._configured]
        self.witness.add_hooks(self._by_code)
        self.seed('init', 'weights')

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> Iterator[None]:
        yield
        if not self.resuming:
            model = unwrap(runner.model)
            own = dict(model.named_parameters())
            absent = sorted(own.keys() & left_out_weights(
                model, checkpoint.get('state_dict', checkpoint)).keys())
            if absent:
                runner.logger.warning(
                    f'{len(absent)} of {len(own)} parameters of the model are not in '
                    f'{runner._load_from}, and keep their initial values: {listed(absent, 3)}')
        elif not self.config.uses_stock_streams:
            self.restoration.take_state(checkpoint, runner)

    def _check_start(self, runner: Any) -> None:
        """Refuse a training whose ranks would begin elsewhere, with other data or other weights.

        Where nodes have disks of their own, so have their ranks checkpoints and data.
        """
        if get_world_size() == 1:
            return
        agreement.check_files('code', own_code.files())  # files that were imported since the start
        agreement.check_files('training data', compared_files(runner.train_dataloader.dataset))
        start = {name: value for name, value in self.facts.items() if name.startswith('train_')}
        replicated = isinstance(runner.model,
                                (DistributedDataParallel, virtual.VirtualDataParallel))
        if replicated and self.config.virtual_ranks.memory != 'sharded':  # compares by itself
            # weights are copied from rank 0 before a checkpoint is loaded, and never after that
            start['weights at the start'] = exact_digest(
                dict(unwrap(runner.model).named_parameters()))
        # a module of the model may have set flags when one of the virtual ranks imported it
        flags = {name: value for name, value in determinism.snapshot().items()
                 if name.startswith('torch.')}
        agreement.check_agreement({'resume.iteration': runner.iter, **start, **flags})

    def before_train(self, runner: Any) -> Iterator[None]:
        self._check_start(runner)
        check_streams(self.resume, runner)
        self.evaluated.leave()  # an error may have ended an evaluation early
        yield
        track_start(runner, self.facts)
        self.evaluated.leave()  # a hook may have evaluated
        self.validation.training_begins()
        if self.config.uses_stock_streams:
            return
        virtual.refuse_cached_ranks()
        if current() is not None:
            isolate_class_attributes([*runner.hooks, *runner.model.modules()])
        self.checkpoints.check_hooks(runner)
        self.start.begin(runner)
        if self.restoration.restore(runner):
            # checkpoints are written before a validation, on which best checkpoints and early
            # stopping depend
            runner.logger.info(f'the run ended before the validation at iteration {runner.iter}: '
                               'it comes first')
            runner.val_loop.run()
        virtual.share_weights(runner)
        if self.config.wants_witness:
            point = self.resume.point
            begin_witness(runner, self.witness, self.records, self._by_code,
                          None if point is None else point.path)

    # ----------------------------------------------------------------- epochs and iterations

    def before_train_epoch(self, runner: Any) -> Iterator[None]:
        _tell_epoch(runner)
        # a run that resumes within the epoch comes here as well, and hooks keep what they draw
        self.seed('hook', 'epoch', runner.epoch)
        yield
        self._key_exchanged(runner, runner.train_dataloader, 'sample')
        keep_orders(runner.train_dataloader)
        _tell_epoch(runner)  # again: a hook may have given the loop another loader
        self.restoration.seek_data(runner)  # after all hooks that move the data
        self.seed('hook', 'loop', runner.iter)

    def before_train_iter(self, runner: Any, batch_idx: int, **details: Any) -> Iterator[None]:
        self.process.check_flags(runner.logger)
        self.evaluated.leave()
        self.validation.training_goes_on(runner)
        loader_position = position_of_loader(runner.train_dataloader)
        if loader_position is not None:
            loader_position.begin_iteration()
        self._begun = True
        self.seed('hook', runner.iter)
        yield
        self.evaluated.leave()
        self.restoration.check_set_up(runner)
        self.checkpoints.begin_iteration(runner, batch_idx)
        if self.config.wants_witness:
            self.witness.advance(runner, runner.iter)
        self.seed('step', runner.iter)

    def after_train_iter(self, runner: Any, **details: Any) -> Iterator[None]:
        # a loop may call this more than once in an iteration
        if not self._begun and runner.iter != self._ended:
            self._refuse_loop(runner)
        self._begun, self._ended = False, runner.iter
        with replaced(self, _iterations_ahead=1):
            yield
            if self.config.wants_witness and runner.iter + 1 == self.witness.early:
                save_for_witness(runner, self.witness)
        self.seed('hook', 'loop', runner.iter + 1)

    def _refuse_loop(self, runner: Any) -> None:
        """Raise RandomnessError: where an iteration begins, only the hooks tell."""
        if not self.config.uses_stock_streams:
            raise RandomnessError(
                f'{type(runner.train_loop).__name__} trains without the hooks of '
                'before_train_iter, which begin the random numbers of a step and count the '
                'batches that a resumed run leaves out: call '
                "self.runner.call_hook('before_train_iter', batch_idx=idx, data_batch=data_batch) "
                'before each step, and after_train_iter after it, as EpochBasedTrainLoop does')

    def _check_loop(self, runner: Any) -> None:
        """Refuse a loop that has trained without any hook of an iteration."""
        point = self.resume.point
        if self._ended is None and runner.iter > (0 if point is None else point.iteration):
            self._refuse_loop(runner)

    def after_train_epoch(self, runner: Any) -> Iterator[None]:
        self._check_loop(runner)
        self.seed('hook', 'end of epoch', runner.epoch)
        with replaced(self, _epochs_ahead=1):
            yield
        self.seed('hook', 'loop', runner.iter)

    # ----------------------------------------------------------------- validation and test

    def before_val_epoch(self, runner: Any) -> Iterator[None]:
        self.evaluated.leave()
        self.validation.begin(runner)
        yield from self._evaluation(runner, runner.val_loop, 'val', runner.iter)

    def before_val_iter(self, runner: Any, batch_idx: int, **details: Any) -> Iterator[None]:
        yield
        self._seed_images('val', runner.iter, batch_idx)

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> Iterator[None]:
        run_deferred_checks()
        self.evaluated.leave()  # before EMAHook takes its averages out
        with self.checkpoints.validated(runner.iter, metrics):
            yield
        self.evaluated.leave()
        self.validation.end(runner)

    def after_val(self, runner: Any) -> Iterator[None]:
        yield
        self.seed('hook', 'loop', runner.iter)

    def before_test_epoch(self, runner: Any) -> Iterator[None]:
        self.evaluated.leave()
        yield from self._evaluation(runner, runner.test_loop, 'test')

    def _evaluation(self, runner: Any, loop: Any, stream: str, *key: seeds.Key) -> Iterator[None]:
        use_stream(loop.dataloader, stream)
        self.seed(stream, *key)
        yield
        self._key_exchanged(runner, loop.dataloader, stream)
        virtual.check_shared_weights(runner)
        self.evaluated.enter(runner.model)  # after EMAHook has put its averages in

    def before_test_iter(self, runner: Any, batch_idx: int, **details: Any) -> Iterator[None]:
        yield
        self._seed_images('test', batch_idx)

    def after_test_epoch(self, runner: Any, metrics: Any = None) -> Iterator[None]:
        run_deferred_checks()
        self.evaluated.leave()
        yield
        self.evaluated.leave()

    # ----------------------------------------------------------------------- a checkpoint

    def saved(self, runner: Any, folder: str, name: str, resumable: bool,
              arguments: Mapping[str, Any]) -> None:
        """Let the witness resume from a checkpoint that was written; all ranks call this."""
        if not (resumable and self.config.wants_witness
                and isinstance(runner._train_loop, BaseLoop)):
            return
        iteration = (arguments.get('meta') or {}).get('iter')
        if iteration is None:
            iteration = runner.iter + self._iterations_ahead
        path = f'{folder.rstrip("/")}/{name}' if '://' in folder else os.path.join(folder, name)
        is_tried = is_main_process() and self.witness.saved(path, iteration, self.witness.saving)
        self.records.note(iteration + RESUMED_ITERATIONS, attributes=is_tried)

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> Iterator[None]:
        if isinstance(runner._train_loop, (EpochBasedTrainLoop, IterBasedTrainLoop)):
            self.checkpoints.set_position(checkpoint['meta'], runner.epoch + self._epochs_ahead,
                                          runner.iter + self._iterations_ahead)
        yield
        virtual.check_shared_weights(runner)
        run_deferred_checks()
        self._observe(runner.logger)
        self.checkpoints.complete(runner, checkpoint, self.config, self.facts)
        if not self.witness.saving:
            track_results(runner, f'iter_{checkpoint["meta"]["iter"]}',
                          lambda: digests_of(checkpoint))

    # ---------------------------------------------------------------------------- the end

    def after_train(self, runner: Any) -> Iterator[None]:
        self._check_loop(runner)
        self.validation.training_ends(runner)
        with without_code():  # CheckpointHook publishes: it loads what it has written
            yield
        virtual.check_shared_weights(runner)
        run_deferred_checks()
        self._observe(runner.logger)
        if self.config.wants_witness:
            self.witness.finish(runner, runner.iter)
        with virtual.gathered_weights(runner, runner.work_dir):
            end = functools.cache(lambda: end_of(runner))
            if is_main_process() and not self.config.uses_stock_streams:
                say = runner.logger.warning if end().not_finite else runner.logger.info
                say(outcome(runner, end(), [*self._remarks(runner)], self._by_program()))
            track_results(runner, 'last', lambda: end().digests)

    def _by_program(self) -> str:
        """Return the parts of the run that come from the program, not from its config."""
        hooks = [type(hook).__name__ for hook in self._by_code
                 if not type(hook).__module__.startswith('mmrepro.')]  # ours change no bits
        if self._objects:
            return f'{", ".join(self._objects)} given as objects'
        return f'hooks that code has registered: {", ".join(hooks)}' if hooks else ''

    def _remarks(self, runner: Any) -> Iterator[str]:
        """Yield the remarks of the last line of the log, beside the digests."""
        if self.config.wants_witness:
            yield self.witness.summary(runner.work_dir)
        if self.comparison.history:
            yield f'{self.comparison.history}: bits may not be those of an uninterrupted run'

    # -------------------------------------------------------------------------------------

    def event(self, name: str, runner: Any, details: Mapping[str, Any]
              ) -> AbstractContextManager[None]:
        """Return the context in which the hooks of an event are called."""
        self.process.hold()  # a hook may have built a runner of its own
        moment = getattr(self, name, None) if name.startswith(('before_', 'after_')) else None
        return nullcontext() if moment is None else contextmanager(moment)(runner, **details)

    def seed(self, stream: str, *key: seeds.Key) -> None:
        """Start a stream in this process, one of its own for the rank with ``diff_rank_seed``."""
        if not self.config.uses_stock_streams:
            ranks = (get_rank(),) if self.config.diff_rank_seed else ()
            seeds.seed_all(self.config.root, stream, *key, *ranks)

    def _key_exchanged(self, runner: Any, loader: Any, stream: str) -> None:
        """Key a loader that a hook or a loop has made by itself."""
        if not self.config.uses_stock_streams and isinstance(loader, DataLoader) and \
                position_of_loader(loader) is None:
            runner.key_loader(loader, stream)

    def _seed_images(self, stream: str, *key: seeds.Key) -> None:
        if self.config.independent_predictions:
            # the same numbers for all images, wherever an image is tested
            seeds.seed_all(self.config.root, 'test', 'image')
        else:
            self.seed(stream, *key)


def _tell_epoch(runner: Any) -> None:
    """Tell the sampler its epoch; a config may have removed MMEngine's DistSamplerSeedHook."""
    loader = runner.train_dataloader
    if position_of_loader(loader) is not None and runner.train_loop.max_epochs > 1:
        loader.batch_sampler.sampler.set_epoch(runner.epoch)
