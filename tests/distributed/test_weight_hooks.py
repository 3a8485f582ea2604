"""Which of our hooks let virtual ranks share weights: all of them, and each was looked at."""
from __future__ import annotations

import importlib

from mmengine.hooks import Hook

import mmrepro
from dev.layers import modules
from mmrepro.distributed.virtual import weight_hooks

# They read what a training holds, seed generators, save, or end the process; none writes weights.
LOOKED_AT = {
    'DigestHook', 'EventHook', 'FingerprintHook', 'MomentHook', 'OperatorGuardHook', 'PreemptHook',
    'ProbeHook', 'SelfCheckHook', '_RecordingHook'}


def own_hooks():
    for name, path in modules().items():
        if 'Hook)' in path.read_text():
            module = importlib.import_module(f'{mmrepro.__name__}.{name}')
            yield from (one for one in vars(module).values() if isinstance(one, type)
                        and issubclass(one, Hook) and one.__module__ == module.__name__)


def test_a_new_hook_of_ours_has_to_be_looked_at():
    assert {one.__name__ for one in own_hooks()} == LOOKED_AT


def test_no_hook_of_ours_gives_ranks_weights_of_their_own():
    for kind in own_hooks():
        assert weight_hooks.problem([kind.__new__(kind)]) == ''


def test_a_hook_that_is_not_known_does():
    class Mine(Hook):
        pass

    assert 'the hook Mine may change weights' in weight_hooks.problem([Mine()])
