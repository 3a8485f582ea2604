"""The commands of tutorials and how-to guides, typed as they stand there, and what they show.

They are typed in a folder that has what they name. A command is run, or the reason is here. Lines
of shown output must come in their order; digests, decimals and times belong to a machine.
"""
from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import ROOT, environment, fresh
from warm import Warm

PAGES = {path.stem: path for folder in ('tutorials', 'how-to')
         for path in sorted((ROOT / 'docs' / folder).glob('*.md'))}
CONFIG = 'configs/demo/faster-rcnn_r50_fpn_demo.py'
# runs of the same bits, which the pages compare
RUNS = ('monday', 'tuesday', 'first', 'second', 'here', 'there')
# what the pages leave to the reader
GIVEN = {'CONFIG': CONFIG, 'CHECKPOINT': 'work_dirs/monday/epoch_1.pth', 'HOST': 'localhost',
         r'W/iter_500\.pth': 'work_dirs/monday/epoch_1.pth', 'W': 'work_dirs/again', 'DIR': 'check',
         'OUT': 'report'}
# pattern of a command -> why it is not run here
NOT_RUN = {
    'bash tools/demo.sh': 'makes an environment; tests/demo runs what it starts',
    'pip (install|download) .*': 'changes the environment; tests/test_packaging.py installs',
    'bash tools/dist_train.sh .*': 'eight processes; tests/cli/test_tools.py runs the script',
    'bash tools/slurm_train.sh .*': 'needs Slurm; tests/cli/test_tools.py runs the script',
    r'srun .*|\[ \$\? .*': 'needs Slurm; tests/run/test_preempt_on_ranks.py runs what it starts',
    'git add .*': 'writes into a repository',
    'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 .*': 'a script of MMDetection; STOCK resumes',
    'mmrepro seeds (base.py|CONFIG|configs/).*': 'takes hours; the seeds of a toy are trained',
    'mmrepro compare work_dirs/2022 .*': 'an old run; tests/report/test_comparison.py reads one',
    'mmrepro compare --trace .*': 'two configs; tests/localise/test_compare_modules.py has some',
    'mmrepro compare --onnx .*': 'a model; tests/localise/test_compare_onnx.py exports some',
    'python -m dev.kills CONFIG --kills 30 .*': 'thirty starts; tests/dev/test_kills.py has fewer',
}
# beginning of a shown text -> why it does not come here
NOT_SHOWN = {
    ' packages  ': 'a broken environment; tests/verbs/test_doctor.py has some',
    'NO CAUSE FOUND': 'of a config of your own', '  workers  ': 'a run that differs',
    'DIFFERENT after': 'a check that fails',
    '  cpu  ': 'an option of the command', '   0 s  iteration': 'the code was changed in between',
    'goldens/': 'a list of files', 'first difference': 'the text of the tutorial',
    '  cause  ': 'of another model; tests/localise/test_planted_faults.py loses its state',
    'stock 1: ': 'of tools/demo.sh', '    directory        read': 'an old run',
    'rank 2, 3 on': 'another node; tests/virtual/test_virtual_ranks_elastic.py has one',
    'Losses': 'of configs of your own', 'Outputs': 'an exported model',
}
# commands that find something, as the page says: exit code 1
FINDS = ('mmrepro verify shaded.py --vary workers --iters 2', 'mmrepro train shaded.py',
         'mmrepro localise shaded.py --iters 2 --no-values --b train_dataloader.num_workers=2',
         'mmrepro audit mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py --device cuda')
LIMIT = 3600  # seconds for a command: ten kills on four processes of two cores
# the page on sharded weights with a small backbone and detector
SMALL_SWIN = '''
_base_ = 'swin-l.py'
model = dict(
    backbone=dict(embed_dims=16, depths=[1, 1, 2, 1], num_heads=[1, 2, 4, 8]),
    neck=dict(in_channels=[32, 64, 128], out_channels=32),
    bbox_head=dict(in_channels=32, feat_channels=32))
'''
TWO_RANKS = f'mmrepro train {CONFIG} --deterministic --seed 42 --virtual-ranks 2'
# a quarter of the channels, few images
SMALL = ('--cfg-options train_cfg.max_epochs=1 train_dataloader.dataset.indices=4 '
         'val_dataloader.dataset.indices=2 model.backbone.base_channels=16 '
         'model.neck.in_channels="[64,128,256,512]" model.roi_head.bbox_head.fc_out_channels=64 '
         + ' '.join(f'model.{name}_channels=64' for name in (
             'neck.out', 'rpn_head.in', 'rpn_head.feat', 'roi_head.bbox_roi_extractor.out',
             'roi_head.bbox_head.in')))


def blocks(page: str, language: str) -> list[tuple[str, str]]:
    return re.findall(rf'^```({language})\n(.*?)^```', PAGES[page].read_text(encoding='utf-8'),
                      re.S | re.M)


def steps(page: str) -> Iterator[tuple[str, str]]:
    """Yield each command with the output that the page shows after it, and output alone."""
    typed: list[str] = []
    for language, block in blocks(page, r'\w*'):
        if language not in ('shell', 'text', ''):
            continue
        shown = block if language != 'shell' else ''
        if language == 'shell' or block.startswith('$ '):
            yield from ((command, '') for command in typed)
            first, _, shown = block.partition('\n') if shown else (block, '', '')
            lines = re.sub(r'\\\n\s*', '', first.removeprefix('$ ')).splitlines()
            typed = [line for line in (re.sub(r'(^| +)#.*', '', line) for line in lines) if line]
        if shown:
            yield from ((command, '') for command in typed[:-1])
            yield typed[-1] if typed else '', shown
            typed = []
    yield from ((command, '') for command in typed)


def reason(command: str) -> str:
    return next((why for pattern, why in NOT_RUN.items() if re.fullmatch(pattern, command)), '')


def not_in_order(shown: str, said: str) -> list[str]:
    """Return the first shown line that does not come after those before it."""
    rest = iter(said.splitlines())
    for line in filter(None, map(str.rstrip, shown.splitlines())):
        pattern = re.sub(r'[0-9a-f]{16}', '[0-9a-f]{16}', re.escape(line).replace(r'\ ', ' '))
        pattern = re.sub(r'\d+\\\.\d+', r'[-+.\\de]+', re.sub(r'\b\d+ s$', r'.*', pattern))
        pattern = re.sub(' +', ' +', pattern.replace(re.escape('[...]'), '.*'))
        if line.strip() not in ('[...]', '...') and not any(
                re.fullmatch(f'{pattern} *', other) for other in rest):
            return [line]
    return []


class Shell:
    """Types commands into a folder; every one is a process of its own.

    Args:
        warm: what they are forked from; None: each is a fresh interpreter.
    """

    def __init__(self, folder: Path, warm: Warm | None) -> None:
        self.folder, self.exported = folder, ''
        for name in ('configs', 'tools', 'tests', 'dev', 'benchmarks'):
            (folder / name).symlink_to(ROOT / name)
        programs = folder / 'programs'
        programs.mkdir()
        # a link to the interpreter would leave its environment
        for name, module in (('mmrepro', '-m mmrepro'), ('torchrun', '-m torch.distributed.run'),
                             ('python', ''), ('python3', '')):
            path = programs / name
            text = (f'#!/bin/sh\nPYTHONPATH={ROOT}:$PYTHONPATH exec {sys.executable} '
                    f'{module} "$@"\n')
            path.write_text(text if warm is None else warm.program(module))
            path.chmod(0o755)
        self.env: dict[str, str] = {
            **os.environ, 'PYTHONPATH': str(ROOT),
            'PATH': f'{programs}{os.pathsep}{os.environ["PATH"]}'}
        for name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS'):  # as in a user's shell
            self.env.pop(name, None)

    def type(self, command: str, shown: str = '') -> str:
        if command.startswith('export '):
            self.exported += f'{command}\n'
            return ''
        code = int(command in FINDS)
        for word, given in GIVEN.items():
            command = re.sub(rf'\b{word}\b', given, command)
        done = subprocess.run(['bash', '-c', self.exported + command], cwd=self.folder,
                              env=self.env, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=LIMIT)
        assert done.returncode == code, f'{command}\n{done.stdout[-6000:]}'
        assert not_in_order(shown, done.stdout) == [], f'{command}\n{done.stdout[-6000:]}'
        return done.stdout


@pytest.fixture(scope='module')
def warm():
    env = {name: value for name, value in environment().items()
           if name not in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS')}  # as in a user's shell
    process = Warm(['mmrepro.cli', 'mmrepro.run.runner', 'mmcv.ops', 'mmdet.models',
                    'mmdet.datasets', 'torch._dynamo', 'matplotlib.pyplot'],
                   dict(env, PYTHONHASHSEED='0'))
    yield process
    process.close()


@pytest.fixture
def shell(tmp_path, warm, request):
    is_nightly = request.node.get_closest_marker('nightly') is not None
    return Shell(tmp_path, None if is_nightly else warm)


@pytest.fixture
def shaded(shell):
    (_, transform), (_, config), _ = blocks('find-a-difference', 'python')
    (shell.folder / 'warming_shade.py').write_text(transform)
    (shell.folder / 'shaded.py').write_text(config)
    return shell


@pytest.fixture
def swin(shell):
    (_, config), = blocks('sharded-weights', 'python')
    (shell.folder / 'swin-l.py').write_text(config)
    return shell


def test_every_command_and_output_is_checked_or_has_a_reason():
    found = [step for page in PAGES for step in steps(page)]
    commands = {command for command, _ in found}
    assert len(commands) > 50 and commands >= set(FINDS)
    assert [pattern for pattern in NOT_RUN
            if not any(re.fullmatch(pattern, command) for command in commands)] == []
    alone = [shown.splitlines()[0] for command, shown in found
             if shown and (not command or reason(command)) and not shown.startswith(
                 tuple(NOT_SHOWN))]
    assert alone == []
    assert not_in_order('a 1.5\n[...]\nb', 'x\na 2.25\nb') == []
    assert not_in_order('a\nb', 'b\na') == ['b']


@pytest.mark.parametrize('repeats', [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.nightly
def test_two_virtual_ranks_train(shell, data_root, repeats):
    """The command of the page with a small detector and few images."""
    (shell.folder / 'data').mkdir()
    (shell.folder / 'data' / 'demo').symlink_to(data_root)
    said = shell.type(f'{TWO_RANKS} {SMALL}')
    assert 'repeated: same bits' in said
    weights, again = re.search(r'weights (\w{16}) after .*; to repeat: (.*)', said).groups()
    if repeats:  # the command in the last line, typed
        assert f'weights {weights} after' in shell.type(again)


@pytest.mark.nightly  # its bits are in tests/virtual/test_sharded_weights.py
def test_sharded_weights(swin, data_root):
    """The commands of the page with a small model and few images."""
    (swin.folder / 'data').mkdir()
    (swin.folder / 'data' / 'demo').symlink_to(data_root)
    (swin.folder / 'small.py').write_text(SMALL_SWIN)
    for command, shown in steps('sharded-weights'):
        if 'swin-l.py' in command or command.startswith('mmrepro compare'):
            shown = re.sub(r'[\d.]+ million', '[...] million', shown)
            swin.type(command.replace('swin-l.py', 'small.py'), shown)  # checks what it says


@pytest.mark.nightly  # tests/verbs/test_as_trained.py holds this of another verification
def test_verify_names_the_transform_without_a_traceback(shaded):
    before = list(steps('find-a-difference'))[:3]
    assert 'Traceback' not in [shaded.type(*step) for step in before][-1]


@pytest.mark.parametrize('name', ['train', pytest.param('dicts', marks=pytest.mark.nightly)])
def test_an_own_script_repeats_and_its_dicts_need_no_seed(shell, name):
    (_, script), (_, dicts) = blocks('own-script', 'python')
    hook = "custom_hooks=[dict(type='FingerprintHook')], randomness"
    script = script.replace('randomness', hook)
    seed = 'mmrepro.set_random_seed(42)\n'
    rest = [line for line in script.partition('Runner(\n')[2].splitlines()
            if not line.startswith(('    model=', '    train_dataloader=', 'runner.train'))]
    dicts = dicts.replace('    ...)  # and the rest as above', '\n'.join(rest))
    (shell.folder / 'train.py').write_text(script)
    (shell.folder / 'unseeded.py').write_text(script.replace(seed, ''))
    (shell.folder / 'dicts.py').write_text(
        f'{script.partition(seed)[0]}{dicts}\nrunner.train()\n'.replace('epochs=2', 'epochs=8'))
    for turn in 'ab':
        said = shell.type(f'PYTHONHASHSEED=0 python {name}.py runs/{name}-{turn}')
        assert 'hold the same' not in said
        assert ('resumed by a witness at iterations 8, 10, 16' in said) == (name == 'dicts')
    assert 'SAME BITS' in shell.type(f'mmrepro compare runs/{name}-a runs/{name}-b')
    with pytest.raises(AssertionError, match='RandomnessError: Small was built before'):
        shell.type('python unseeded.py runs/unseeded')


@pytest.mark.nightly
def test_find_a_difference(shaded):
    for step in steps('find-a-difference'):
        shaded.type(*step)
    *_, (_, fixed) = blocks('find-a-difference', 'python')
    path = shaded.folder / 'warming_shade.py'
    path.write_text(path.read_text().partition('    def transform')[0] + fixed)
    verify = subprocess.run(['bash', '-c', f'{shaded.exported}{FINDS[0]}'], cwd=shaded.folder,
                            env=shaded.env, capture_output=True, text=True, check=True)
    assert 'SAME BITS' in verify.stdout


@pytest.mark.nightly
def test_sharded_weights_of_a_large_model(swin):
    for step in steps('sharded-weights'):
        swin.type(*step)  # checks the exit code and what is shown


@pytest.mark.nightly
@pytest.mark.parametrize('page', sorted(
    PAGES.keys() - {'find-a-difference', 'own-script', 'sharded-weights'}))
def test_a_page(page, shell):
    typed = [(command, '' if shown.startswith(tuple(NOT_SHOWN)) else shown)
             for command, shown in steps(page) if command and not reason(command)]
    shell.type('mmrepro demo --data-only')
    if any('work_dirs/' in command or re.search(r'\bW/|CHECKPOINT', command)
           for command, _ in typed):
        for run in RUNS[:1]:
            shell.type(f'mmrepro train CONFIG --fingerprint --work-dir work_dirs/{run}')
        for run in RUNS[1:]:
            (shell.folder / 'work_dirs' / run).symlink_to('monday')
    for step in typed:
        shell.type(*step)  # checks the exit code and what is shown


# docs/how-to/leave.md: stock MMEngine continues what mmrepro has trained
TINY = '''
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
    for name, text in (('config.py', TINY), ('stock.py', STOCK)):
        (path / name).write_text(text)
    run(path, '-m', 'mmrepro', 'train', 'config.py', '--work-dir', 'run')
    return path


def run(folder, *arguments, code=0):
    done = fresh(*arguments, code=code, cwd=folder, PYTHONHASHSEED='0',
                 CUBLAS_WORKSPACE_CONFIG=':4096:8', TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD='1')
    return done.stdout + done.stderr


@pytest.mark.nightly
def test_stock_mmengine_continues_a_checkpoint(folder):
    assert 'iterations 4 False Runner' in run(folder, 'stock.py', 'config.py')


@pytest.mark.nightly
def test_of_the_written_config_only_the_keys_of_mmengine_may_stay(folder):
    assert 'unexpected keyword argument' in run(folder, 'stock.py', 'run/config.py', code=1)
    assert 'iterations 4 False Runner' in run(
        folder, 'stock.py', 'run/config.py', 'seed', 'deterministic', 'diff_rank_seed')
