"""Main program of a witness process; :mod:`mmrepro.selfcheck.witness_process` starts it."""
from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
import pickle
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from ctypes import CDLL, c_ulong
from functools import partial
from pkgutil import resolve_name
from typing import Any

from mmengine.config import ConfigDict
from mmengine.dist import get_rank
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS

from .. import activation
from ..config import NO_CHECKS, RandomnessConfig, imports_of
from ..errors import FingerprintError, meaning
from ..facts import own_code
from ..ops import operator_table
from ..run.hooks.witness_records import (
    VAL_BATCHES,
    WitnessRecords,
    attribute_texts,
    own_code_at_a_save,
)
from ..selfcheck import recipe
from ..selfcheck.script import opens_for_writing
from ..selfcheck.witness import REPEATED
from ..selfcheck.witness_process import Start, files_of
from ..selfcheck.witness_verdict import (
    ATTRIBUTES,
    ATTRIBUTES_AFTER,
    LEFT,
    attribute_digests,
    left_between,
)
from ..util.files import read_json, write_whole
from ..util.scoped import replaced
from ..util.text import class_name
from .startup import on_ranks
from .stopping import StopTraining

NICE = 19
# modules that every training imports for a second or more: once, before processes are forked
_OF_EVERY_TRAINING = ('mmrepro.run.runner', 'torch._dynamo', 'matplotlib.pyplot',
                      'matplotlib.backends.backend_agg', 'setuptools')
WORK_DIR = 'work_dir'  # of a start, in its folder
MAX_COPIED = 1 << 20  # bytes of a file of the run; of larger ones, a witness gets a link
POLL = 0.1  # seconds between two looks at a training
_PR_SET_PDEATHSIG = 1  # of prctl: the signal that a process gets when its parent ends
_OF_CHECKPOINTS = inspect.signature(CheckpointHook.__init__).parameters  # its arguments
_CHANGING = ('os.remove', 'os.rename', 'os.rmdir', 'os.truncate', 'shutil.rmtree', 'os.link',
             'os.symlink', 'os.mkdir')
_FOLLOWING_LINKS = ('open', 'os.truncate')


def main(task: dict[str, Any], parent: int) -> None:
    """Train what a task asks for, each start in a process of its own that has only imported.

    If the process whose witness this is (``run`` of the task) is killed, this one ends.

    Args:
        parent: process that had started this one when it began: the run, if it was there still.
    """
    ended = partial(_has_ended, task['run'], parent)
    if task['quiet']:
        os.nice(NICE)
    activation.activate()
    recipe.enter(task['path'], task['folder'], task['arguments'])
    _protect(task['work_dir'], task['scratch'])
    problems = recipe.prepare(task['script'], [
        recipe.Registered(*entry) for entry in task['registered']], task['names'])
    for name in _OF_EVERY_TRAINING:
        with suppress(ImportError):  # the training says what it lacks
            importlib.import_module(name)
    for operator in operator_table.TABLE:
        operator_table.implementation(operator)
    own_code.sources()  # which files belong to which packages is found out once
    imports = time.process_time()
    for given in task['starts']:
        start = Start(**{**given, 'metrics': {
            int(iteration): metrics for iteration, metrics in given['metrics'].items()}})
        code = _in_fork(partial(_result, task, start, problems, imports), ended, task['scratch'])
        if start.name != REPEATED and start.other_workers and _has_failed(task, start):
            # some code does not load in workers; that is no reason to try no resume
            start = start._replace(other_workers=False)
            shutil.rmtree(os.path.join(task['scratch'], start.name), ignore_errors=True)
            code = _in_fork(partial(_result, task, start, problems, 0.0), ended, task['scratch'])
        if code:  # such as for lack of memory; a full disk has no room for this either
            with suppress(OSError):
                _write(task, start, f'its process was ended: {meaning(code)}', imports, 0.0)
        imports = 0.0  # once for all of them


def _has_failed(task: Mapping[str, Any], start: Start) -> bool:
    path = os.path.join(task['scratch'], start.name, 'result.json')
    return not os.path.exists(path) or bool(read_json(path, FingerprintError)['error'])


def _has_ended(run: int, parent: int) -> bool:
    """Whether a run has ended. A killed one may stay as a zombie, but has no children."""
    try:
        os.kill(run, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it is there
        pass
    return os.getppid() != parent


def _in_fork(call: Callable[[], None], run_has_ended: Callable[[], bool], scratch: str) -> int:
    """Call a function in a forked process; if the run has ended, end and leave nothing behind.

    Returns:
        The exit code of the process; negative: minus the number of a signal.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored children cannot be waited for
    pid = os.fork()
    if pid == 0:
        CDLL(None).prctl(_PR_SET_PDEATHSIG, c_ulong(signal.SIGKILL))
        code = 1
        try:
            call()
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended:
        if run_has_ended():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            shutil.rmtree(scratch, ignore_errors=True)
            os.killpg(0, signal.SIGKILL)
        time.sleep(POLL)
        ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status)


def _protect(work_dir: str, scratch: str) -> None:
    """Refuse to change files of the run, in this process and in those that it forks."""
    inside, ours = (os.path.join(os.path.realpath(folder), '') for folder in (work_dir, scratch))

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        if event not in _CHANGING and not (
                event == 'open' and opens_for_writing(*args[1:3])):
            return
        paths = args[:2] if event in _CHANGING else args[:1]
        for path in args[1:2] if event == 'os.symlink' else paths:  # its target stays as it is
            real = ''
            if isinstance(path, (str, bytes)):
                # files of the run that have links here stay when a link is removed
                folder, name = os.path.split(os.fsdecode(path))
                real = os.path.realpath(os.fsdecode(path)) if event in _FOLLOWING_LINKS else \
                    os.path.join(os.path.realpath(folder), name)
            # TMPDIR may lie in the work directory
            if real.startswith(inside) and not f'{real}/'.startswith(ours):
                raise PermissionError(f'a witness may not change {os.fsdecode(path)}')

    sys.addaudithook(refuse)


def _result(task: Mapping[str, Any], start: Start, problems: list[str], imports: float) -> None:
    """Train a start and write its result; what it raises becomes part of the result.

    ``imports``: seconds of processor time that were used before, for all starts.
    """
    folder = os.path.join(task['scratch'], start.name)
    os.makedirs(folder)
    error = ''
    try:
        os.makedirs(os.path.join(folder, WORK_DIR))
        if start.checkpoint is not None:
            _provide_files(task['work_dir'], os.path.join(folder, WORK_DIR), start.checkpoint)
        _train(task, start, folder)
    except BaseException as raised:  # whatever the code of the user raises
        traceback.print_exc()
        error = '; '.join([f'{type(raised).__name__}: {raised}', *problems])
        if start.checkpoint is not None:  # in the run, an open file that nobody knows by this name
            error = error.replace(start.checkpoint, 'its checkpoint')
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    _write(task, start, error, imports, sum(usage.ru_utime + usage.ru_stime for usage in used))


def _write(task: Mapping[str, Any], start: Start, error: str, imports: float, seconds: float
           ) -> None:
    folder = os.path.join(task['scratch'], start.name)
    # this process was started with -c, as a run may be; that is no edition of its text
    code = {name: fact for name, fact in own_code.code_facts().items()
            if not name.startswith(own_code.STARTED)}
    code.update(own_code.script_fact(task['script']))
    write_whole(os.path.join(folder, 'result.json'), json.dumps(dict(
        name=start.name, error=error, lines=folder, code=code, imports=imports, seconds=seconds)))


def _provide_files(work_dir: str, folder: str, checkpoint: str) -> None:
    """Copy or link the files of a run: a resume finds them in its work directory.

    Its last checkpoint is the one that is resumed, not one that the run has written since.
    """
    with open(os.path.join(folder, 'last_checkpoint'), 'w', encoding='utf-8') as file:
        file.write(checkpoint)
    files = files_of(work_dir)
    for name in (*files.own, *files.checkpoints):
        source, target = os.path.join(work_dir, name), os.path.join(folder, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with suppress(OSError):  # the run removes and replaces them meanwhile
            if name in files.checkpoints or os.path.getsize(source) > MAX_COPIED:
                os.symlink(source, target)
            else:
                shutil.copy(source, target)


def _train(task: Mapping[str, Any], start: Start, folder: str) -> None:
    with open(os.path.join(task['scratch'], 'recipe'), 'rb') as file:
        content = file.read()
    _, settings, _ = pickle.loads(content)
    cfg = settings.get('cfg') or {}
    for name in imports_of(cfg):
        importlib.import_module(name)

    def train() -> None:
        # each virtual rank has settings of its own
        runner_name, settings, hooks = pickle.loads(content)
        saving = {**(settings.get('cfg') or {}), **settings}.get('default_hooks') or {}
        _change(settings, task, start, os.path.join(folder, WORK_DIR))
        cls = resolve_name(runner_name)
        # a run that has ended is known by its config alone
        runner = cls(**settings) if len(settings) > 1 else cls.from_cfg(settings['cfg'])
        for pickled in hooks:
            hook, priority = pickle.loads(pickled)
            runner.register_hook(hook, priority=priority)
        if own_code_at_a_save(runner):
            _save_as_the_run(runner, saving)
        records = WitnessRecords(folder)
        records.note(start.until)
        runner.register_hook(records, priority=records.priority)
        runner.register_hook(_End(start, records), priority=_End.priority)
        try:
            runner.train()
        except StopTraining:
            pass
        finally:
            records.close()
        if get_rank() == 0:
            before = records.attributes.get(start.begin, {})
            for name, texts in ((ATTRIBUTES, before), (ATTRIBUTES_AFTER,
                                                       records.attributes_after.get(start.until))):
                if texts is not None:
                    write_whole(os.path.join(folder, name), json.dumps(attribute_digests(texts)))
            if not runner.train_dataloader.num_workers:  # otherwise workers have what is left
                write_whole(os.path.join(folder, LEFT), json.dumps(left_between(
                    before, attribute_texts(runner))))

    on_ranks(dict(randomness=task['config'], launcher='none'), train)


def _change(settings: dict[str, Any], task: Mapping[str, Any], start: Start, folder: str) -> None:
    """Change the settings of a run into those of a witness."""
    changed: dict[str, Any] = dict(
        work_dir=folder, launcher='none',
        # settings that a validation leaves behind are put back as in the run
        randomness={**task['config'], 'self_checks': {
            **NO_CHECKS,
            'validation': RandomnessConfig.parse(task['config']).self_checks.validation}})
    if start.checkpoint is not None:
        changed.update(resume=True, load_from=start.checkpoint)
    given = {**(settings.get('cfg') or {}), **settings}
    if start.other_workers:
        changed['train_dataloader'] = _other_workers(given.get('train_dataloader'))
    if start.checkpoint is not None and given.get('val_dataloader'):
        changed['val_dataloader'] = _other_workers(given['val_dataloader'])
    changed['default_hooks'] = {
        name: _without_files(hook) for name, hook in (given.get('default_hooks') or {}).items()}
    changed['default_hooks']['checkpoint'] = _without_checkpoints(
        changed['default_hooks'].get('checkpoint'))
    changed['custom_hooks'] = [
        _without_files(hook) for hook in given.get('custom_hooks') or []
        if class_name(hook.get('type')) != 'FingerprintHook']
    visualizer = given.get('visualizer')
    if visualizer:
        changed['visualizer'] = {**{name: value for name, value in visualizer.items()
                                    if name != 'save_dir'}, 'vis_backends': None}
    takes_config = 'cfg' in settings
    for name, value in changed.items():
        value = ConfigDict(value) if isinstance(value, dict) else value
        if name in settings or not takes_config:
            settings[name] = value
        if takes_config:
            settings['cfg'][name] = value


def _other_workers(loader: Any) -> Any:
    """Return the settings of a loader with another number of workers; 0 and 1 load alike.

    Several loaders, of a loop of the user's own, are changed one by one.
    """
    if isinstance(loader, (list, tuple)):
        return [_other_workers(each) for each in loader]
    count = 0 if loader.get('num_workers', 0) > 1 else 2
    changed = {**loader, 'num_workers': count, 'persistent_workers': False}
    if not count:
        for name in ('prefetch_factor', 'timeout', 'multiprocessing_context'):
            changed.pop(name, None)
    return changed


def _save_as_the_run(runner: Any, default_hooks: Mapping[str, Any]) -> None:
    """Let a witness write checkpoints too, in its folder: own code may change the run at each."""
    settings = _without_files(default_hooks.get('checkpoint') or {})
    place = next(number for number, hook in enumerate(runner.hooks)
                 if isinstance(hook, CheckpointHook))
    saves = HOOKS.build(dict(type='CheckpointHook') | settings)
    saves.priority = runner.hooks[place].priority
    runner.hooks[place] = saves


def _without_files(hook: Any) -> Any:
    """Return the settings of a hook that writes to the work directory only."""
    if isinstance(hook, Mapping) and 'out_dir' in hook:
        return {**hook, 'out_dir': None}
    return hook


def _without_checkpoints(hook: Any) -> dict[str, Any]:
    """Return the settings of a hook that writes no checkpoint; what a subclass adds is kept."""
    own = {name: value for name, value in (hook or {}).items() if name not in _OF_CHECKPOINTS}
    return dict(type='CheckpointHook') | own | dict(interval=-1, save_last=False)


class _First:
    """A data loader that ends after some batches."""

    def __init__(self, loader: Any, batches: int) -> None:
        self._loader, self._batches = loader, batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._loader), self._batches)

    def __len__(self) -> int:
        return self._batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _End(Hook):
    """Ends a training before an iteration; of long validations, predicts the first batches only.

    Schedules and early stopping, which follow metrics, get the metrics of the run.
    """
    priority = 0

    def __init__(self, start: Start, records: WitnessRecords) -> None:
        self._start, self._records = start, records
        self._shortened = ExitStack()
        self._validations: Counter[int] = Counter()  # by iteration

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter >= self._start.until:
            raise StopTraining(runner.iter)

    def before_val_epoch(self, runner: Any) -> None:
        loop = runner.val_loop
        if len(loop.dataloader) <= VAL_BATCHES:
            return
        metrics = self._start.metrics.get(runner.iter, [])[self._validations[runner.iter]:]
        if not metrics:  # the run has not come to its end yet
            raise StopTraining(runner.iter)
        self._validations[runner.iter] += 1
        numbers = {name: float.fromhex(value) for name, value in metrics[0].items()}
        self._shortened.enter_context(replaced(
            loop, dataloader=_First(loop.dataloader, VAL_BATCHES)))
        self._shortened.enter_context(replaced(
            loop.evaluator, evaluate=lambda size: dict(numbers)))
        self._records.truncated = True

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        self._shortened.close()
