"""Identify a run: for trackers, and in the last line of its log.

Trackers are those that MMEngine's visualizer writes to. The last line has the weights, their file,
and the command that repeats the run.
"""
from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, NamedTuple

import torch
from mmengine.dist import is_main_process

from .. import seeds
from ..checkpoint.files import load
from ..config import imports_of
from ..distributed.process_group import node_count, process_count
from ..distributed.unwrap import ema_hooks, unwrap
from ..facts.compatibility import CHANGES, severity
from ..objects.digests import state_digest
from ..objects.walks import registries, root_registries
from ..util.libraries import is_imported_anyway
from ..util.text import counted, listed
from .hooks.fingerprint import FingerprintHook
from .hooks.self_check import self_checks

DIGITS = 16  # of the digest, in hexadecimal


def digests_of(checkpoint: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of trained ``weights`` and of ``averages``, see :func:`.state_digest`."""
    return {kind: state_digest(state)[:DIGITS] for kind, state in _states_of(checkpoint).items()}


def _states_of(checkpoint: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the trained ``weights`` and the ``averages`` of a checkpoint.

    In a checkpoint with averages, ``state_dict`` has these, and ``ema_state_dict`` the trained
    weights, with ``module.`` before their names.
    """
    if 'ema_state_dict' not in checkpoint:
        return dict(weights=checkpoint['state_dict'])
    trained = {name.removeprefix('module.'): value
               for name, value in checkpoint['ema_state_dict'].items()
               if name.startswith('module.')}
    return dict(weights=trained, averages=checkpoint['state_dict'])


class End(NamedTuple):
    """The end of a training."""
    digests: dict[str, str]  # of its file, if it was saved, else of the model
    where: str  # the file, or that there is none
    not_finite: tuple[str, ...] = ()  # parameters that hold inf or NaN


def end_of(runner: Any) -> End:
    """Return the digests of the end of a training; a local file of CheckpointHook is read."""
    path = runner.message_hub.get_info('last_ckpt', None)  # also in a folder of its own
    where = path or 'not saved'
    if path is not None and os.path.isfile(path):
        content = load(path, mapped=True, checked=True)
        if content['meta']['iter'] == runner.iter:
            return End(digests_of(content), where, _not_finite(runner, content))
        where = f'not saved (last file: {path})'
    content = dict(state_dict=unwrap(runner.model).state_dict())
    for hook in ema_hooks(runner.hooks):
        content['ema_state_dict'] = hook.ema_model.state_dict()
        hook._swap_ema_state_dict(content)
    return End(digests_of(content), where, _not_finite(runner, content))


def _not_finite(runner: Any, checkpoint: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of parameters that hold inf or NaN; buffers may, such as masks."""
    weights = _states_of(checkpoint)['weights']
    return tuple(name for name, _ in unwrap(runner.model).named_parameters()
                 if isinstance(weights.get(name), torch.Tensor) and not _is_finite(weights[name]))


def _is_finite(value: torch.Tensor) -> bool:
    with suppress(RuntimeError):  # not defined for each type and layout
        return bool(torch.isfinite(value).all())
    return True


def outcome(runner: Any, end: End, remarks: Sequence[str] = (), by_program: str = '') -> str:
    """Return the last line of the log.

    Args:
        remarks: further texts of the line.
        by_program: parts of the run that came from the program that built it, not from a config.
    """
    said = ', '.join(f'{kind} {digest}' for kind, digest in end.digests.items())
    text = f'{said} after {counted(runner.iter, "iteration")}, {end.where}'
    if end.not_finite:
        text += f'; these parameters hold inf or NaN: {listed(end.not_finite)}'
    reason = by_program or not_in_config(runner.cfg)
    if reason:
        again = f'start the program again, with another work_dir (no command does it: {reason})'
    else:
        again = command_to_repeat(runner)
    return '; '.join([text, *remarks, f'to repeat: {again}'])


def not_in_config(cfg: Any) -> str:
    """Return why a config alone does not train what its run has trained; '' if it does."""
    if 'model' not in cfg:
        return 'the runner was built from arguments, not from a config'
    imported = imports_of(cfg)
    packages = {cfg.get('default_scope'), *map(_package, imported)}
    for wanted in _types(cfg.to_dict()):
        if isinstance(wanted, str):
            name, modules = wanted, _modules_of(wanted)
            missing = not any(is_imported_anyway(module) or _package(module) in packages
                              for module in modules)
        else:  # a config has the path of a class: only the script itself cannot be imported by it
            name, modules = wanted.__name__, [wanted.__module__]
            missing = modules == ['__main__']
        if modules and missing and not _imported_by([*imported]).intersection(modules):
            return f'{name} is defined in {modules[0]}, which the config does not import'
    return ''


def _package(module: str) -> str:
    return str(module).partition('.')[0]


def _imported_by(names: list[str]) -> set[str]:
    """Return modules that modules import, as far as their namespaces show."""
    found: set[str] = set()
    while names:
        name = names.pop()
        module = sys.modules.get(name)
        if module is None or name in found or is_imported_anyway(name):
            continue
        found.add(name)
        for value in list(vars(module).values()):
            other = value.__name__ if isinstance(value, ModuleType) else \
                getattr(value, '__module__', None)
            if isinstance(other, str):
                names.append(other)
    return found


def _types(value: Any) -> Iterator[Any]:
    """Yield each ``type`` in a config: a name, or a class or function."""
    if isinstance(value, Mapping):
        wanted = value.get('type')
        if isinstance(wanted, str) or hasattr(wanted, '__module__'):
            yield wanted
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _types(item)


def _modules_of(name: str) -> list[str]:
    """Return the modules of what is registered by a name, in any registry."""
    tables = (registry.module_dict for root in root_registries().values()
              for registry in registries(root))
    things = (table.get(name.rpartition('.')[2]) for table in tables)
    return [str(getattr(thing, '__module__', '')) for thing in things if thing is not None]


def command_to_repeat(runner: Any) -> str:
    """Return the command that trains the config again in another folder."""
    cfg = runner.cfg
    words = ['mmrepro', 'train', os.path.join(runner.work_dir, config_name(runner)), '--work-dir',
             f'{os.path.normpath(runner.work_dir)}-again']
    launcher = cfg.get('launcher', 'none')
    if launcher != 'none':
        words = ['torchrun', *_nodes(process_count(), os.environ), '-m', *words,
                 '--launcher', 'pytorch']
    return shlex.join(words)


def _nodes(processes: int, env: Mapping[str, str]) -> list[str]:
    """Return the arguments of torchrun for as many nodes and processes as this run has."""
    nodes = node_count(processes, env)
    local = f'--nproc_per_node={processes // nodes}'
    if nodes == 1:
        return [local]
    # to be started on every node; they meet at the machine of rank 0
    return [f'--nnodes={nodes}', local, '--rdzv_backend=c10d',
            f'--rdzv_endpoint={env.get("MASTER_ADDR", "HOST")}']


def config_name(runner: Any) -> str:
    """Return the name of the config that MMEngine has written, with all options in effect."""
    name = runner.cfg.filename
    return os.path.basename(name) if name else f'{runner.timestamp}.py'


# class of a backend -> methods of its `experiment` for values that stay, later values, and files
TRACKERS = {
    'TensorboardVisBackend': dict(params='add_text', tags='add_text', file='add_text'),
    'MLflowVisBackend': dict(params='log_params', tags='set_tags', file='log_artifact'),
    'WandbVisBackend': dict(params='config.update', tags='run.summary.update', file='save'),
    'AimVisBackend': dict(params='set', tags='set', file='set'),
}
BY_ITEM = ('add_text', 'set')  # take a name and a text, which may be that of a file


def track(runner: Any, **given: Callable[[], Any]) -> None:
    """Give each tracker the results of these functions; warn of a tracker that fails."""
    for name, backend in runner.visualizer._vis_backends.items() if is_main_process() else ():
        methods = TRACKERS.get(type(backend).__name__, {})
        for kind, value in given.items() if methods else ():
            try:
                with seeds.isolate_rng():  # a tracker may draw the name of its run
                    if values := value():
                        write = attrgetter(methods[kind])(backend.experiment)
                        by_item = methods[kind] in BY_ITEM
                        if kind == 'file' and by_item:
                            path = Path(values)
                            values = {f'mmrepro/{path.name}': path.read_text('utf-8')}
                        for arguments in values.items() if by_item else [(values, )]:
                            write(*arguments)
            except Exception as error:  # of the package, the disk or a server
                runner.logger.warning(f'{name} did not take the {kind} of mmrepro: '
                                      f'{type(error).__name__}: {error}')


def track_start(runner: Any, facts: Mapping[str, Any]) -> None:
    """Track the seed and all other facts that change bits, and the manifest."""
    track(runner, file=lambda: _manifest(runner), params=lambda: {
        f'mmrepro/{name}': str(value) for name, value in facts.items()
        if not name.startswith('config.') and severity(name, facts) == CHANGES})


def track_results(runner: Any, name: str, digests: Callable[[], Mapping[str, str]]) -> None:
    """Track digests of weights, what was repeated so far, and at the end the whole manifest."""
    track(runner, file=lambda: _manifest(runner) if name == 'last' else None, tags=lambda: {
        **{f'mmrepro/{kind}/{name}': digest for kind, digest in digests().items()},
        **{f'mmrepro/repeated/{kind}': str(n) for kind, n in self_checks(runner).items()}})


def _manifest(runner: Any) -> str | None:
    return next((hook.manifest for hook in runner.hooks if isinstance(hook, FingerprintHook)), None)
