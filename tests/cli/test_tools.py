"""The scripts under tools/: doors to the verbs, shell scripts, trainings through them."""
import os
import pickle
import subprocess

import pytest
from demo_runs import narrow
from harness import ROOT, fresh
from mmengine.config import Config

from mmrepro.runs.startup import RESTARTED

TOOLS = str(ROOT / 'tools')


@pytest.mark.parametrize('name, count', [('dist_train.sh', 2), ('dist_test.sh', 3),
                                         ('slurm_train.sh', 4)])
def test_shell_scripts_say_what_they_need(name, count):
    result = subprocess.run(['bash', os.path.join(TOOLS, name), *['x'] * (count - 1)],
                            capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.count(f'tools/{name}') == 2


def _recorded(tmp_path, name, arguments, **env):
    """Return the command that a shell script ends in, with the program replaced by a recorder."""
    recorder = tmp_path / 'recorder'
    recorder.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    recorder.chmod(0o755)
    (tmp_path / 'srun').write_text(recorder.read_text())
    (tmp_path / 'srun').chmod(0o755)
    path = f'{tmp_path}{os.pathsep}{os.environ["PATH"]}'
    return subprocess.run(
        ['bash', os.path.join(TOOLS, name), *arguments], capture_output=True, text=True, check=True,
        env={**os.environ, 'PYTHON': str(recorder), 'PATH': path, **env}).stdout.splitlines()


@pytest.mark.parametrize('name, arguments, variables, begin, within, end', [
    ('dist_train.sh', ['c.py', '4', '--seed', '1', '--work-dir', 'a b'], dict(PORT='1234'),
     ['-m', 'torch.distributed.run'], {'--nproc_per_node=4', '--master_port=1234'},
     [os.path.join(TOOLS, 'train.py'), 'c.py', '--launcher', 'pytorch', '--seed', '1', '--work-dir',
      'a b']),
    ('dist_test.sh', ['c.py', 'w.pth', '2', '--out', 'r.pkl'], {}, ['-m'], set(),
     [os.path.join(TOOLS, 'test.py'), 'c.py', 'w.pth', '--launcher', 'pytorch', '--out', 'r.pkl']),
    ('slurm_train.sh', ['part', 'job', 'c.py', 'w', '--seed', '1'],
     dict(GPUS='16', GPUS_PER_NODE='8', SRUN_ARGS='--exclusive --mem=0'), ['--partition=part'],
     {'--ntasks=16', '--exclusive', '--mem=0'}, ['w', '--launcher', 'slurm', '--seed', '1'])])
def test_shell_scripts_pass_arguments_on(tmp_path, name, arguments, variables, begin, within, end):
    words = _recorded(tmp_path, name, arguments, **variables)
    assert words[:len(begin)] == begin and within <= {*words} and words[-len(end):] == end


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A folder with a config trained by tools/train.py, a function that runs a script, the log."""
    from mmrepro.demo import dataset, write_dataset
    folder = tmp_path_factory.mktemp('trained')
    write_dataset(str(folder / 'data' / 'demo'), 0, 4, 2)
    cfg = Config.fromfile(dataset.shipped('configs/demo/yolox_s_demo.py'))
    narrow(cfg)
    cfg.train_cfg.max_epochs, cfg.default_hooks.checkpoint.interval = 1, 1
    cfg.dump(folder / 'config.py')

    def run(script, *arguments, **variables):
        return fresh(script, *arguments, cwd=folder, **{
            'PYTHONHASHSEED': None, RESTARTED: None, **variables}).stderr

    output = run(os.path.join(TOOLS, 'train.py'), 'config.py', '--seed', '7')
    return folder, run, output


def _weights(path):
    import torch

    from mmrepro.objects.digests import state_digest
    return state_digest(torch.load(path, map_location='cpu', weights_only=False)['state_dict'])


def test_train_starts_again_once_and_writes_the_seed_into_the_config(trained):
    folder, _, output = trained
    assert output.count('starting again with') == 1
    dumped = Config.fromfile(str(folder / 'work_dirs' / 'config' / 'config.py'))
    assert dumped.randomness.seed == 7


def test_mmdetections_own_script_trains_to_the_same_bits(trained):
    import mmdet
    folder, run, _ = trained
    script = os.path.join(os.path.dirname(mmdet.__file__), '.mim', 'tools', 'train.py')
    run(script, 'config.py', '--work-dir', 'stock', '--cfg-options', 'randomness.seed=7',
        PYTHONHASHSEED='1', PYTHONPATH=str(ROOT))
    ours = _weights(folder / 'work_dirs' / 'config' / 'epoch_1.pth')
    assert _weights(folder / 'stock' / 'epoch_1.pth') == ours


@pytest.mark.nightly
def test_test_evaluates_what_train_wrote(trained):
    folder, run, _ = trained
    checkpoint = str(folder / 'work_dirs' / 'config' / 'epoch_1.pth')
    run(os.path.join(TOOLS, 'test.py'), 'config.py', checkpoint, '--out', 'result.pkl',
        '--work-dir', 'tested')  # MMDetection's script writes the config there
    with open(folder / 'result.pkl', 'rb') as file:
        assert len(pickle.load(file)) == 2
