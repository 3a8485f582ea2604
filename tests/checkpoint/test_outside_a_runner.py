"""torch loads the checkpoint of a training outside of a runner, and runs no code of it."""
import os

import pytest
import torch
from harness import environment
from small_runs import config, trained_runner
from warm import Warm

READ = """
import sys, torch
{imports}
def outcome(path):
    try:
        content = load(path)
    except Exception as error:
        return type(error).__name__
    return content['meta']['iter']
from mmengine.runner import CheckpointLoader
for load in (torch.load, CheckpointLoader.load_checkpoint):
    print('outcomes:', outcome(sys.argv[1]), outcome(sys.argv[2]))
"""
ORDERS = {
    'mmrepro first': 'import mmrepro, mmengine.runner', 'torch last': 'import mmengine, mmrepro',
    'mmrepro last': 'import mmengine.runner, mmrepro',
    'copied': 'import _mmrepro_operators, mmengine.runner; assert "mmrepro" not in sys.modules',
    'copied, then mmrepro': 'import _mmrepro_operators, mmengine.runner, mmrepro'}


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path, )


@pytest.fixture(scope='module')
def python():
    """Return a function that runs Python where torch and what it needs is imported, and no more."""
    warm = Warm(['torch.distributed.fsdp', 'torch._dynamo', 'matplotlib.pyplot', 'cv2', 'yapf'],
                environment())
    yield warm.python
    warm.close()


@pytest.fixture(scope='module')
def checkpoints(tmp_path_factory):
    """Paths of the checkpoint of a training, and of one that runs code where pickles may."""
    folder = tmp_path_factory.mktemp('trained')
    trained_runner(config(folder))
    good = folder / 'epoch_2.pth'
    content = torch.load(good, weights_only=False)
    torch.save(dict(content, mine=Malicious(str(folder / 'code ran'))), folder / 'malicious.pth')
    return good, folder / 'malicious.pth'


def ended(says):
    return [line.split()[1:] for line in says.splitlines() if line.startswith('outcomes:')]


@pytest.mark.parametrize('order', ORDERS)
def test_torch_loads_a_checkpoint_of_a_training_and_refuses_code(order, checkpoints, python):
    says = python('-c', READ.format(imports=ORDERS[order]), *checkpoints)
    assert ended(says) == [['8', 'UnpicklingError']] * 2
    assert not (checkpoints[0].parent / 'code ran').exists()


def test_deactivating_takes_back_what_torch_accepts(checkpoints, python):
    code = READ.format(imports='import mmrepro, mmengine.runner\n'
                       'known = [*torch.serialization.get_safe_globals()]; mmrepro.deactivate()\n'
                       'left = torch.serialization.get_safe_globals()\n'
                       'assert left and {*left} < {*known}  # torch adds some itself')
    assert ended(python('-c', code, *checkpoints)) == [['UnpicklingError', 'UnpicklingError']] * 2


def test_a_runner_leaves_what_torch_accepts_as_it_was(checkpoints, python):
    code = ('import sys, mmrepro, torch, mmengine.runner\n'
            'from mmrepro.checkpoint.files import load\n'
            'before = {*torch.serialization.get_safe_globals()}; load(sys.argv[1])\n'
            'assert before and before == {*torch.serialization.get_safe_globals()}\n'
            'mmrepro.deactivate(); load(sys.argv[1])\n'
            'assert {*torch.serialization.get_safe_globals()} < before')
    python('-c', code, *checkpoints)
