"""An error in one virtual rank ends all of them, in every process, and names the rank."""
import io
import logging

import pytest
import torch
from harness import Child
from mmengine.hooks import CheckpointHook
from mmengine.runner import FlexibleRunner, Runner
from preempted_runs import Small, SumOfOutputs, settings
from ranks import free_port
from small_runs import Points

from dev.children import join_ranks
from mmrepro import RandomnessError, on_virtual_ranks

RANKS = 4


class Planted(Exception):
    pass


def raising(owner, name, rank=2):
    """The method raises in one virtual rank, the second time there. 2: of the second process."""
    original, calls = getattr(owner, name), []

    def method(self, *args, **kwargs):
        if torch.distributed.get_rank() == rank:
            calls.append(1)
            if len(calls) == 2:
                raise Planted(name)
        return original(self, *args, **kwargs)

    setattr(owner, name, method)


# where the error is -> how to plant it, and changes of the config
PLACES = {
    'the forward pass': (lambda: raising(Small, 'forward'), {}),
    'a dataset': (lambda: raising(Points, '__getitem__'), {}),
    'a worker of a loader': (lambda: raising(Points, '__getitem__'),
                             {'train_dataloader.num_workers': 1}),
    'a hook': (lambda: raising(CheckpointHook, 'after_train_iter'), {}),
    'the writing of a checkpoint': (lambda: raising(Runner, 'save_checkpoint', rank=0), {
        'default_hooks.checkpoint': dict(type='CheckpointHook', by_epoch=False, interval=1)}),
    'a validation': (lambda: raising(SumOfOutputs, 'process'), {}),
}


def train(process, cfg, plant, port):
    join_ranks(process, 2, port)
    plant()
    cfg.launcher = 'pytorch'
    log = io.StringIO()
    logging.getLogger('mmrepro').addHandler(logging.StreamHandler(log))
    try:
        on_virtual_ranks(RANKS, lambda: Runner.from_cfg(cfg.copy()).train(), 'pytorch',
                         cfg.env_cfg)
    except Exception as error:
        return type(error).__name__, str(error), log.getvalue()


@pytest.mark.parametrize('place', PLACES)
def test_an_error_in_one_rank_ends_all_and_names_it(place, tmp_path):
    plant, changes = PLACES[place]
    cfg = settings(tmp_path, **{'train_dataloader.dataset.size': 64, 'randomness.virtual_ranks':
                                RANKS, 'val_dataloader.dataset.size': 16, **changes})
    port = free_port()
    children = [Child(train, process, cfg, plant, port) for process in range(2)]
    results = [child.result() for child in children]
    rank = 0 if place == 'the writing of a checkpoint' else 2
    kind, text, log = results.pop(rank // 2)
    assert kind == 'Planted', text
    assert f'virtual rank {rank} of 4 has ended with Planted' in log
    (kind, text, log), = results
    assert kind == 'RankEnded', text
    # rank 0 keeps the store here, and its reason goes with it
    assert f'virtual rank {rank} of 4 has ended with Planted' in text if rank else (
        'rank 0 has ended, and with it the store' in text), text


def test_a_flexible_runner_is_refused(tmp_path):
    cfg = settings(tmp_path, **{'randomness.virtual_ranks': 2})
    arguments = {key: cfg[key] for key in ('model', 'work_dir', 'train_dataloader', 'train_cfg',
                                           'optim_wrapper', 'randomness')}
    with pytest.raises(RandomnessError, match='FlexibleRunner'):
        on_virtual_ranks(2, lambda: FlexibleRunner(**arguments))
