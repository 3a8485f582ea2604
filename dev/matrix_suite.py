"""The suite of an environment: train, repeat, resume, fingerprint, compare, verify.

Started by :mod:`dev.matrix` with the Python of the environment; the last line printed is JSON.
"""
from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODULES = ('torch', 'numpy', 'cv2', 'mmengine', 'mmcv', 'mmdet')
ITERATIONS = 4
CONFIG = 'config.py'
DATA = 'data/demo'  # where the configs of the demonstration look
# a milestone before the resume and one after it; torch before 2.4 has to be told of their class
SCHEDULE = """
param_scheduler = [dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=2),
                   dict(type='MultiStepLR', by_epoch=False, milestones=[1, 3], gamma=0.1)]
"""
OPTIONS = ('train_cfg.max_epochs=1', 'train_cfg.val_interval=100',
           'default_hooks.checkpoint.interval=1', 'default_hooks.checkpoint.by_epoch=False',
           'default_hooks.checkpoint.max_keep_ckpts=-1')


class Suite(NamedTuple):
    """What is trained in an environment.

    Attributes:
        config: path in the repository.
        options: what makes the training one of :data:`ITERATIONS`.
        data: arguments of `mmrepro verify` about data.
        absent: modules that must not be there.
    """
    config: str
    options: tuple[str, ...]
    data: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


SUITES: dict[str, Suite] = {
    'detector': Suite('configs/demo/retinanet_r50_fpn_demo.py',
                      ('train_dataloader.dataset.indices=8',), ('--demo-data', DATA)),
    'classifier': Suite('configs/demo/classifier_demo.py', ('train_dataloader.dataset.length=16',),
                        absent=('mmdet', 'mmcv', 'pycocotools')),
}


class Failed(RuntimeError):
    """A command of the suite ended with an error."""


def mmrepro(*arguments: str, **env: str) -> None:
    """Run a command of mmrepro; its output goes to standard error."""
    _run('mmrepro', *arguments, **env)


def _run(*words: str, **env: str) -> None:
    """Run ``python -m`` with these words."""
    done = subprocess.run([sys.executable, '-m', *words], env={**os.environ, **env},
                          stdout=sys.stderr)
    if done.returncode:
        raise Failed(f'{words[0]} {words[1]} ended with exit code {done.returncode}')


def train(suite: Suite, folder: str, *arguments: str, workers: int = 0, **env: str) -> None:
    mmrepro('train', CONFIG, '--work-dir', folder, *arguments, '--cfg-options', *OPTIONS,
            *suite.options, f'train_dataloader.num_workers={workers}', **env)


def bits(folder: str) -> str:
    """Return a digest of weights and optimizer at the end of a run."""
    import torch
    content = torch.load(os.path.join(folder, f'iter_{ITERATIONS}.pth'), map_location='cpu',
                         **({} if torch.__version__.startswith('2.0') else {'mmap': False}),
                         weights_only=False)
    digest = hashlib.sha256()
    for part in ('state_dict', 'optimizer'):
        _update(digest, content[part])
    return digest.hexdigest()


def _update(digest: Any, value: Any) -> None:
    if hasattr(value, 'numpy'):
        digest.update(value.numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _update(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for one in value:
            _update(digest, one)
    else:
        digest.update(repr(value).encode())


def is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed modules."""
    found = {'python': sys.version.split()[0]}
    for name in filter(is_there, MODULES):
        found[name] = importlib.import_module(name).__version__
    return found


def names_the_seed() -> bool:
    """Whether `mmrepro localise` finds that two runs with different seeds differ."""
    done = subprocess.run([sys.executable, '-m', 'mmrepro', 'localise', CONFIG, '--iters', '2',
                           '--b', 'randomness.seed=43', '--json'], stdout=subprocess.PIPE)
    return done.returncode == 1 and json.loads(done.stdout)['verdict'] == 'found'


def run(suite: Suite) -> dict[str, str]:
    """Run all steps; return 'same bits', 'found', 'done' or the error for each."""
    steps: dict[str, str] = {}

    def step(name: str, function: Any, good: str = 'same bits', bad: str = 'DIFFERENT') -> None:
        try:
            steps[name] = good if function() is not False else bad
        except (Failed, OSError) as error:
            steps[name] = str(error)

    def repeat() -> bool:
        train(suite, 'b', '--fingerprint', workers=2, PYTHONHASHSEED='1')
        return bits('a') == bits('b')

    def resume() -> bool:
        train(suite, 'c', '--resume', 'a/iter_2.pth', workers=2)
        return bits('a') == bits('c')

    step('train', lambda: train(suite, 'a', '--fingerprint', PYTHONHASHSEED='0'))
    step('repeat', repeat)
    step('resume', resume)
    step('fingerprints', lambda: os.path.getsize('a/mmrepro/manifest.json') > 0)
    step('compare', lambda: mmrepro('compare', 'a', 'b'))
    step('verify', lambda: mmrepro('verify', CONFIG, '--vary', 'workers,resume', '--iters', '3',
                                   *suite.data))
    if suite.absent:
        step('localise', lambda: mmrepro('localise', CONFIG, '--iters', '3', '--b',
                                         'train_dataloader.num_workers=2'))
        step('localise, another seed', names_the_seed, 'found', 'NOT FOUND')
        step('replay', lambda: mmrepro('replay', 'a', '--iters', '3'))
        step('test', lambda: mmrepro('test', CONFIG, f'a/iter_{ITERATIONS}.pth'), 'done')
        step('chaos', lambda: _run('dev.kills', CONFIG, '--kills', '2'))
        step('demo', lambda: mmrepro('demo'))
    return steps


def main(name: str, folder: str) -> int:
    suite = SUITES[name]
    present = [module for module in suite.absent if is_there(module)]
    if present:
        raise SystemExit(f'{", ".join(present)} must not be installed here')
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    base = os.path.join(ROOT, suite.config)
    with open(CONFIG, 'w', encoding='utf-8') as file:
        file.write(f'_base_ = [{base!r}]\n{SCHEDULE}')
    if suite.data:
        mmrepro('demo', '--data-only', '--data', DATA)
    print(json.dumps(dict(versions=versions(), steps=run(suite))))
    return 0


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
