"""Device memory that a checkpoint within an accumulation cycle takes, of stock MMEngine and ours.

    python tests/host_cuda/checkpoint_memory.py WORK_DIR

Prints, as JSON, the bytes over those before the checkpoint, of two processes with a device each.
Ways: ``stock``; ``ours``; ``virtual``, a virtual rank in each process; ``device``, a control:
states travel in the memory of the device, as torch sends objects over NCCL.
"""
import json
import pickle
import sys
from pathlib import Path
from unittest import mock

import pretend  # noqa: F401  makes the device
import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / 'support'))
import one_thread  # noqa: E402, F401
from children import Child, join_ranks, silence_output  # noqa: E402
from demo_runs import changed  # noqa: E402
from faults.tiny import ITERATIONS, tiny  # noqa: E402
from mmengine.registry import MODEL_WRAPPERS  # noqa: E402
from mmengine.runner import Runner  # noqa: E402
from ranks import free_port  # noqa: E402

import mmrepro  # noqa: E402
from mmrepro.checkpoint import rank_state  # noqa: E402
from mmrepro.config import with_virtual_ranks  # noqa: E402
from mmrepro.distributed.agreement import gather_objects  # noqa: E402
from mmrepro.runs.startup import on_ranks  # noqa: E402

WAYS = ('stock', 'ours', 'virtual', 'device')


@MODEL_WRAPPERS.register_module()
class WithoutExchange(torch.nn.Module):
    """DDP within an accumulation cycle; gloo cannot send what is on this device."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def train_step(self, data, optim_wrapper):
        return self.module.train_step(data, optim_wrapper)


def over_the_device(value, to_all):
    torch.tensor(bytearray(pickle.dumps(value)), device='cuda')
    return gather_objects(value, to_all)


def train(way, process, port, cfg):
    silence_output()
    join_ranks(process, 2, port)
    torch.cuda.set_device(process)
    found = []

    def main():
        runner = Runner.from_cfg(cfg)
        save = runner.save_checkpoint

        def measured(*args, **kwargs):
            assert any(one.grad is not None for one in runner.model.parameters())
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            save(*args, **kwargs)
            found.append(torch.cuda.max_memory_allocated() - before)

        runner.save_checkpoint = measured
        runner.train()

    if way == 'stock':
        mmrepro.deactivate()
        main()
    elif way == 'device':
        with mock.patch.object(rank_state, 'gather_objects', over_the_device):
            on_ranks(cfg, main)
    else:
        on_ranks(cfg, main)
    return found


def run(way, cfg, folder):
    def change(cfg):
        cfg.work_dir = str(folder / way)
        if way == 'virtual':
            cfg.randomness = with_virtual_ranks(cfg.randomness, 2)
        else:
            cfg.model_wrapper_cfg = dict(type='WithoutExchange')
        if way == 'stock':
            cfg.randomness = dict(seed=3)

    port, cfg = free_port(), changed(cfg, change)
    children = [Child(train, way, process, port, cfg) for process in range(2)]
    return [child.result() for child in children]


def main():
    folder = Path(sys.argv[1])
    cfg = tiny(folder)
    cfg.custom_hooks = []
    cfg.launcher = 'pytorch'
    cfg.env_cfg = dict(dist_cfg=dict(backend='gloo'))
    cfg.train_cfg.max_epochs = 2
    cfg.optim_wrapper.accumulative_counts = ITERATIONS
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', interval=ITERATIONS - 1,
                                        by_epoch=False, save_last=False)
    print(json.dumps({way: run(way, cfg, folder) for way in WAYS}))


if __name__ == '__main__':
    torch.set_num_threads(1)
    main()
