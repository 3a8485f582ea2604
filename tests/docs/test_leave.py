"""What ``docs/how-to/leave.md`` says: stock MMEngine continues what mmrepro has trained."""
import pytest
from harness import fresh

CONFIG = '''
custom_imports = dict(imports=['mmrepro', 'small_runs'], allow_failed_imports=False)
randomness = dict(seed=42, deterministic=True)
default_scope = 'mmengine'
model = dict(type='NoisyLine')
train_dataloader = dict(
    batch_size=4, num_workers=0, dataset=dict(type='Points'),
    sampler=dict(type='DefaultSampler', shuffle=True))
train_cfg = dict(by_epoch=True, max_epochs=1)
optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.05, momentum=0.9))
default_hooks = dict(checkpoint=dict(type='CheckpointHook', interval=1))
'''
STOCK = '''
import sys
import small_runs
from mmengine.config import Config
from mmengine.runner import Runner
cfg = Config.fromfile(sys.argv[1], import_custom_modules=False)
cfg.merge_from_dict({'resume': True, 'load_from': 'run/epoch_1.pth', 'work_dir': 'stock',
                     'train_cfg.max_epochs': 2})
if sys.argv[2:]:
    cfg.randomness = {key: cfg.randomness[key] for key in sys.argv[2:]}
runner = Runner.from_cfg(cfg)
runner.train()
print('iterations', runner.iter, 'mmrepro' in sys.modules, type(runner).__name__)
'''


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp('leave')
    for name, text in (('config.py', CONFIG), ('stock.py', STOCK)):
        (path / name).write_text(text)
    run(path, '-m', 'mmrepro', 'train', 'config.py', '--work-dir', 'run')
    return path


def run(folder, *arguments, code=0):
    done = fresh(*arguments, code=code, cwd=folder, PYTHONHASHSEED='0',
                 CUBLAS_WORKSPACE_CONFIG=':4096:8', TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD='1')
    return done.stdout + done.stderr


def test_stock_mmengine_continues_a_checkpoint(folder):
    assert 'iterations 4 False Runner' in run(folder, 'stock.py', 'config.py')


def test_of_the_written_config_only_the_keys_of_mmengine_may_stay(folder):
    assert 'unexpected keyword argument' in run(folder, 'stock.py', 'run/config.py', code=1)
    assert 'iterations 4 False Runner' in run(
        folder, 'stock.py', 'run/config.py', 'seed', 'deterministic', 'diff_rank_seed')
