"""Virtual ranks on the devices of this folder, in one process and in two with a device each.

    python tests/host_cuda/virtual.py WORK_DIR RANKS

Prints, as JSON, whether each run has the bits of the same ranks in one process.
"""
import json
import sys
from pathlib import Path

import pretend  # noqa: F401  makes the device
import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / 'support'))
import one_thread  # noqa: E402, F401
import virtual_runs  # noqa: E402
from children import join_ranks  # noqa: E402
from faults.tiny import validating_and_saving  # noqa: E402
from mmengine.hooks import Hook  # noqa: E402
from mmengine.registry import HOOKS  # noqa: E402


def _join(process, processes, port):
    """Choose the device as MMEngine's init_dist does, which asks for NCCL."""
    join_ranks(process, processes, port)
    torch.cuda.set_device(process)


@HOOKS.register_module()
class OnDeviceHook(Hook):
    """Ends a run whose model is not on the device of its process."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        expected = torch.device('cuda', torch.cuda.current_device())
        assert {one.device for one in runner.model.state_dict().values()} == {expected}
        print(expected, file=sys.stderr)  # which the test expects


def main():
    virtual_runs.join_ranks = _join
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    cfg = validating_and_saving(folder)
    cfg.custom_hooks = [dict(type='EMAHook'), dict(type='OnDeviceHook')]
    cfg.sync_bn = 'torch'
    cfg.env_cfg = dict(dist_cfg=dict(backend='gloo'))
    first = virtual_runs.run(cfg, ranks, 1, folder / 'on 1')
    assert len(first) == ranks and all(len(lines) > 3 for lines in first)
    equal = {'on 2': virtual_runs.run(cfg, ranks, 2, folder / 'on 2') == first}
    resumed = virtual_runs.run(cfg, ranks, 2, folder / 'resumed', folder / 'on 1' / 'iter_1.pth')
    # what the first run did behind its checkpoint
    equal['resumed on 2'] = [lines[-len(resumed[0]):] for lines in first] == resumed
    assert 1 < len(resumed[0]) < len(first[0])
    print(json.dumps(equal))


if __name__ == '__main__':
    torch.set_num_threads(1)
    main()
