"""The last line of a training: its weights, their file, and the command that repeats it."""
from __future__ import annotations

import os
import shlex
from typing import Any

from mmengine.dist import get_world_size

from ..digests import state_digest
from ..distributed.process_group import process_count
from ..distributed.unwrap import unwrap

DIGITS = 16  # of the digest, in hexadecimal


def outcome(runner: Any, doubt: str = '') -> str:
    """Return the line; ``doubt`` says what is not that of an uninterrupted run.

    The digest is :func:`mmrepro.digests.state_digest` of the trained weights and buffers, which
    are not those that EMAHook saves for inference.
    """
    digest = state_digest(unwrap(runner.model).state_dict())[:DIGITS]
    # written by CheckpointHook, also in a folder of its own
    path = runner.message_hub.get_info('last_ckpt', None)
    text = f'weights {digest} after {runner.iter} iterations, {path or "not saved"}'
    if doubt:
        text = f'{text}; {doubt}: bits may not be those of an uninterrupted run'
    command = command_to_repeat(runner)
    return f'{text}; to repeat: {command}' if command else text


def command_to_repeat(runner: Any) -> str | None:
    """Return the command that trains again in another folder; None without a config."""
    cfg = runner.cfg
    if 'model' not in cfg:  # the runner was built from objects
        return None
    # the file that MMEngine has written, with the seed and all options in effect
    name = os.path.basename(cfg.filename) if cfg.filename else f'{runner.timestamp}.py'
    words = ['mmrepro', 'train', os.path.join(runner.work_dir, name), '--work-dir',
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
