"""What an environment of the matrix has to do: train, repeat, resume, fingerprint, compare, verify.

Started by :mod:`dev.matrix` with the Python of the environment; the last line printed is JSON.
"""
from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
from typing import Any, Dict

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CONFIG = os.path.join(ROOT, 'configs', 'demo', 'retinanet_r50_fpn_demo.py')
MODULES = ('torch', 'numpy', 'cv2', 'mmengine', 'mmcv', 'mmdet')
ITERATIONS = 4
DATA = 'data/demo'  # where the configs of the demonstration look
OPTIONS = ['train_cfg.max_epochs=1', 'train_cfg.val_interval=100',
           'train_dataloader.dataset.indices=8', 'default_hooks.checkpoint.interval=1',
           'default_hooks.checkpoint.by_epoch=False', 'default_hooks.checkpoint.max_keep_ckpts=-1']


class Failed(RuntimeError):
    """A command of the suite ended with an error."""


def mmrepro(*arguments: str, **env: str) -> None:
    """Run a command of mmrepro; its output goes to standard error."""
    done = subprocess.run([sys.executable, '-m', 'mmrepro', *arguments],
                          env={**os.environ, **env}, stdout=sys.stderr)
    if done.returncode:
        raise Failed(f'mmrepro {arguments[0]} ended with exit code {done.returncode}')


def train(folder: str, *arguments: str, workers: int = 0, **env: str) -> None:
    mmrepro('train', CONFIG, '--work-dir', folder, *arguments, '--cfg-options', *OPTIONS,
            f'train_dataloader.num_workers={workers}', **env)


def bits(folder: str) -> str:
    """A digest of weights and optimizer at the end of a run."""
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


def versions() -> Dict[str, str]:
    found = {'python': sys.version.split()[0]}
    for name in MODULES:
        found[name] = importlib.import_module(name).__version__
    return found


def suite() -> Dict[str, str]:
    """Each step: 'same bits', 'DIFFERENT', or why it could not be done."""
    steps: Dict[str, str] = {}

    def step(name: str, function: Any) -> None:
        try:
            steps[name] = 'same bits' if function() is not False else 'DIFFERENT'
        except (Failed, OSError) as error:
            steps[name] = str(error)

    step('train', lambda: train('a', '--fingerprint', PYTHONHASHSEED='0'))
    step('repeat', lambda: (train('b', '--fingerprint', workers=2, PYTHONHASHSEED='1'),
                            bits('a') == bits('b'))[1])
    step('resume', lambda: (train('c', '--resume', 'a/iter_2.pth', workers=2),
                            bits('a') == bits('c'))[1])
    step('fingerprints', lambda: os.path.getsize('a/mmrepro/manifest.json') > 0)
    step('compare', lambda: mmrepro('compare', 'a', 'b'))
    step('verify', lambda: mmrepro('verify', CONFIG, '--vary', 'workers,resume', '--iters', '3',
                                   '--demo-data', DATA))
    return steps


def main(folder: str) -> int:
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    mmrepro('data', DATA)
    print(json.dumps(dict(versions=versions(), steps=suite())))
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1]))
