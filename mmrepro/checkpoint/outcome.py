"""The last line of a training: its weights, their file, and the command that repeats it."""
from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mmengine.dist import get_world_size
from mmengine.hooks import EMAHook

from ..digests import state_digest
from ..distributed.process_group import process_count
from ..distributed.unwrap import unwrap
from .files import load

DIGITS = 16  # of the digest, in hexadecimal


def digests_of(checkpoint: Mapping[str, Any]) -> dict[str, str]:
    """Return the :func:`mmrepro.digests.state_digest` of trained ``weights`` and of ``averages``.

    In a checkpoint with averages, ``state_dict`` has these, and ``ema_state_dict`` the trained
    weights, with ``module.`` before their names.
    """
    states = dict(weights=checkpoint['state_dict'])
    if 'ema_state_dict' in checkpoint:
        trained = {name.removeprefix('module.'): value
                   for name, value in checkpoint['ema_state_dict'].items()
                   if name.startswith('module.')}
        states = dict(weights=trained, averages=checkpoint['state_dict'])
    return {kind: state_digest(state)[:DIGITS] for kind, state in states.items()}


class End(NamedTuple):
    """The end of a training."""
    digests: dict[str, str]  # of its file, if it was saved, else of the model
    where: str  # the file, or that there is none


def end_of(runner: Any) -> End:
    """Return the digests of the end of a training; a local file of CheckpointHook is read."""
    path = runner.message_hub.get_info('last_ckpt', None)  # also in a folder of its own
    where = path or 'not saved'
    if path is not None and os.path.isfile(path):
        content = load(path, mapped=True, checked=True)
        if content['meta']['iter'] == runner.iter:
            return End(digests_of(content), where)
        where = f'not saved (last file: {path})'
    content = dict(state_dict=unwrap(runner.model).state_dict())
    for hook in runner.hooks:
        if isinstance(hook, EMAHook):
            content['ema_state_dict'] = hook.ema_model.state_dict()
            hook._swap_ema_state_dict(content)
    return End(digests_of(content), where)


def outcome(runner: Any, end: End, remarks: Sequence[str] = ()) -> str:
    """Return the line; ``remarks`` are what else it says."""
    said = ', '.join(f'{kind} {digest}' for kind, digest in end.digests.items())
    text = f'{said} after {runner.iter} iterations, {end.where}'
    command = command_to_repeat(runner)
    ending = [f'to repeat: {command}'] if command else []
    return '; '.join([text, *remarks, *ending])


def command_to_repeat(runner: Any) -> str | None:
    """Return the command that trains again in another folder; None without a config."""
    cfg = runner.cfg
    if 'model' not in cfg:  # the runner was built from objects
        return None
    words = ['mmrepro', 'train', os.path.join(runner.work_dir, config_name(runner)), '--work-dir',
             f'{os.path.normpath(runner.work_dir)}-again']
    launcher = cfg.get('launcher', 'none')
    if launcher != 'none':
        count = process_count()
        # virtual ranks do not know how many of the processes are on this machine
        local = int(os.environ.get('LOCAL_WORLD_SIZE', count)) \
            if get_world_size() == count else count
        nodes = [] if local == count else [f'--nnodes={count // local}']
        words = ['torchrun', *nodes, f'--nproc_per_node={local}', '-m', *words,
                 '--launcher', 'pytorch']
    return shlex.join(words)


def config_name(runner: Any) -> str:
    """Return the name of the config that MMEngine has written, with all options in effect."""
    name = runner.cfg.filename
    return os.path.basename(name) if name else f'{runner.timestamp}.py'
