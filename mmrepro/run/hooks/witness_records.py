"""Prepare the witness of a run: note the iterations that both train, and save a checkpoint early.

The lines are those of a fingerprint file, with digests by name, so that the engine behind
``compare`` names the first difference. They are in ``WORK_DIR/mmrepro/witness.rankN.jsonl``, where
``mmrepro verify WORK_DIR`` finds them, and in memory.
"""
from __future__ import annotations

import functools
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from mmengine.dist import get_rank, get_world_size, is_main_process
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.runner import LogProcessor, Runner
from mmengine.visualization import Visualizer
from torch import nn

from ...distributed import agreement
from ...distributed.scheduler import current
from ...distributed.unwrap import is_compiled, named_hooks, optim_wrappers, unwrap
from ...facts.known_hooks import WATCHES, is_known, plays
from ...fingerprint import schema
from ...fingerprint.attributes import value_text
from ...fingerprint.digest import SCHEME, hex_of, value_digest
from ...fingerprint.schema import Writer
from ...objects.digests import state_digest
from ...objects.walks import (
    CONTAINERS,
    GENERATORS,
    PLAIN,
    Named,
    Walk,
    direct_references,
    has_attribute,
    indirect_references,
    names_in,
)
from ...selfcheck import recipe
from ...selfcheck.witness import REPEATED_ITERATIONS, Witness
from ...selfcheck.witness_verdict import FILE, ITEMS, PREDICTIONS, TRUNCATED
from ...util import libraries
from ...util.scoped import replaced
from ..identity import config_name
from .fingerprint import FingerprintHook
from .preempt import stop_announced

VAL_BATCHES = 16  # of a validation that are compared, and that a witness predicts
MAX_KEPT = 12  # notes on attributes that are kept beside the first
MAX_DEPTH = 6  # of containers and data elements in a batch
MAX_OBJECTS = 20_000  # objects whose attributes are read; the nearest ones first
MAX_ITEMS = 2000  # of a container that is looked into
MAX_BYTES = 1 << 20  # of a tensor or array whose content counts; others hold weights and data
MAX_TEXT = 200  # characters of a value; of longer ones, a digest is added
# of the message hub: written by MMEngine in each iteration, and by CheckpointHook
_COUNTED = ('iter', 'epoch', 'last_ckpt', 'best_ckpt', 'cfg', 'seed', 'experiment_name')
_MACHINERY = ('_pre_hooks', '_post_hooks', '_backward_hooks', '_is_full_backward_hook')
# counters of schedules in what they schedule, for a warning about the order of calls alone
_OF_SCHEDULES = ('_global_step', '_opt_called')
# packages whose objects hold no state of a training, but for modules, tensors, arrays, generators
_WITHOUT_STATE = ('asyncio', 'concurrent', 'enum', 'logging', 'matplotlib', 'mmrepro',
                  'multiprocessing', 'numpy', 're', 'threading', 'torch', 'weakref')
_OF_THE_PROCESS = (ModuleType, MessageHub, Visualizer, logging.Logger, LogProcessor, Runner)


class WitnessRecords(FingerprintHook):
    """Notes the iterations before ``until``; digests are taken as :class:`FingerprintHook` does.

    Args:
        folder: in which the lines are written; None: that of the work directory.

    Attributes:
        until: the iteration, counted from 0, before which all are noted.
        attributes: Python attributes of rank 0 before an iteration, by path. In memory only: they
            may hold what the user keeps secret.
        attributes_after: the same, after so many iterations: those that a resumed run still has
            otherwise, and no hook has set again.
        own: paths of those that are part of objects of own code, of no library.
        truncated: whether validations end before their last batch.
    """

    def __init__(self, folder: str | None = None) -> None:
        super().__init__()
        self.level = 'witness'  # digests by name, and no recorder
        self.until = 0
        self.attributes: dict[int, dict[str, str]] = {}
        self.attributes_after: dict[int, dict[str, str]] = {}
        self.own: set[str] = set()
        self.truncated = False
        self._is_off = False
        self._folder = folder
        self._items: dict[str, str] = {}
        self._notes_attributes = False
        self._ends: set[int] = set()  # numbers of iterations after which attributes are noted
        self._predictions: list[str] = []

    def note(self, until: int, attributes: bool = True) -> None:
        """Note the iterations before ``until``, and attributes before the next one.

        Args:
            attributes: False where no witness will be compared while the run trains. Looking for
                them takes up to a second.
        """
        self.until = max(self.until, until)
        if attributes and get_rank() == 0:
            self._notes_attributes = True
            self._ends.add(until)

    def before_train(self, runner: Any) -> None:
        # its hook of the optimizer would be compiled as part of the step
        self._is_off = is_compiled(runner.model)
        if not self._is_off:
            super().before_train(runner)

    def _is_due(self, iteration: int) -> bool:
        return iteration < self.until and not self._is_off

    def _open(self, runner: Any) -> None:
        folder = self._folder or os.path.join(runner.work_dir, schema.FOLDER)
        self._writer = self._in_training.enter_context(closing(
            Writer(os.path.join(folder, FILE.format(get_rank())))))
        self._write(schema.START, format=schema.FORMAT, level='step', interval=1, rank=get_rank(),
                    world_size=get_world_size(), scheme=SCHEME, iteration=runner.iter,
                    manifest=None)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        super().before_train_iter(runner, batch_idx, data_batch)
        if self._step is None:
            return
        self._items = {path or 'batch': hex_of(int(value_digest(item)))
                       for path, item in _leaves(data_batch)}
        if self._notes_attributes:
            self._notes_attributes = False
            self.attributes[runner.iter] = attribute_texts(runner, self.own)
            _forget(self.attributes)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: dict[str, Any] | None = None) -> None:
        super().after_train_iter(runner, batch_idx, data_batch, outputs)
        if runner.iter + 1 in self._ends and not self._is_off:
            self.attributes_after[runner.iter + 1] = attribute_texts(runner)
            _forget(self.attributes_after)

    def extra(self, runner: Any) -> dict[str, Any]:
        return {ITEMS: self._items}

    def record_variables(self) -> None:
        """Do nothing: there is no manifest."""

    def before_val_epoch(self, runner: Any) -> None:
        self._predictions = []

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                       outputs: Any = None) -> None:
        if batch_idx < VAL_BATCHES:
            self._predictions.append(hex_of(int(value_digest(_data_of(outputs)))))

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        self._write_metrics(runner, metrics or {}, **{
            PREDICTIONS: self._predictions, TRUNCATED: self.truncated})

    def after_train(self, runner: Any) -> None:
        self._write(schema.END, iteration=runner.iter)
        self.close()


def _forget(noted: dict[int, dict[str, str]]) -> None:
    """Keep the first and the newest notes."""
    for iteration in list(noted)[1:-MAX_KEPT]:
        del noted[iteration]


# ------------------------------------------------------------------------------------ digests

def _leaves(value: Any, path: str = '', depth: int = MAX_DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a batch by path, such as ``data_samples[0].bboxes``."""
    parts: list[tuple[str, Any]] | None = None
    if depth and isinstance(value, Mapping):
        parts = [(f'{path}.{key}' if path else str(key), item) for key, item in value.items()]
    elif depth and isinstance(value, (list, tuple)):
        parts = [(f'{path}[{number}]', item) for number, item in enumerate(value)]
    elif depth and has_attribute(value, 'all_items'):  # MMEngine's data elements
        parts = [(f'{path}.{key}', item) for key, item in value.all_items()]
    if parts is None:
        yield path, value
        return
    for name, item in parts:
        yield from _leaves(item, name, depth - 1)


def _data_of(value: Any) -> Any:
    """Return predictions with dicts for data elements, without metainfo, numbers and text.

    Numbers may be times. What metrics make of them is compared by itself.
    """
    if isinstance(value, (list, tuple)):
        return [_data_of(item) for item in value]
    if has_attribute(value, 'all_items') or isinstance(value, Mapping):
        return {name: _data_of(item) for name, item in value.items()}
    return None if isinstance(value, (*PLAIN, np.generic)) else value


# -------------------------------------------------------------------------------- attributes

def attribute_texts(runner: Any, own: set[str] | None = None) -> dict[str, str]:
    """Return Python attributes that the code of a run can reach, by path, as text.

    They explain a difference, and no two runs are compared by them: a list of places where state
    may be is never complete.

    Args:
        own: gets the paths of attributes of objects, and of containers in them, whose class is
            own code.
    """
    own = set() if own is None else own
    walk = Walk(limit=MAX_OBJECTS, known=[runner, runner.model, runner.cfg])
    walk.queue.extend(_roots(runner))
    texts = {f'MessageHub info {name!r}': repr(value) for name, value
             in MessageHub.get_current_instance().runtime_info.items()
             if isinstance(value, PLAIN) and name not in _COUNTED}
    texts.update((f'os.environ[{name!r}]', repr(value)) for name, value in os.environ.items())

    def note(parts: Iterable[Named], is_own: bool) -> None:
        for name, value in parts:
            if is_own:
                own.add(name)
            text = _text(value)
            if text:  # not by the walk, which visits an object once: numbers are shared
                texts.setdefault(name, text)
            else:
                walk.add([(name, value)])

    note(_of_runner(runner), True)
    for path, thing in walk:
        if isinstance(thing, CONTAINERS):
            is_own = path in own
            texts.setdefault(f'len({path})', str(len(thing)))
            if is_own:
                own.add(f'len({path})')
            if len(thing) > MAX_ITEMS:
                continue
        else:
            is_own = _is_own(thing if isinstance(thing, FunctionType) else type(thing))
        note(_parts(thing, path), is_own)
    return texts


def _is_own(code: type | FunctionType) -> bool:
    file = libraries.file_of(sys.modules.get(code.__module__))
    return file is not None and not code.__module__.startswith('mmrepro.') and \
        libraries.is_own(file)


def _of_runner(runner: Any) -> Iterator[Named]:
    """Yield what own code keeps on the runner, and in hubs that no checkpoint has."""
    stock: set[str] = set()
    for cls in type(runner).__mro__:
        for part in vars(cls).values():
            if isinstance(part, FunctionType) and not _is_own(cls):
                stock.update(names_in(part.__code__))
    for name, value in vars(runner).items():
        if name not in stock and _is_of_a_run((name, value)):
            yield f'{type(runner).__name__}.{name}', value
    for hub in list(MessageHub._instance_dict.values()):
        if hub is not runner.message_hub:
            yield f'MessageHub {hub.instance_name}', hub.runtime_info


def _parts(thing: Any, path: str) -> list[Named]:
    """Return the parts of an object; none if its attributes raise errors."""
    with suppress(Exception):  # whatever code of a user or of a library raises when it is asked
        references = [*direct_references(thing, path), *indirect_references(thing, path)]
        return list(filter(_is_of_a_run, references))
    return []


def _is_of_a_run(named: Named) -> bool:
    path, value = named
    name = path.rpartition('.')[2]
    machinery = '_mmrepro_' in path or name.startswith('__') or name.endswith(_MACHINERY)
    if path.startswith('optim_wrapper') and name in _OF_SCHEDULES:
        return False
    if machinery or isinstance(value, (*_OF_THE_PROCESS, nn.Parameter)):
        return False
    return isinstance(value, (nn.Module, torch.Tensor, np.ndarray, np.generic, *GENERATORS)) or (
        type(value).__module__.partition('.')[0] not in _WITHOUT_STATE)


def _roots(runner: Any) -> Iterator[Named]:
    for name, hook in named_hooks(runner.hooks):
        if not plays(type(hook), WATCHES):
            yield name.split(':')[1], hook
    model = unwrap(runner.model)
    yield type(model).__name__, model
    loader = runner.train_dataloader
    yield 'dataset', loader.dataset
    yield 'batch_sampler', getattr(loader, 'batch_sampler', None)
    yield 'sampler', getattr(loader, 'sampler', None)
    yield 'collate_fn', getattr(loader, 'collate_fn', None)
    for name, wrapper in optim_wrappers(runner.optim_wrapper).items():
        yield f'optim_wrapper{name and "." + name}', wrapper
    yield 'train_loop', runner.train_loop


def _text(value: Any) -> str:
    """Return a plain value as it reads, of others a digest of their bits; '' for what is walked."""
    text = ''
    with suppress(Exception):  # of a tensor without memory, of a masked array
        if isinstance(value, (torch.Tensor, np.ndarray)):
            kind = 'tensor' if isinstance(value, torch.Tensor) else 'array'
            text = f'{kind} {tuple(value.shape)} '
            text += state_digest(value)[:16] if value.nbytes <= MAX_BYTES else ''
        elif isinstance(value, (set, frozenset)) and not all(
                isinstance(item, PLAIN) for item in value):
            text = f'{len(value)} items'  # reading objects takes long
        else:
            text = value_text(value)
    return text if len(text) <= MAX_TEXT else f'{text[:MAX_TEXT]} {state_digest(text)[:16]}'


def begin_witness(runner: Any, witness: Witness, records: WitnessRecords,
                  by_code: Sequence[Hook], resumed_from: str | None) -> None:
    """Decide what the witness of a run tries, and note the first iterations.

    Args:
        runner: its training begins.
        witness, records: those of the run.
        by_code: hooks that were registered after the runner was built.
        resumed_from: the checkpoint that the run resumes from.
    """
    reason = ''
    if get_world_size() > 1 and current() is None:
        reason = 'a witness is one process, and this run has several without virtual ranks'
    elif is_compiled(runner.model):
        reason = 'a second process would compile the model again'
    elif sys.platform != 'linux':
        reason = 'a witness needs Linux'
    elif runner.repro.worker_seed != 'sample':
        reason = f'randomness.worker_seed={runner.repro.worker_seed!r}'
    witness.begin(runner.iter, getattr(runner.train_loop, 'max_iters', None), reason,
                  is_main_process(), records.attributes, records.attributes_after, records.own,
                  resumed_from if runner.iter else None,
                  functools.partial(stop_announced, runner))
    for_others = witness.recipe
    if 'model' not in runner.cfg and isinstance(for_others, recipe.Recipe):
        for_others = ('it was built from arguments, not from a config; '
                      'randomness.self_checks.witness=True tries this while it trains')
        witness.advice = witness.advice and ': randomness.self_checks.witness=True tries it'
    records.note(runner.iter + REPEATED_ITERATIONS, attributes=not witness.not_tried)
    if is_main_process():
        recipe.write(os.path.join(runner.work_dir, schema.FOLDER, recipe.FILE), for_others,
                     config_name(runner), [type(hook).__name__ for hook in by_code], runner.iter)


def save_for_witness(runner: Any, witness: Witness) -> None:
    """Write a checkpoint that only the witness reads; it is gone with this run."""
    folder, problem = '', ''
    own = own_code_at_a_save(runner)
    if own:
        problem = f'{own[0]} would run once more, and may change the training'
    elif is_main_process():
        try:
            folder = tempfile.mkdtemp(prefix='mmrepro-witness-')
        except OSError as error:
            problem = f'{type(error).__name__}: {error}'
    problem = agreement.agree('a folder for the witness', problem, max)
    if not problem:
        try:
            with replaced(witness, saving=True):
                runner.save_checkpoint(folder, 'early.pth', by_epoch=False,
                                       save_param_scheduler=bool(runner.param_schedulers))
        except (OSError, RuntimeError) as error:  # a full disk; what no file can hold
            problem = f'{type(error).__name__}: {error}'
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    if problem:
        witness.notes.append(f'no early checkpoint: {problem}')
        runner.logger.warning(f'witness: {witness.notes[-1]}')


def own_code_at_a_save(runner: Any) -> list[str]:
    """Return the methods that a checkpoint calls and whose effects are not known."""
    found = [f'{type(hook).__name__}.before_save_checkpoint' for hook in runner.hooks
             if not is_known(type(hook))
             and type(hook).before_save_checkpoint is not Hook.before_save_checkpoint]
    found += [f'{cls.__name__}.save_checkpoint' for cls in type(runner).__mro__
              if 'save_checkpoint' in vars(cls)
              and not cls.__module__.startswith(('mmrepro.', 'mmengine.'))]
    return found
