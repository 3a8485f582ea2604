"""Build a runner in a process with the variables that Python reads when it starts.

Heavy modules are imported late: the process may have to start again first.
"""
from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import Any, Callable, NoReturn

from ..config import randomness_of
from ..determinism import missing_at_start
from ..errors import DeterminismError, RandomnessError

# variable that marks a process which has started itself again, so that it does so once
RESTARTED = 'MMREPRO_RESTARTED'


def restart_for(cfg: Any) -> None:
    """Call :func:`restart_if_incomplete` with the settings of a config."""
    try:
        randomness = randomness_of(cfg)
    except RandomnessError:  # the runner will refuse it
        return
    flags = randomness.flags
    restart_if_incomplete(os.environ, flags['mode'], flags['num_threads'], flags['cpu'])


def restart_if_incomplete(env: Mapping[str, str], mode: Any = True,
                          num_threads: int | None = None, cpu: str | None = None) -> None:
    """Start this process again when a variable that must exist before Python starts is missing.

    ``mode`` is ``deterministic`` of ``randomness``; the others have the names of its keys. The
    process keeps its id, its standard streams and its rank in a distributed launch. Every rank
    decides alike, because the decision depends on the environment and the config alone.

    Raises:
        DeterminismError: variables are missing although the process has started again.
    """
    missing = missing_at_start(env, mode=mode, num_threads=num_threads, cpu=cpu)
    if not missing:
        return
    text = ' '.join(f'{name}={value}' for name, value in sorted(missing.items()))
    if env.get(RESTARTED):
        raise DeterminismError(f'{text} did not survive a restart of this process; set it in the '
                               'shell that starts the training')
    if env.get('RANK', '0') == '0':
        print(f'mmrepro: starting again with {text} (read when Python starts)', file=sys.stderr)
    _execute({**env, **missing, RESTARTED: '1'})


def _own_command() -> list[str]:
    """Return the command line of this process, including the arguments of the interpreter."""
    if hasattr(sys, 'orig_argv'):  # Python 3.10
        return [sys.executable, *sys.orig_argv[1:]]
    spec = getattr(sys.modules['__main__'], '__spec__', None)
    if spec is None:
        return [sys.executable, *sys.argv]
    name = spec.name[:-len('.__main__')] if spec.name.endswith('.__main__') else spec.name
    return [sys.executable, '-m', name, *sys.argv[1:]]


def _execute(env: dict[str, str]) -> NoReturn:
    command = _own_command()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, env)


def has_mmdet() -> bool:
    """Whether MMDetection is installed; MMEngine is enough to train other models."""
    return importlib.util.find_spec('mmdet') is not None


def build_runner(cfg: Any) -> Any:
    """Build the runner of a config as MMDetection's own script does, where it is installed."""
    from mmengine.registry import RUNNERS
    from mmengine.runner import Runner

    if has_mmdet():
        from mmdet.utils import setup_cache_size_limit_of_dynamo

        # with the default, torch.compile gives up on detectors
        setup_cache_size_limit_of_dynamo()
    return RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)


def on_ranks(cfg: Any, main: Callable[[], Any]) -> Any:
    """Call ``main()``, which builds a runner of ``cfg``, once per rank that this process has.

    A process has one rank, unless the config has ``randomness.virtual_ranks``; see
    :func:`mmrepro.on_virtual_ranks`.
    """
    ranks = randomness_of(cfg).virtual_ranks.ranks
    if ranks is None:
        return main()
    from ..virtual import on_virtual_ranks
    return on_virtual_ranks(ranks, main, cfg.get('launcher', 'none'), cfg.get('env_cfg') or {})
