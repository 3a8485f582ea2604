"""The row of a set-up, the runs that are compared, and the verdict."""
from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch.distributed as dist
from children import Child, ChildFailed, join_ranks
from faults.tiny import tiny, validating
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import (
    DATA_SAMPLERS,
    DATASETS,
    FUNCTIONS,
    HOOKS,
    LOOPS,
    METRICS,
    MODELS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    PARAM_SCHEDULERS,
    RUNNERS,
    TRANSFORMS,
)
from mmengine.runner import Runner
from unformatted import formatted, unformatted

from mmrepro import on_virtual_ranks
from mmrepro.errors import (
    MMReproError,
    SampleDiffersError,
    StepDiffersError,
    ValidationChangesError,
    WitnessDiffersError,
)
from mmrepro.objects.digests import state_digest as digest
from mmrepro.runs.launcher import free_port

FOUND_BY = (SampleDiffersError, StepDiffersError, ValidationChangesError, WitnessDiffersError)
EQUAL, FOUND, REFUSED, NAMED = 'equal', 'found', 'refused', 'named'
IN_DOUBT = 'refused in doubt'
SILENT, FALSE_ALARM, NEEDLESS, ERROR = 'silent', 'false alarm', 'needless refusal', 'error'
GOOD = (EQUAL, FOUND, REFUSED, IN_DOUBT, NAMED)
SWITCH = 'randomness.resume_strict=False'  # lets a refused resume go on
ROOT = Path(__file__).resolve().parents[2]
LINES = 3  # of an error

REGISTRIES = dict(
    transform=TRANSFORMS, data=DATASETS, collate=FUNCTIONS, sampler=DATA_SAMPLERS, model=MODELS,
    hook=HOOKS, metric=METRICS, optimizer=OPTIMIZERS, scheduler=PARAM_SCHEDULERS, loop=LOOPS,
    wrapper=OPTIM_WRAPPERS, runner=RUNNERS)


def _workers(cfg: Any) -> None:
    for loader in filter(None, (cfg.train_dataloader, cfg.get('val_dataloader'))):
        loader.num_workers = 2


def _resumed(at: int) -> Callable[[Any], None]:
    def change(cfg: Any) -> None:
        cfg.update(resume=True, load_from=os.path.join(cfg.first, f'iter_{at}.pth'))
    return change


def _not_validated(cfg: Any) -> None:
    cfg.update(val_dataloader=None, val_cfg=None, val_evaluator=None)


# three epochs of eight iterations
ANOTHER = ('in another process', 'resumed in another process')  # another hash seed, too
VARIATIONS: dict[str, Callable[[Any], None]] = {
    'again': lambda cfg: None,
    'workers': _workers,
    'resumed at 3': _resumed(3),
    'resumed at 8': _resumed(8),
    'resumed at 12': _resumed(12),
    'not validated': _not_validated,
    'on two processes': lambda cfg: None,
    ANOTHER[0]: lambda cfg: None,
    ANOTHER[1]: _resumed(12),
}
# where a witness of a first run resumes, which may be where none of the above does
VARIATIONS.update({f'resumed at {at}': _resumed(at) for at in (1, 2, 4, 16, 23)})
TRAINED = ('again', 'workers', 'resumed at 3', 'resumed at 8', 'resumed at 12')


class Setup(NamedTuple):
    """A row.

    Attributes:
        kind: what users wrote, in a few words; rows are grouped by it.
        change: called with the config before a run is built.
        variations: the runs that are compared with the first one.
        later: changes the config of the variations only.
        drive: called with the runner.
        ranks: virtual ranks.
    """
    kind: str
    change: Callable[[Any], None]
    variations: tuple[str, ...] = TRAINED
    later: Callable[[Any], None] = lambda cfg: None
    drive: Callable[[Any], None] = lambda runner: runner.train()
    ranks: int | None = None


class Outcome(NamedTuple):
    """What became of a set-up.

    Attributes:
        outcome: one of :data:`GOOD`, or what should not be.
        where: the variations that differ, or the run that was ended.
        says: the first line of the message.
    """
    outcome: str
    where: str = ''
    says: str = ''


SETUPS: dict[str, Setup] = {}


USES: dict[Any, Callable[[Any], None]] = {}  # of a class: lets a config use it


def setup(kind: str, **options: Any) -> Callable:
    """Register a function that changes the config, or a class that it uses, under its name."""
    def register(thing: Any) -> Any:
        assert thing.__name__ not in SETUPS, thing.__name__
        SETUPS[thing.__name__] = Setup(kind, change_of(thing), **options)
        return thing
    return register


def change_of(thing: Any) -> Callable[[Any], None]:
    """Return what changes the config: the function itself, or what lets it use the class."""
    return USES.get(thing, thing)


def registered(registry: str, use: Callable[[Any, str], None]) -> Callable[[type], type]:
    """Return a decorator of classes that a config can use; a witness imports them by name."""
    def decorate(cls: type) -> type:
        def change(cfg: Any) -> None:
            REGISTRIES[registry].register_module(module=cls, force=True)
            use(cfg, cls.__name__)
        USES[cls] = change
        return cls
    return decorate


def use_all(cfg: Any, *classes: type) -> None:
    """Let a config use decorated classes."""
    for cls in classes:
        USES[cls](cfg)


transform = registered('transform', lambda cfg, name: cfg.train_dataloader.dataset.pipeline.insert(
    2, dict(type=name)))
dataset = registered('data', lambda cfg, name: cfg.train_dataloader.dataset.update(type=name))
collate = registered('collate', lambda cfg, name: cfg.train_dataloader.update(
    collate_fn=dict(type=name)))
sampler = registered('sampler', lambda cfg, name: cfg.train_dataloader.update(
    sampler=dict(type=name)))
model = registered('model', lambda cfg, name: cfg.model.update(type=name))
hook = registered('hook', lambda cfg, name: cfg.custom_hooks.append(dict(type=name)))
metric = registered('metric', lambda cfg, name: cfg.update(val_evaluator=dict(type=name)))
optimizer = registered('optimizer', lambda cfg, name: setattr(
    cfg.optim_wrapper, 'optimizer', dict(type=name, lr=.1)))
scheduler = registered('scheduler', lambda cfg, name: setattr(
    cfg, 'param_scheduler', dict(type=name, by_epoch=False)))
wrapper = registered('wrapper', lambda cfg, name: cfg.optim_wrapper.update(type=name))
average = registered('model', lambda cfg, name: cfg.custom_hooks.append(dict(
    type='EMAHook', ema_type=name)))
batch_sampler = registered('sampler', lambda cfg, name: cfg.train_dataloader.update(
    batch_sampler=dict(type=name)))
preprocessor = registered('model', lambda cfg, name: cfg.model.update(
    data_preprocessor=dict(type=name)))
runner = registered('runner', lambda cfg, name: setattr(cfg, 'runner_type', name))
loop = registered('loop', lambda cfg, name: setattr(
    cfg, 'train_cfg', dict(type=name, max_epochs=3, val_interval=1)))


UNREAD = ('loaded_at', )  # fields of a batch that no model of a set-up reads


def _batch_digest(batch: Any) -> str:
    return digest({name: value for name, value in batch.items() if name not in UNREAD}
                  if isinstance(batch, dict) else batch)


class Look(Hook):
    """Digests of every iteration: the batch, the losses, the weights after the step."""
    priority = 100

    def __init__(self) -> None:
        self.rows: dict[int, list[str]] = {}
        self._batch = ''

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self._batch = _batch_digest(data_batch)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        # without the module of a wrapper
        model = getattr(runner.model, 'module', runner.model)
        # what is only logged may be anything
        losses = {name: value.detach() for name, value in outputs.items() if 'loss' in name}
        self.rows[runner.iter + 1] = [self._batch, digest(losses), digest(model.state_dict())]

    def before_val_iter(self, runner, batch_idx, data_batch=None):
        self.rows.setdefault(-runner.iter, []).append(_batch_digest(data_batch))

    def after_val_epoch(self, runner, metrics=None):
        self.rows.setdefault(-runner.iter, []).append(repr(sorted(metrics.items())))


class Ran(NamedTuple):
    """A run: digests by rank and iteration, the error that ended it, and its log."""
    rows: dict[int, dict[int, list[str]]]
    error: str
    by: str  # FOUND, REFUSED or ERROR
    log: str


def config(row: Setup, folder: str, variation: str | None, checked: bool) -> Any:
    """Return the config of a run."""
    cfg = tiny(os.path.join(folder, variation or 'first'), first=os.path.join(folder, 'first'))
    validating(cfg)
    cfg.train_cfg.update(max_epochs=3, val_interval=1)
    cfg.train_dataloader.dataset.size = 16
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', interval=1, by_epoch=False)
    cfg.log_level = 'INFO'
    # of the first run, a witness tries what the variations try as well
    cfg.randomness.self_checks = dict(witness=variation is None)
    row.change(cfg)
    if row.ranks:
        cfg.randomness.virtual_ranks = row.ranks
    if variation:
        VARIATIONS[variation](cfg)
        if variation in row.variations:
            row.later(cfg)
    if not checked:
        cfg.randomness.update(self_checks=False, resume_strict=False)
    try:
        formatted(cfg).pretty_text  # noqa: B018
    except SyntaxError:  # MMEngine cannot format the text of a config that holds objects
        unformatted(cfg)
    return cfg


def _run(name: str, folder: str, variation: str | None, checked: bool,
         rank: int = 0, processes: int = 1, port: int | None = None) -> Ran:
    row = SETUPS[name]
    log = os.path.join(folder, f'{variation}.{rank}.log')
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    # not those that a test captures
    sys.stdout, sys.stderr = (open(stream, 'w', buffering=1, closefd=False) for stream in (1, 2))
    looks: dict[int, Look] = {}

    def main() -> None:
        look = looks[get_rank()] = Look()
        built = RUNNERS.build(cfg.copy()) if 'runner_type' in cfg else Runner.from_cfg(cfg.copy())
        built.register_hook(look)
        row.drive(built)

    error, by = '', ''
    try:
        if processes > 1:
            join_ranks(rank, processes, port or 0)
        cfg = config(row, folder, variation, checked)
        if processes > 1:
            cfg.launcher = 'pytorch'
        if row.ranks:
            on_virtual_ranks(row.ranks, main, cfg.get('launcher', 'none'))
        else:
            main()
    except BaseException as raised:
        by = ERROR
        if isinstance(raised, MMReproError):
            by = FOUND if isinstance(raised, FOUND_BY) else REFUSED
        error = f'{type(raised).__name__}: {raised}'
        traceback.print_exc()
    if processes > 1 and dist.is_initialized():
        dist.destroy_process_group()
    with open(log, encoding='utf-8', errors='replace') as file:
        return Ran({rank: look.rows for rank, look in looks.items()}, error, by, file.read())


def train(name: str, folder: str, variation: str | None, checked: bool) -> Ran:
    """Train a set-up in forked processes, or in a fresh one.

    Without ``checked``, all switches are off that let a run go on: its bits are what is asked for.
    """
    if variation in ANOTHER:
        return _in_another_process(name, folder, variation, checked)
    processes = 2 if variation == 'on two processes' else 1
    port = free_port() if processes > 1 else None
    children = [Child(_run, name, folder, variation, checked, rank, processes, port)
                for rank in range(processes)]
    runs = []
    for child in children:
        try:
            runs.append(child.result(300))
        except (ChildFailed, TimeoutError) as error:
            runs.append(Ran({}, str(error).strip().splitlines()[-1], ERROR, ''))
    # of several processes, those that follow the first one's error have less to say
    ended = sorted((ran for ran in runs if ran.error), key=lambda ran: ran.by == ERROR)
    return Ran({rank: rows for ran in runs for rank, rows in ran.rows.items()},
               ended[0].error if ended else '', ended[0].by if ended else '',
               '\n'.join(ran.log for ran in runs))


def run_into(path: str, *arguments: Any) -> None:
    """Train a set-up in this process, and pickle what became of it."""
    ran = _run(*arguments)
    with open(path, 'wb') as file:
        pickle.dump(ran, file)


def _in_another_process(name: str, folder: str, variation: str, checked: bool) -> Ran:
    path = os.path.join(folder, f'{variation}.ran')
    code = ('import sys; from dev.user_setups import __main__ as setups, setup; setups.load(); '
            f'setup.run_into({path!r}, {name!r}, {folder!r}, {variation!r}, {checked!r})')
    done = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, timeout=300,
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path), 'PYTHONHASHSEED': '7'})
    if not os.path.exists(path):
        return Ran({}, done.stderr.strip().splitlines()[-1], ERROR, '')
    with open(path, 'rb') as file:
        return pickle.load(file)


def differing(first: Ran, second: Ran) -> bool:
    """Whether an iteration that both runs have differs, or the second one trained nothing."""
    rows = [(first.rows.get(rank, {}).get(iteration), row)
            for rank, of_rank in second.rows.items() for iteration, row in of_rank.items()]
    # a run that goes on for longer than the first one is another run
    trained = any(iteration > 0 for rows_of in second.rows.values() for iteration in rows_of)
    return not trained or any(ours != row for ours, row in rows)


def _compared(name: str, folder: str, checked: bool,
              variations: Iterable[str]) -> Iterator[tuple[str, Ran, Ran]]:
    first = train(name, folder, None, checked)
    yield '', first, first
    if not first.error:
        for variation in dict.fromkeys(variations):
            yield variation, first, train(name, folder, variation, checked)


def judge(name: str) -> Outcome:
    """Train a set-up in all its variations, and say what became of it."""
    folder = tempfile.mkdtemp()
    differ: list[str] = []
    warned = ''
    try:
        for variation, first, ran in _compared(
                name, folder, True, SETUPS[name].variations):
            warned = warned or _without_folder(_warning(name, ran.log), folder)
            if not ran.error and variation and differing(first, ran):
                differ.append(variation)
            if ran.error and not (differ and not warned):
                outcome = Outcome(ran.by, variation or 'first', _beginning(ran.error, folder))
                if ran.by == FOUND and not _is_true(name, ran.error):
                    return outcome._replace(outcome=FALSE_ALARM)
                if ran.by == REFUSED and variation and not _differs(name, (variation, )):
                    in_doubt = ' may not ' in ran.error and SWITCH in ran.error
                    return outcome._replace(outcome=IN_DOUBT if in_doubt else NEEDLESS)
                return outcome
        if not differ:
            return Outcome(EQUAL, says=warned)
        return Outcome(NAMED if warned else SILENT, ', '.join(differ), warned)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _beginning(error: str, folder: str) -> str:
    """Return the first sentences of an error, without the paths of this run."""
    return ' '.join(_without_folder(' '.join(error.splitlines()[:LINES]), folder).split())


def _without_folder(text: str, folder: str) -> str:
    """Return a text with paths relative to the folder of a run, or to the checkout."""
    return text.replace(f'{folder}/', '').replace(f'{ROOT}/', '')


def _is_true(name: str, error: str) -> bool:
    """Whether the runs of a set-up differ without self-checks; ``error`` is what one has said."""
    resumed = re.search(r'resumes at iteration (\d+)', error)
    more = ANOTHER if resumed is None else (f'resumed at {resumed[1]}', *ANOTHER)
    return _differs(name, (*SETUPS[name].variations, *more))


def _differs(name: str, variations: Iterable[str]) -> bool:
    """Whether one of these runs differs from the first one where no check or refusal ends it."""
    folder = tempfile.mkdtemp()
    try:
        # an error of the run itself is as good as a difference
        return any(ran.error or (variation and differing(first, ran))
                   for variation, first, ran in _compared(name, folder, False, variations))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# of lines of a log that name what a set-up has written
NAMING = ('a sample has written', 'the code of', 'which another process cannot build again',
          'another process cannot import')
WARNING_OF = ('the validation at iteration', 'witness: ', 'is not this run',
              'This run is not what its config trains')


def _warning(name: str, log: str) -> str:
    """Return the line of a log that names what the set-up has written; '' if there is none."""
    said = next((line for line in log.splitlines() if _names(name, line)), '').split(' - ', 3)[-1]
    reason = re.search(r'no resume was tried \((.*?)\)[:;]', said + ';')
    if reason is not None:
        return f'no resume was tried: {reason[1]}'
    # of the last line, what it names beside the hooks that every set-up has
    names = re.search(r'not repeated: ([^;)]*)', said)
    return said if names is None else 'not repeated: ' + ', '.join(
        one for one in names[1].split(', ') if one not in ('QuietHook', 'Look'))


def _names(name: str, line: str) -> bool:
    lost = re.search('does not restore (.*?)[.] The', line)
    if lost is not None:  # beside what the digests are kept in
        return any(not one.startswith('Look.') for one in lost[1].split(', '))
    # MMEngine names every metric without a prefix
    is_warning = 'WARNING' in line and 'The prefix is not set' not in line
    return (any(part in line for part in NAMING)
            or is_warning and any(part in line for part in (name, *WARNING_OF))
            or name in line and 'were repeated' in line)
