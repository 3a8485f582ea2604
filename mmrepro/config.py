"""The ``randomness`` dict of a config: parsed once, validated, frozen."""
from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from .errors import RandomnessError
from .seeds import MAX_SEED, SCHEME, STREAMS, RootSeed, check_seed
from .util.text import did_you_mean

# MMDetection 2.x top-level key -> key of `randomness`
LEGACY_KEYS = {'seed': 'seed', 'deterministic': 'deterministic', 'diff_seed': 'diff_rank_seed'}

NO_CHECKS = dict(samples=0, steps=0, witness=False, validation=False)  # self_checks=False
AUTO = 'auto'  # `resume`: the run's own checkpoint, else the weights of `load_from`
MAX_CHECK = 2**31 - 1  # of an interval between checks
MAX_COUNT = 4096  # of threads and of virtual ranks
_BOOL = (False, True)
_CHOICES: dict[str, tuple[Any, ...]] = {
    'diff_rank_seed': _BOOL,
    'deterministic': (False, 'warn', True),
    'worker_seed': ('sample', 'worker', 'mmengine'),
    'operators': (None, 'auto', 'torch', 'triton'),
    'numerics.cpu': (None, 'avx2', 'portable'),
    'numerics.float32_precision': (None, 'highest', 'high', 'medium'),
    'self_checks.witness': (None, False, 'warn', True),
    'self_checks.validation': (False, 'warn', True),
    'virtual_ranks.memory': (None, 'separate', 'shared', 'sharded'),
    'independent_predictions': _BOOL,
    'resume_strict': _BOOL,
}
# value of `worker_seed` -> streams that nothing draws from then; None: all of them
_UNUSED_STREAMS: dict[str, Sequence[str] | None] = {'mmengine': None, 'worker': ('sample', )}


@dataclass(frozen=True)
class Numerics:
    """Settings of numerics; None leaves a setting as the libraries have it.

    Attributes:
        cpu: 'avx2': all libraries use AVX2 and nothing above it, so that CPUs of one maker with and
            without AVX-512 run the same kernels. 'portable': besides, no operator is left to MKL,
            which has other kernels for each maker, so that all x86-64 CPUs with AVX2 agree.
        num_threads: threads inside a CPU operator; None: 1 with virtual ranks, as torchrun has it,
            unless OMP_NUM_THREADS is set.
        float32_precision: 'highest', 'high' or 'medium' as in
            ``torch.set_float32_matmul_precision``. With ``deterministic`` it may not change during
            the run.
    """
    cpu: str | None = None
    num_threads: int | None = None
    float32_precision: str | None = None

    def __post_init__(self) -> None:
        _check_choices(self, 'numerics.')
        if self.cpu == 'portable' and self.num_threads is None:
            raise RandomnessError(
                "randomness.numerics.cpu='portable' needs num_threads, because sums are split by "
                "the number of threads; write numerics=dict(cpu='portable', num_threads=1), or "
                'more')
        if self.num_threads is not None:
            _check_int('numerics.num_threads', self.num_threads, 1, MAX_COUNT)


@dataclass(frozen=True)
class SelfChecks:
    """The self-checks of a run with ``deterministic=True``.

    Attributes:
        samples: load at least one of so many samples twice; 0: none.
        steps: repeat the steps of iterations 1, 2, 4, 8, ... and of every ``steps``-th; 0: none.
        witness: let a second process resume from the run's checkpoints and compare; None: in runs
            of 50 iterations or more; True: in runs of any length; 'warn': a difference is a
            warning, not an error; False: never.
        validation: compare the training before and after each validation; 'warn': a difference is
            a warning, not an error; False: never.
        nonrepeatable_datasets: names of dataset classes whose samples are not loaded twice.
    """
    samples: int = 1000
    steps: int = 1000
    witness: bool | str | None = None
    validation: bool | str = True
    nonrepeatable_datasets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_choices(self, 'self_checks.')
        for name in ('samples', 'steps'):
            _check_int(f'self_checks.{name}', getattr(self, name), 0, MAX_CHECK, 'an int')
        names = self.nonrepeatable_datasets
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise RandomnessError(
                f'randomness.self_checks.nonrepeatable_datasets={names!r} is not allowed; allowed '
                "is a list of names of dataset classes, for example ['MyStream']")
        # a config file turns tuples into lists
        object.__setattr__(self, 'nonrepeatable_datasets', tuple(names))


@dataclass(frozen=True)
class VirtualRanks:
    """Ranks that do not depend on the number of processes; see :func:`mmrepro.on_virtual_ranks`.

    Attributes:
        ranks: number of ranks, on 1 to as many processes; None: each process is a rank.
        memory: what the ranks of a process share; no bit depends on it. None: one copy of weights,
            optimizer state and averages, if optimizer and hooks allow it, else a copy for each
            rank; 'shared': one copy, or an error; 'separate': a copy for each rank; 'sharded': a
            part of each tensor for each rank, by FSDP2.
    """
    ranks: int | None = None
    memory: str | None = None

    def __post_init__(self) -> None:
        _check_choices(self, 'virtual_ranks.')
        if self.ranks is not None:
            _check_int('virtual_ranks', self.ranks, 1, MAX_COUNT)


@dataclass(frozen=True)
class RandomnessConfig:
    """The ``randomness`` of a run, complete and checked.

    Attributes:
        seed: root of every stream, 0 to 2**32 - 1; None lets rank 0 draw one.
        diff_rank_seed: ranks differ in what happens inside the model; samplers and samples are
            the same with and without it.
        deterministic: False, True (refuse what is not deterministic) or 'warn' (warn of it once).
        worker_seed: what randomness inside ``dataset[i]`` depends on. 'sample': the position in
            the global sample stream; 'worker': rank, worker and epoch; 'mmengine': MMEngine's own
            formula, and its own streams everywhere else, for repeating an old run.
        streams: a root seed of its own for single streams, for example ``dict(init=7)``.
        operators: provider of mmcv's operators. 'torch': mmrepro's, in PyTorch, with the same
            bits however mmcv was installed; 'triton': the same, with single kernels in Triton on
            CUDA where there are some; 'auto': on a CPU as 'torch', and on CUDA for each operator
            the fastest form that adds in a fixed order and that a GPU has run, compiled ones of
            mmcv included; None: 'auto' with ``deterministic``, else whatever mmcv has.
        numerics: instruction sets, threads and precision; a dict of :class:`Numerics`.
        self_checks: what the run checks of itself; a dict of :class:`SelfChecks`, or False for
            nothing.
        virtual_ranks: the number of ranks, or a dict of :class:`VirtualRanks`; None: as many ranks
            as processes.
        independent_predictions: validate and test one image at a time, each with the same random
            numbers, so that no prediction depends on other images, their order or the number of
            ranks.
        resume_strict: refuse to resume where settings, versions or hardware differ from those of
            the run that wrote the checkpoint in a way that changes bits; False: only warn.
    """
    seed: int | None = None
    diff_rank_seed: bool = False
    deterministic: bool | str = False
    worker_seed: str = 'sample'
    streams: Mapping[str, int] = field(default_factory=dict, hash=False)
    operators: str | None = None
    numerics: Numerics = field(default_factory=Numerics)
    self_checks: SelfChecks = field(default_factory=SelfChecks)
    virtual_ranks: VirtualRanks = field(default_factory=VirtualRanks)
    independent_predictions: bool = False
    resume_strict: bool = True

    def __post_init__(self) -> None:
        if self.seed is not None:
            _check_int('seed', self.seed, 0, MAX_SEED)
        _check_choices(self)
        checks: Any = self.self_checks
        checks = NO_CHECKS if checks is False else checks
        ranks: Any = self.virtual_ranks
        ranks = dict(ranks=ranks) if ranks is None or type(ranks) is int else ranks
        for name, value in (('numerics', _section(Numerics, 'numerics', self.numerics)),
                            ('self_checks', _section(SelfChecks, 'self_checks', checks)),
                            ('virtual_ranks', _section(VirtualRanks, 'virtual_ranks', ranks)),
                            ('streams', self._checked_streams())):
            object.__setattr__(self, name, value)
        if self.independent_predictions and self.uses_stock_streams:
            raise RandomnessError(
                "randomness.worker_seed='mmengine' tests as MMEngine does, which "
                'randomness.independent_predictions=True changes; remove one of them')

    @classmethod
    def parse(cls, randomness: Mapping[str, Any] | None) -> RandomnessConfig:
        """Read the dict of a config.

        Raises:
            RandomnessError: an unknown key (with the nearest known one), a wrong type or value;
                the message names the key, the value and what is allowed.
        """
        if randomness is None:
            return cls()
        if isinstance(randomness, cls):
            return randomness
        _check_mapping('randomness', randomness,
                       'a dict such as dict(seed=42, deterministic=True)')
        _refuse_unknown('randomness', randomness, [field.name for field in fields(cls)], 'keys')
        return cls(**randomness)

    def _checked_streams(self) -> dict[str, int]:
        _check_mapping('randomness.streams', self.streams, 'a dict such as dict(init=7)')
        _refuse_unknown('randomness.streams', self.streams, list(STREAMS), 'streams')
        unused = _UNUSED_STREAMS.get(self.worker_seed, ())
        for stream, root in self.streams.items():
            _check_int(f'streams.{stream}', root, 0, MAX_SEED, 'an int')
            if unused is None or stream in unused:
                raise RandomnessError(
                    f'randomness.streams.{stream}={root!r} has no effect with '
                    f'randomness.worker_seed={self.worker_seed!r}; remove one of them')
        return dict(self.streams)

    @property
    def root(self) -> RootSeed:
        """The root of all streams."""
        return RootSeed(check_seed(self.seed, 'randomness.seed'), self.streams)

    def with_seed(self, seed: int) -> RandomnessConfig:
        """Return the same configuration with the seed that is in effect."""
        return replace(self, seed=check_seed(seed, 'randomness.seed'))

    def as_dict(self) -> dict[str, Any]:
        """Return a plain dict, as it is written into the config and into checkpoints."""
        return asdict(self)

    @property
    def flags(self) -> dict[str, Any]:
        """Arguments of ``determinism.enable``, other than those that ``env_cfg`` decides on."""
        numerics = asdict(self.numerics)
        if self.virtual_ranks.ranks and self.numerics.num_threads is None \
                and 'OMP_NUM_THREADS' not in os.environ:
            numerics['num_threads'] = 1  # as torchrun sets it for several processes
        return {'mode': self.deterministic, **numerics}

    @property
    def uses_stock_streams(self) -> bool:
        """Whether MMEngine's own streams are asked for."""
        return self.worker_seed == 'mmengine'

    @property
    def wants_witness(self) -> bool:
        """Whether a witness is wanted, while the run trains or when it has ended."""
        return self.deterministic is True and not self.uses_stock_streams and (
            self.self_checks.witness is not False)

    def promises(self) -> list[tuple[str, str]]:
        """Return the promises and non-promises of these values, in the user's words."""
        same_bits = {True: 'yes', 'warn': 'no: warn keeps non-deterministic kernels',
                     False: 'no: deterministic=False lets kernels add in any order'}
        stock = "no: MMEngine's own streams"
        keyed = resumes = undisturbed = stock
        if self.worker_seed == 'sample':
            keyed, resumes, undisturbed = 'yes', self._resumes(), 'yes'
        elif self.worker_seed == 'worker':
            keyed, undisturbed = 'no: streams belong to workers', 'yes'
            resumes = 'from the end of an epoch only: streams belong to workers'
        return [
            ('same bits on the same machine, versions and config', same_bits[self.deterministic]),
            ('same data for any num_workers, persistent_workers, prefetch_factor', keyed),
            ('a resumed run is the uninterrupted one', resumes),
            ('validation and logging leave training alone', undisturbed),
            ('same bits on another GPU model, CPU type or version of torch',
             'on CPUs, for every type with AVX2' if self.numerics.cpu == 'portable' else 'never'),
        ]

    def _resumes(self) -> str:
        """Return the promise about a resume, where every iteration has streams of its own."""
        if self.deterministic is not True:
            return 'not tried without deterministic=True'
        if self.self_checks.witness is False:
            return 'not tried (randomness.self_checks.witness=False)'
        return 'the last line of a training says what a second process has tried'

    def summary(self) -> str:
        """Return the values that differ from the defaults in one line, then the promises."""
        defaults = RandomnessConfig().as_dict()
        given = [f'{key}={value!r}' for key, value in self.as_dict().items()
                 if value != defaults[key]]
        return '\n'.join([', '.join(given), *(f'  {name}: {value}'
                                              for name, value in self.promises())])

    def table(self) -> str:
        """Return a table for the log: every effective value, then the promises."""
        rows = [('randomness', 'value'), *((k, repr(v)) for k, v in self.as_dict().items()),
                ('scheme', str(SCHEME)), ('', ''), ('promised', ''), *self.promises()]
        width = max(len(name) for name, _ in rows)
        return '\n'.join(f'{name:<{width}}  {value}'.rstrip() for name, value in rows)


def _section(kind: Any, name: str, value: Any) -> Any:
    """Return the value of a key whose value is a dict, checked."""
    if isinstance(value, kind):
        return value
    _check_mapping(f'randomness.{name}', value, _SECTIONS[name])
    _refuse_unknown(f'randomness.{name}', value, [field.name for field in fields(kind)], 'keys')
    return kind(**value)


# key whose value is a dict -> what is allowed, for messages
_SECTIONS = {
    'numerics': 'a dict such as dict(num_threads=4)',
    'self_checks': 'a dict such as dict(steps=1000, witness=True), or False for no check',
    'virtual_ranks': f'None, an int from 1 to {MAX_COUNT}, or a dict such as '
                     "dict(ranks=8, memory='separate')",
}


def _check_mapping(name: str, value: Any, allowed: str) -> None:
    if not isinstance(value, Mapping):
        raise RandomnessError(f'{name}={value!r} has type {type(value).__name__}; allowed is '
                              f'{allowed}')


def _refuse_unknown(name: str, given: Mapping[str, Any], known: list[str], kind: str) -> None:
    for key in given:
        if key not in known:
            hint = did_you_mean(str(key), known) or '.'
            raise RandomnessError(
                f'{name} has an unknown {kind[:-1]} {key!r} (value {given[key]!r}){hint} '
                f'Known {kind}: {", ".join(known)}')


def _check_choices(values: Any, prefix: str = '') -> None:
    """Check the fields of a dataclass that :data:`_CHOICES` has under ``prefix``."""
    for key in fields(values):
        allowed = _CHOICES.get(f'{prefix}{key.name}')
        value = getattr(values, key.name)
        # types as well, because 1 == True and 0 == False
        if allowed is not None and not any(
                value == choice and type(value) is type(choice) for choice in allowed):
            raise RandomnessError(f'randomness.{prefix}{key.name}={value!r} is not allowed; '
                                  f'allowed: {", ".join(map(repr, allowed))}')


def _check_int(name: str, value: Any, low: int, high: int, allowed: str = 'None or an int'
               ) -> None:
    an_int = isinstance(value, int) and not isinstance(value, bool)
    if not an_int or not low <= value <= high:
        problem = 'is out of range' if an_int else f'has type {type(value).__name__}'
        raise RandomnessError(f'randomness.{name}={value!r} {problem}; allowed is {allowed} '
                              f'from {low} to {high}')


def refuse_misspelt(cfg: Mapping[str, Any]) -> None:
    """Refuse a key such as ``randomnes``: the run would silently train with another seed.

    Raises:
        RandomnessError: for a key that is nearly, but not, ``randomness``.
    """
    for key in cfg:
        # randomness_fast and the like are variables of the config's own
        if key == 'randomness' or key.startswith('randomness_'):
            continue
        meant = did_you_mean(key.lower(), ['randomness'], cutoff=0.85)
        if meant:
            raise RandomnessError(f'the config has a key {key!r} (value {cfg[key]!r}) that nothing '
                                  f'reads{meant}')


_of_process: dict[str, Any] = {}  # randomness for all runners that are built in this process


def set_for_process(randomness: Mapping[str, Any] | None) -> None:
    """Let keys of ``randomness`` replace those of the configs of runners; None: as they are.

    Raises:
        RandomnessError: as :meth:`RandomnessConfig.parse`.
    """
    RandomnessConfig.parse(randomness)
    _of_process.clear()
    _of_process.update(randomness or {})


def for_process(randomness: Any) -> Any:
    """Return the ``randomness`` of a config with the keys of :func:`set_for_process`.

    Warns:
        UserWarning: a value of the config is replaced.
    """
    if not _of_process:
        return randomness
    given = randomness.as_dict() if isinstance(randomness, RandomnessConfig) else randomness or {}
    _check_mapping('randomness', given, 'a dict such as dict(seed=42, deterministic=True)')
    for key, value in _of_process.items():
        before = given.get(key)
        # None is no seed, and False MMEngine's own default; the seed 0 is equal to it
        if before is not None and before is not False and before != value:
            warnings.warn(
                f'randomness.{key}={before!r} of the config is replaced by {value!r}, of '
                'mmrepro.activate(randomness=...)', stacklevel=2)
    return {**given, **_of_process}


def upgrade_legacy_keys(cfg: MutableMapping[str, Any]) -> None:
    """Move MMDetection 2.x's top-level ``seed`` and so on into ``randomness``.

    ``cfg`` is changed in place, with a deprecation warning that shows the new form.

    Raises:
        RandomnessError: when both forms are given and disagree.
    """
    given = {old: cfg[old] for old in LEGACY_KEYS if old in cfg}
    if not given:
        return
    randomness = dict(cfg.get('randomness') or {})
    for old, value in given.items():
        new = LEGACY_KEYS[old]
        if randomness.get(new, value) != value:
            raise RandomnessError(
                f'the config says {old}={value!r} at the top level (MMDetection 2.x) and '
                f'randomness.{new}={randomness[new]!r}; remove the first')
        randomness[new] = value
        cfg.pop(old)  # `Config` has no __delitem__
    cfg['randomness'] = randomness
    form = ', '.join(f'{key}={value!r}' for key, value in randomness.items())
    warnings.warn(
        f'{", ".join(given)} at the top level of a config is the form of MMDetection 2.x; '
        f'write randomness = dict({form})', DeprecationWarning, stacklevel=2)


def randomness_of(cfg: Any) -> RandomnessConfig:
    """Return the parsed ``randomness`` of a config that no runner was built of yet.

    Raises:
        RandomnessError: as :meth:`RandomnessConfig.parse`.
    """
    given = cfg.get('randomness')
    if given is None or isinstance(given, Mapping):
        given = {**{new: cfg[old] for old, new in LEGACY_KEYS.items() if old in cfg},
                 **(given or {})}
    return RandomnessConfig.parse(given)


def with_virtual_ranks(randomness: Mapping[str, Any] | None, ranks: int) -> dict[str, Any]:
    """Return ``randomness`` with a number of virtual ranks; what the ranks share stays.

    >>> with_virtual_ranks(dict(virtual_ranks=dict(ranks=2, memory='shared')), 8)
    {'virtual_ranks': {'ranks': 8, 'memory': 'shared'}}
    """
    before = (randomness or {}).get('virtual_ranks')
    value = {**before, 'ranks': ranks} if isinstance(before, Mapping) else ranks
    return {**(randomness or {}), 'virtual_ranks': value}


def prepare_cfg(cfg: Any) -> Any:
    """Return a copy of the config with MMDetection 2.x's keys moved to where they belong."""
    cfg = copy.deepcopy(cfg)
    refuse_misspelt(cfg)
    upgrade_legacy_keys(cfg)
    return cfg


def imports_of(cfg: Mapping[str, Any]) -> list[str]:
    """Return the modules in ``custom_imports`` of a config, which may be a single name."""
    given = (cfg.get('custom_imports') or {}).get('imports') or []
    return [given] if isinstance(given, str) else list(given)


def is_count(value: Any) -> bool:
    """Whether a setting is an integer from 1 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_due(count: int, interval: int = 0) -> bool:
    """Whether a self-check takes the ``count``-th occurrence, counted from 1.

    Checks get rarer: 1, 2, 4, 8, ..., and every ``interval``-th.

    >>> [count for count in range(1, 13) if is_due(count, interval=6)]
    [1, 2, 4, 6, 8, 12]
    """
    return count & (count - 1) == 0 or (interval > 0 and count % interval == 0)
