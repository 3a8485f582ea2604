"""The commands of the tutorials, typed as they stand there, in a folder that has what they name.

A page with a command that no table names fails: it is run, or the reason is here.
"""
from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / 'docs' / 'tutorials'
CONFIG = 'configs/demo/faster-rcnn_r50_fpn_demo.py'
# what the pages leave to the reader
GIVEN = {'CONFIG': CONFIG, 'CHECKPOINT': 'work_dirs/faster-rcnn_r50_fpn_demo/epoch_2.pth',
         'HOST': 'localhost'}
# beginning of a command -> why it is not run here
NOT_RUN = {
    'bash tools/demo.sh': 'makes an environment; tests/demo runs what it starts',
    'pip install': 'changes the environment; tests/test_packaging.py installs',
    'bash tools/dist_train.sh': 'eight processes; tests/cli/test_tools.py runs the script',
    'bash tools/slurm_train.sh': 'needs Slurm; tests/cli/test_tools.py runs the script',
}
# (page, command) -> exit code, where the page says that the command finds a difference
FINDS = {('find-a-difference', 'mmrepro verify shaded.py --vary workers --iters 2'): 1,
         ('find-a-difference', 'mmrepro localise shaded.py --iters 2 --no-values '
          '--b train_dataloader.num_workers=2'): 1}
LIMIT = 1800  # seconds for a command
TWO_RANKS = f'mmrepro train {CONFIG} --deterministic --seed 42 --virtual-ranks 2'


def blocks(page: str, language: str) -> list[str]:
    text = (TUTORIALS / f'{page}.md').read_text(encoding='utf-8')
    return re.findall(rf'^```{language}\n(.*?)^```', text, re.S | re.M)


def commands(page: str) -> Iterator[str]:
    for block in blocks(page, 'shell'):
        for line in re.sub(r'\\\n\s*', '', block).splitlines():
            line = line.partition(' #')[0].strip()
            if line:
                yield line


def reason(command: str) -> str:
    return next((why for start, why in NOT_RUN.items() if command.startswith(start)), '')


class Shell:
    """Types commands into a folder; every one is a fresh process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.exported = folder, ''
        for name in ('configs', 'tools'):
            (folder / name).symlink_to(ROOT / name)
        programs = folder / 'programs'
        programs.mkdir()
        for name, module in (('mmrepro', 'mmrepro'), ('torchrun', 'torch.distributed.run')):
            path = programs / name
            path.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT}:$PYTHONPATH exec {sys.executable} -m '
                            f'{module} "$@"\n')
            path.chmod(0o755)
        (programs / 'python').symlink_to(sys.executable)
        self.env: dict[str, str] = {
            **os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1',
            'PATH': f'{programs}{os.pathsep}{os.environ["PATH"]}'}

    def type(self, command: str, code: int = 0) -> str:
        if command.startswith('export '):
            self.exported += f'{command}\n'
            return ''
        for word, given in GIVEN.items():
            command = re.sub(rf'\b{word}\b', given, command)
        done = subprocess.run(['bash', '-c', self.exported + command], cwd=self.folder,
                              env=self.env, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=LIMIT)
        assert done.returncode == code, f'{command}\n{done.stdout[-6000:]}'
        return done.stdout


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path)


@pytest.fixture
def shaded(shell):
    """The files that the page lets the reader write."""
    transform, config, *_ = blocks('find-a-difference', 'python')
    (shell.folder / 'warming_shade.py').write_text(transform)
    (shell.folder / 'shaded.py').write_text(config)
    return shell


def test_every_command_is_run_or_has_a_reason():
    pages = {path.stem for path in TUTORIALS.glob('*.md')}
    assert pages == {'quickstart', 'virtual-ranks', 'find-a-difference'}
    found = {command for page in pages for command in commands(page)}
    assert all(any(command.startswith(start) for command in found) for start in NOT_RUN)
    assert {(page, command) for page in pages for command in commands(page)} >= FINDS.keys()


@pytest.mark.slow
def test_two_virtual_ranks_train(shell):
    """The command of the page with few images."""
    shell.type('mmrepro demo --data-only')
    said = shell.type(f'{TWO_RANKS} --cfg-options train_cfg.max_epochs=1 '
                      'train_dataloader.dataset.indices=4 val_dataloader.dataset.indices=2')
    assert 'steps were repeated: same bits' in said


@pytest.mark.slow
def test_verify_names_the_transform_without_a_traceback(shaded):
    *before, verify = list(commands('find-a-difference'))[:3]
    for command in before:
        shaded.type(command)
    said = shaded.type(verify, 1)
    assert 'DIFFERENT BITS within one run' in said and 'that of WarmingShade' in said
    assert 'Traceback' not in said


@pytest.mark.nightly
def test_find_a_difference(shaded):
    for command in commands('find-a-difference'):
        shaded.type(command, FINDS.get(('find-a-difference', command), 0))
    fixed = blocks('find-a-difference', 'python')[2]
    path = shaded.folder / 'warming_shade.py'
    path.write_text(path.read_text().partition('    def transform')[0] + fixed)
    assert 'SAME BITS' in shaded.type('mmrepro verify shaded.py --vary workers --iters 2')


@pytest.mark.nightly
@pytest.mark.parametrize('page', ['quickstart', 'virtual-ranks'])
def test_a_page(page, shell):
    shell.type('mmrepro demo --data-only')
    for command in commands(page):
        if not reason(command):
            shell.type(command)
