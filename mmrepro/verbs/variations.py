"""Train a config in fresh processes under varied conditions, and compare the bits."""
from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Callable, NamedTuple

import torch
from mmengine.config import Config

from ..config import randomness_of
from ..errors import ConfigError
from ..facts.compatibility import doubts
from ..facts.own_code import PREFIX
from ..fingerprint.divergence import Divergence, Ranks, difference_up_to
from ..fingerprint.manifest import Manifest, compare_manifests
from ..fingerprint.reader import read_ranks, read_run
from ..runs import surroundings
from ..runs.child import Training
from ..runs.config_edits import only_fingerprints, virtual_ranks
from ..runs.launcher import PlannedRun, TrainingFailed, one_thread_each, plan, run_with_progress
from ..util.text import counted, listed

REFERENCE = 'reference'  # folder of the run with which variations are compared


class Variation(NamedTuple):
    """A condition that must not matter."""
    title: str  # for the certificate
    # changes the config of the reference in place, given the iterations before an event
    change: Callable[[Config, int], None] = lambda cfg, at: None
    # changed variables; they may depend on this machine
    env: Callable[[], dict[str, str]] = dict
    prepare: str | None = None  # 'module:function' that the process calls first
    elsewhere: bool = False  # start in another folder, with links to the files of this one
    processes: int = 1
    twice: bool = False  # compare two runs of this variation instead of the common reference
    only: str = ''  # the part of a fingerprint that must not differ; '' for all parts
    kill: bool = False  # kill the run in its middle and resume it
    validate: bool = False  # validate in the middle; the reference never does
    # why a config cannot be varied so with this number of iterations; ''
    impossible: Callable[[Config, int], str] = lambda cfg, iterations: ''


def _other_workers(cfg: Config, at: int) -> None:
    loader = cfg.train_dataloader
    # 0 and 1 worker load in the same order: one of the runs has several
    loader.num_workers = 0 if loader.get('num_workers', 0) > 1 else 2
    loader.persistent_workers = False
    loader.prefetch_factor = 3 if loader.num_workers else None


def keep_checkpoint(cfg: Config, at: int) -> None:
    """Let a checkpoint be written every ``at`` iterations."""
    cfg.default_hooks.checkpoint.update(by_epoch=False, interval=at)


def _cannot_resume(cfg: Config, iterations: int) -> str:
    streams = (cfg.get('randomness') or {}).get('worker_seed', 'sample')
    if iterations < 2:
        return 'it takes two iterations to be killed between them'
    if streams != 'sample':
        return f'with worker_seed={streams!r} no run resumes within an epoch'
    return ''


def _cannot_switch_instruction_sets(cfg: Config, iterations: int) -> str:
    if randomness_of(cfg).numerics.cpu:
        return 'randomness.numerics.cpu pins the instruction sets'
    if not surroundings.instruction_sets():
        return 'instruction sets can be switched off on x86-64 only'
    return ''


VARIATIONS = {
    'process': Variation('the same in another process'),
    'workers': Variation(
        'another number of workers', _other_workers,
        impossible=lambda cfg, iterations: '' if iterations > 1 else
        'it takes two iterations for a second worker to load a batch'),
    'hashseed': Variation('PYTHONHASHSEED=1 instead of 0', env=lambda: {'PYTHONHASHSEED': '1'}),
    'resume': Variation('killed and resumed', keep_checkpoint, kill=True,
                        impossible=_cannot_resume),
    'validation': Variation(
        'with a validation in between', validate=True,
        impossible=lambda cfg, iterations: '' if cfg.get('val_cfg') is not None else
        'the config has no validation'),
    'files': Variation('files listed in the opposite order',
                       prepare=f'{surroundings.__name__}:reverse_listings'),
    'folder': Variation('started in another folder', elsewhere=True),
    # a time zone without a database of them, half of the world away
    'locale': Variation('in the time zone UTC+05:45, with LC_ALL=C',
                        env=lambda: {'TZ': 'XXX-5:45', 'LC_ALL': 'C'}),
    'load': Variation('with load on the other cores',
                      prepare=f'{surroundings.__name__}:burn_other_cores'),
    'cpu': Variation('with other instruction sets: the same batches', only='batch',
                     env=lambda: surroundings.instruction_sets(),
                     impossible=_cannot_switch_instruction_sets),
    'ranks': Variation('on two ranks, twice', processes=2, twice=True),
}
# the default of the command; all variations take twice the time
USUAL = ('process', 'workers', 'hashseed', 'resume', 'validation')


class VariationResult(NamedTuple):
    """The outcome of a variation."""
    name: str
    title: str
    iterations: int = 0
    difference: Divergence | None = None
    reference: str = REFERENCE  # folder of the run with which it is compared, beside its own
    skipped: str = ''  # why it was not run; '' if it was
    remark: str = ''  # on fields that may differ

    @property
    def equal(self) -> bool:
        return not self.skipped and self.difference is None and self.iterations > 0


def variations_of(cfg: Config) -> dict[str, Variation]:
    """Return :data:`VARIATIONS`; with virtual ranks, ``ranks`` varies the number of processes."""
    ranks = virtual_ranks(cfg)
    if ranks is None:
        return VARIATIONS
    processes = min(ranks, max(2, _devices()[0]))
    return {**VARIATIONS, 'ranks': Variation(
        f'{ranks} virtual ranks on {processes} processes', processes=processes)}


def train_and_compare(cfg: Config, work_dir: str, names: Sequence[str], iterations: int, at: int,
                      jobs: int, level: str, on_progress: Callable[[str], None]
                      ) -> list[VariationResult]:
    """Train the reference and all variations in fresh processes.

    The arguments are those of :func:`mmrepro.verbs.verify`; what an earlier call has left in
    ``work_dir`` is removed.
    """
    table = variations_of(cfg)
    skipped = {name: reason for name in names
               if (reason := _impossible(cfg, table[name], iterations))}
    references = {name: f'{name}.{REFERENCE}' if table[name].twice else REFERENCE
                  for name in names if name not in skipped}
    trained = {REFERENCE: Variation('reference')}
    for name, reference in references.items():
        trained.setdefault(reference, table[name])
        trained[name] = table[name]
    try:
        train(cfg, work_dir, trained, iterations, at, jobs, level, on_progress)
    except TrainingFailed as error:
        if error.refusal is None:
            raise
        raise ConfigError(f'--iters {iterations}: {error.refusal}') from error
    for reference in dict.fromkeys(references.values()):
        ranks = read_ranks(os.path.join(work_dir, reference))
        count = min((len(log.steps) for log in ranks.values()), default=0)
        if count < iterations:
            raise ConfigError(f'--iters {iterations}: this config, as trained here, ends after '
                              f'{counted(count, "iteration")}')
    return [VariationResult(name, table[name].title, skipped=skipped[name]) if name in skipped else
            result_of(name, table[name], work_dir, references[name], iterations) for name in names]


def train(cfg: Config, work_dir: str, table: Mapping[str, Variation], iterations: int, at: int,
          jobs: int, level: str, on_progress: Callable[[str], None],
          to_the_end: bool = False) -> None:
    """Train each variation of a config in fresh processes, in a folder of its name.

    ``to_the_end``: until the config ends the training, which is after ``iterations``. The other
    arguments are those of :func:`train_and_compare`.
    """
    runs = []
    for name, variation in table.items():
        varied = copy.deepcopy(cfg)
        only_fingerprints(varied, level, variation.validate)
        variation.change(varied, at)
        varied.resume = False
        varied.work_dir = os.path.abspath(os.path.join(work_dir, name.replace(' ', '_')))
        runs.append(_planned(name, variation, varied, iterations, at, to_the_end))
    run_with_progress(runs, iterations, on_progress, jobs)


def _devices() -> tuple[int, str]:
    """Return how many processes can train, and on which devices."""
    if torch.cuda.is_available():
        return torch.cuda.device_count(), 'GPUs'
    return os.cpu_count() or 1, 'cores'


def _impossible(cfg: Config, variation: Variation, iterations: int) -> str:
    """Return why a config cannot be varied so on this machine; ''."""
    count, devices = _devices()
    if devices == 'cores' and virtual_ranks(cfg) is not None:
        count = max(count, 2)  # processes that share a core are slower, no more
    if variation.processes > count:
        return f'it takes {variation.processes} {devices}; there is one'
    return variation.impossible(cfg, iterations)


def _planned(name: str, variation: Variation, cfg: Config, iterations: int, at: int,
             to_the_end: bool) -> PlannedRun:
    folder = cfg.work_dir
    os.makedirs(folder, exist_ok=True)
    for stale in os.listdir(folder):
        if stale == 'last_checkpoint' or stale.endswith('.pth'):
            os.remove(os.path.join(folder, stale))
    path = os.path.join(folder, 'config.py')
    cfg.dump(path)
    training = Training(path, iterations=None if to_the_end else iterations,
                        whole=not to_the_end, prepare=variation.prepare,
                        validate_after=at if variation.validate else None)
    # one iteration beyond the checkpoint is lost and trained again
    trainings = [training]
    if variation.kill:
        trainings = [training._replace(kill_after=min(at + 1, iterations - 1)),
                     training._replace(resume=True)]
    cwd = None
    if variation.elsewhere:
        cwd = surroundings.linked_folder(os.path.join(folder, 'elsewhere'), os.getcwd())
    env = {'PYTHONHASHSEED': '0', **one_thread_each(), **variation.env()}
    return plan(name, folder, trainings, env, variation.processes, cwd)


def changed_meanwhile(results: Sequence[VariationResult], work_dir: str) -> list[str]:
    """Name the code and the versions that were changed while the runs trained; [] for none."""
    found: dict[str, None] = {}
    for result in results:
        runs = [read_run(os.path.join(work_dir, name)) for name in (result.reference, result.name)
                if not result.skipped]
        if runs and all(run.manifests for run in runs):
            a, b = (Manifest(run.work_dir, run.manifests[-1]) for run in runs)
            found.update(dict.fromkeys(doubts([
                row for row in compare_manifests(a, b)
                if row.name.startswith((PREFIX, 'version.'))])))
    return [f'changed while the runs trained: {listed(list(found), 6)}'] if found else []


def result_of(name: str, variation: Variation, work_dir: str, reference: str,
              iterations: int) -> VariationResult:
    """Compare the fingerprints in the folders of a variation and of its reference."""
    a, b = (read_ranks(os.path.join(work_dir, folder)) for folder in (reference, name))
    difference = difference_up_to(_only(variation.only, a), _only(variation.only, b), iterations)
    remark = ''
    if difference is None and variation.only:
        rest = difference_up_to(a, b, iterations)
        remark = 'weights agree as well' if rest is None else (
            f'{listed([field.field for field in rest.ranks[rest.rank]])} differ from iteration '
            f'{rest.iteration} on, as on another CPU')
    return VariationResult(name, variation.title, iterations, difference, reference, remark=remark)


def _only(part: str, ranks: Ranks) -> Ranks:
    """Reduce fingerprints to one part; '' for all parts."""
    if not part:
        return ranks
    return {rank: log._replace(steps={i: {part: step[part]} for i, step in log.steps.items()
                                      if part in step})
            for rank, log in ranks.items()}
