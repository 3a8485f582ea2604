"""The ``randomness`` dict of a config: parsed once, validated, frozen."""
from __future__ import annotations

import copy
import difflib
import inspect
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import (
    Any,
    Callable,
)

from .errors import RandomnessError
from .seeds import MAX_SEED, SCHEME, STREAMS, Root, check_seed

__all__ = ['LEGACY_KEYS', 'RandomnessConfig', 'named_arguments', 'prepare_cfg', 'refuse_misspelt',
           'upgrade_legacy_keys']


# MMDetection 2.x top-level key -> key of `randomness`
LEGACY_KEYS = {'seed': 'seed', 'deterministic': 'deterministic', 'diff_seed': 'diff_rank_seed'}

_BOOL = (False, True)
MAX_CHECK = 2**31 - 1  # of an interval between checks
_CHOICES: dict[str, tuple[Any, ...]] = {
    'diff_rank_seed': _BOOL,
    'deterministic': (False, 'warn', True),
    'worker_seed': ('sample', 'worker', 'mmengine'),
    'step_seed': _BOOL,
    'operators': (None, 'auto', 'torch', 'triton'),
    'cudnn_enabled': (None, *_BOOL),
    'cudnn_benchmark': (None, *_BOOL),
    'float32_precision': (None, 'highest', 'high', 'medium'),
    'fill_uninitialized_memory': _BOOL,
    'resume_strict': _BOOL,
    'independent_predictions': _BOOL,
    'cpu': (None, 'avx2'),
    'virtual_ranks_memory': (None, 'separate', 'shared'),
}
# key, value -> the streams that nothing draws from then; None: all of them
_UNUSED_STREAMS = (
    ('worker_seed', 'mmengine', None),
    ('worker_seed', 'worker', ('sample', )),
    ('step_seed', False, ('hook', 'step')),
)


@dataclass(frozen=True)
class RandomnessConfig:
    """What the user asks of randomness, complete and checked.

    Attributes:
        seed: root of every stream, 0 to 2**32 - 1; None lets rank 0 draw one.
        diff_rank_seed: ranks differ in what happens inside the model; samplers and samples are
            the same with and without it.
        deterministic: False, True (refuse what is not deterministic) or 'warn' (warn of it once).
        worker_seed: what randomness inside ``dataset[i]`` depends on. 'sample': the position in
            the global sample stream; 'worker': rank, worker and epoch; 'mmengine': MMEngine's own
            formula, for repeating an old run.
        step_seed: put the generators at the start of their stream before each training step.
        operators: who provides mmcv's operators. 'torch': mmrepro's, in PyTorch, with the same
            bits however mmcv was installed; 'triton': the same, with single kernels in Triton on
            CUDA where there are some; 'auto': on a CPU as 'torch', and on CUDA for each operator
            the fastest form that adds in a fixed order, compiled ones of mmcv included; None:
            'auto' with ``deterministic``, else whatever mmcv has.
        cudnn_enabled: use cuDNN; None leaves it as it is.
        cudnn_benchmark: search for the fastest convolution, whose choice may differ from run to
            run; None does what ``env_cfg.cudnn_benchmark`` says. Excludes ``deterministic=True``.
        float32_precision: 'highest', 'high' or 'medium' as in
            ``torch.set_float32_matmul_precision``; None leaves it as it is. With
            ``deterministic`` it may not change during the run.
        fill_uninitialized_memory: fill fresh memory with NaN (finds reads of uninitialised memory;
            costs up to 15 % of a step).
        num_threads: threads inside a CPU operator; None leaves it as it is.
        cpu: 'avx2': all libraries use AVX2 and nothing above it, so that CPUs of one maker with and
            without AVX-512 run the same kernels; None leaves the choice to the libraries.
        virtual_ranks: V: the run has V ranks, however many processes it is started with, 1 to V;
            see :func:`mmrepro.on_virtual_ranks`. None: as many ranks as processes.
        virtual_ranks_memory: what the ranks of one process share; no bit depends on it. None: one
            copy of weights, optimizer state and averages, if all hooks are known to allow it, else
            a copy for each rank; 'shared': one copy, although there are hooks that are not known;
            'separate': a copy for each rank.
        resume_strict: refuse to resume where settings, versions or hardware differ from those of
            the run that wrote the checkpoint in a way that changes bits; False: only warn.
        check_steps: with ``deterministic=True``, repeat the steps of iterations 1, 2, 4, 8, ... and
            of every ``check_steps``-th and compare their bits; 0: repeat none.
        check_samples: with ``deterministic=True``, load at least one of so many samples twice and
            compare the results; 0: none.
        independent_predictions: validate and test one image at a time, each with the same random
            numbers, so that no prediction depends on other images, their order or the number of
            ranks.
        nonrepeatable_datasets: names of dataset classes that the check of samples leaves out.
    """
    seed: int | None = None
    diff_rank_seed: bool = False
    deterministic: bool | str = False
    worker_seed: str = 'sample'
    step_seed: bool = True
    operators: str | None = None
    cudnn_enabled: bool | None = None
    cudnn_benchmark: bool | None = None
    float32_precision: str | None = None
    fill_uninitialized_memory: bool = False
    num_threads: int | None = None
    resume_strict: bool = True
    streams: Mapping[str, int] = field(default_factory=dict, hash=False)
    check_steps: int = 1000
    check_samples: int = 1000
    nonrepeatable_datasets: tuple[str, ...] = ()
    virtual_ranks: int | None = None
    virtual_ranks_memory: str | None = None
    independent_predictions: bool = False
    cpu: str | None = None

    def __post_init__(self) -> None:
        if self.seed is not None:
            _checked_int('seed', self.seed, 0, MAX_SEED)
        if self.num_threads is not None:
            _checked_int('num_threads', self.num_threads, 1, 4096)
        _checked_int('check_steps', self.check_steps, 0, MAX_CHECK, 'an int')
        _checked_int('check_samples', self.check_samples, 0, MAX_CHECK, 'an int')
        names = self.nonrepeatable_datasets
        if not isinstance(names, (list, tuple)) or not all(isinstance(one, str) for one in names):
            raise RandomnessError(
                f'randomness.nonrepeatable_datasets={names!r} is not allowed; allowed is a list '
                "of names of dataset classes, for example ['MyStream']")
        # a config file turns tuples into lists
        object.__setattr__(self, 'nonrepeatable_datasets', tuple(names))
        if self.virtual_ranks is not None:
            _checked_int('virtual_ranks', self.virtual_ranks, 1, 4096)
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            # `is`/type comparison, because 1 == True and 0 == False
            if not any(value == choice and type(value) is type(choice) for choice in allowed):
                raise RandomnessError(
                    f'randomness.{name}={value!r} is not allowed; allowed: '
                    f'{", ".join(map(repr, allowed))}')
        object.__setattr__(self, 'streams', self._checked_streams())
        if self.deterministic is True and self.cudnn_benchmark:
            raise RandomnessError(
                'randomness.cudnn_benchmark=True and randomness.deterministic=True exclude each '
                'other; remove one of them')
        if self.independent_predictions and self.legacy:
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
        if not isinstance(randomness, Mapping):
            raise RandomnessError(
                f'randomness={randomness!r} has type {type(randomness).__name__}; allowed is a '
                "dict such as dict(seed=42, deterministic=True)")
        _refuse_unknown('randomness', randomness, [field.name for field in fields(cls)], 'keys')
        return cls(**dict(randomness))

    def _checked_streams(self) -> dict[str, int]:
        if not isinstance(self.streams, Mapping):
            raise RandomnessError(
                f'randomness.streams={self.streams!r} has type {type(self.streams).__name__}; '
                'allowed is a dict such as dict(init=7)')
        _refuse_unknown('randomness.streams', self.streams, list(STREAMS), 'streams')
        for stream, root in self.streams.items():
            _checked_int(f'streams.{stream}', root, 0, MAX_SEED, 'an int')
            for key, value, unused in _UNUSED_STREAMS:
                if getattr(self, key) == value and (unused is None or stream in unused):
                    raise RandomnessError(f'randomness.streams.{stream}={root!r} has no effect '
                                          f'with randomness.{key}={value!r}; remove one of them')
        return dict(self.streams)

    @property
    def root(self) -> Root:
        """Where all streams begin: the seed, and the roots that streams have of their own."""
        return Root(check_seed(self.seed, 'randomness.seed'), self.streams)

    def with_seed(self, seed: int) -> RandomnessConfig:
        """The same configuration with the seed that is in effect."""
        return replace(self, seed=check_seed(seed, 'randomness.seed'))

    def as_dict(self) -> dict[str, Any]:
        """Plain dict, as it is written into the config and into checkpoints."""
        return asdict(self)

    @property
    def flags(self) -> dict[str, Any]:
        """Arguments of ``determinism.enable``, other than those that ``env_cfg`` decides on."""
        return {'mode': self.deterministic, **{name: getattr(self, name) for name in (
            'float32_precision', 'fill_uninitialized_memory', 'num_threads', 'cudnn_enabled',
            'cpu')}}

    @property
    def legacy(self) -> bool:
        """MMEngine's own data streams are asked for."""
        return self.worker_seed == 'mmengine'

    def promises(self) -> list[tuple[str, str]]:
        """What these values promise, and what not, in the user's words."""
        same_bits = {True: 'yes', 'warn': 'no: warn keeps non-deterministic kernels',
                     False: 'no: deterministic=False lets kernels add in any order'}
        keyed, resumes = {
            'sample': ('yes', 'yes, from any iteration'),
            'worker': ('no: streams belong to workers',
                       'from the end of an epoch only: streams belong to workers'),
            'mmengine': ("no: MMEngine's own streams", "no: MMEngine's own streams"),
        }[self.worker_seed]
        return [
            ('same bits on the same machine, versions and config', same_bits[self.deterministic]),
            ('same data for any num_workers, persistent_workers, prefetch_factor', keyed),
            ('a resumed run is the uninterrupted one', resumes),
            ('validation and logging leave training alone',
             'yes' if self.step_seed else 'validation only: step_seed=False'
             if not self.legacy else 'no: step_seed=False'),
            ('same bits on another GPU model, CPU type or version of torch', 'never'),
        ]

    def table(self) -> str:
        """A table for the log: every effective value, then what is promised."""
        rows = [('randomness', 'value'), *((k, repr(v)) for k, v in self.as_dict().items()),
                ('scheme', str(SCHEME)), ('', ''), ('promised', ''), *self.promises()]
        width = max(len(name) for name, _ in rows)
        return '\n'.join(f'{name:<{width}}  {value}'.rstrip() for name, value in rows)


def _refuse_unknown(name: str, given: Mapping[str, Any], known: list[str], kind: str) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f'; did you mean {near[0]!r}?' if near else '.'
            raise RandomnessError(
                f'{name} has an unknown {kind[:-1]} {key!r} (value {given[key]!r}){hint} '
                f'Known {kind}: {", ".join(known)}')


def _checked_int(name: str, value: Any, low: int, high: int, allowed: str = 'None or an int'
                 ) -> None:
    an_int = isinstance(value, int) and not isinstance(value, bool)
    if not an_int or not low <= value <= high:
        problem = 'is out of range' if an_int else f'has type {type(value).__name__}'
        raise RandomnessError(f'randomness.{name}={value!r} {problem}; allowed is {allowed} '
                              f'from {low} to {high}')


def refuse_misspelt(cfg: Mapping[str, Any]) -> None:
    """Nobody reads a top-level ``randomnes``: the run would train with another seed, silently.

    Raises:
        RandomnessError: for a key that is nearly, but not, ``randomness``.
    """
    for key in cfg:
        # randomness_fast and the like are variables of the config's own
        if key != 'randomness' and not key.startswith('randomness_') and \
                difflib.get_close_matches(key.lower(), ['randomness'], cutoff=0.85):
            raise RandomnessError(f'the config has a key {key!r} (value {cfg[key]!r}) that nothing '
                                  "reads; did you mean 'randomness'?")


def upgrade_legacy_keys(cfg: MutableMapping[str, Any]) -> None:
    """Move MMDetection 2.x's top-level ``seed`` and so on into ``randomness``.

    ``cfg`` is changed in place, with a deprecation warning that shows the new form.

    Raises:
        RandomnessError: when both forms are given and disagree.
    """
    found = {old: cfg[old] for old in LEGACY_KEYS if old in cfg}
    if not found:
        return
    randomness = dict(cfg.get('randomness') or {})
    for old, value in found.items():
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
        f'{", ".join(found)} at the top level of a config is the form of MMDetection 2.x; '
        f'write randomness = dict({form})', DeprecationWarning, stacklevel=2)


def prepare_cfg(cfg: Any) -> Any:
    """A copy of the config with MMDetection 2.x's keys moved to where they belong."""
    cfg = copy.deepcopy(cfg)
    refuse_misspelt(cfg)
    upgrade_legacy_keys(cfg)
    return cfg


def named_arguments(function: Callable[..., Any], names: Sequence[str], args: Sequence[Any],
                    kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The arguments of a call by name, and whether ``function`` takes ``randomness``.

    >>> named_arguments(lambda model, **rest: None, [], [1], dict(randomness={}))
    ({'model': 1, 'randomness': {}}, True)

    Args:
        names: of the positional arguments that ``function`` takes as ``*args``.
    """
    signature = inspect.signature(function)
    found: dict[str, Any] = {}
    for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
        kind = signature.parameters[name].kind
        found.update(dict(zip(names, args)) if kind is inspect.Parameter.VAR_POSITIONAL else
                     value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return found, 'randomness' in signature.parameters or any(
        one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
