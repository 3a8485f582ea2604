"""Upgrades as a user makes them: ``python -m dev.versions.upgrades [--folder FOLDER]``.

A demonstration config is trained with one version of a package and with another, with
fingerprints; the second environment also resumes from a checkpoint of the first. Printed is what
``mmrepro compare`` says from the table, beside what the fingerprints show.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from .__main__ import ROOT, installed

EPOCHS, IMAGES = 2, 4
# begins a resume's refusal
REFUSED = 'This run differs from the one that wrote'


class Upgrade(NamedTuple):
    """Two versions of a package, and the config that is trained with both."""
    title: str
    fact: str  # of the version
    then: tuple[str, ...]  # 'distribution==version'
    now: tuple[str, ...]
    beside: tuple[str, ...] = ()
    transform: dict[str, Any] | None = None  # after loading
    paa: bool = False


def _cv2(then: str, now: str, what: str, **settings: Any) -> Upgrade:
    name = 'opencv-python-headless'
    return Upgrade(f'OpenCV {then} to {now}, {what}', 'cv2', (f'{name}=={then}', ),
                   (f'{name}=={now}', ), ('numpy==1.26.4', 'scipy==1.13.1'), **settings)


_SKLEARN = ('numpy==1.26.4', 'scipy==1.11.4', 'joblib==1.4.2', 'threadpoolctl==3.5.0',
            'narwhals==2.0.0')
UPGRADES = (
    _cv2('4.12.0.88', '5.0.0.93', 'RetinaNet'),
    _cv2('4.12.0.88', '5.0.0.93', 'RetinaNet with `Rotate`',
         transform=dict(type='Rotate', prob=1.)),
    Upgrade('NumPy 1.26.4 to 2.4.6, RetinaNet', 'numpy', ('numpy==1.26.4', ), ('numpy==2.4.6', ),
            ('opencv-python-headless==5.0.0.93', 'scipy==1.13.1', 'matplotlib==3.9.4',
             'contourpy==1.3.1')),
    Upgrade('scikit-learn 1.5.2 to 1.7.2, PAA', 'scikit-learn', ('scikit-learn==1.5.2', ),
            ('scikit-learn==1.7.2', ), _SKLEARN, paa=True),
    # the build for CUDA, from PyPI, beside the installed one
    Upgrade('torch 2.10.0 to 2.13.0, RetinaNet', 'torch', ('torch===2.10.0', ), (),
            ('numpy==1.26.4', 'scipy==1.13.1')),
    Upgrade('torch 2.13.0 to 2.15.0, RetinaNet', 'torch', (), ('torch===2.15.0', ),
            ('numpy==1.26.4', 'scipy==1.13.1')),
)


def config_text(upgrade: Upgrade) -> str:
    """Return a config: the demonstration of RetinaNet with what an upgrade adds."""
    pipeline: list[dict[str, Any]] = [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations', with_bbox=True),
        dict(type='RandomResize', scale=(160, 120), ratio_range=(.8, 1.2), keep_ratio=True),
        dict(type='RandomFlip', prob=.5), dict(type='PackDetInputs')]
    if upgrade.transform:
        pipeline.insert(2, upgrade.transform)
    lines = [f"_base_ = [{str(ROOT / 'configs/demo/retinanet_r50_fpn_demo.py')!r}]",
             f'pipeline = {pipeline!r}',
             f'train_dataloader = dict(dataset=dict(pipeline=pipeline, indices={IMAGES}))',
             f'train_cfg = dict(max_epochs={EPOCHS}, val_interval=9)']
    if upgrade.paa:  # at AVX-512, its scores depend on OpenBLAS's choice and are not in the table
        lines.append("randomness = dict(numerics=dict(cpu='avx2'))")
        lines.append(
            "model = dict(type='PAA', bbox_head=dict(type='PAAHead', anchor_generator=dict("
            "_delete_=True, type='AnchorGenerator', ratios=[1.0], octave_base_scale=8, "
            'scales_per_octave=1, strides=[8, 16, 32, 64, 128]), '
            "bbox_coder=dict(target_stds=[.1, .1, .2, .2]), loss_bbox=dict(_delete_=True, "
            "type='GIoULoss', loss_weight=1.3), loss_centerness=dict(type='CrossEntropyLoss', "
            'use_sigmoid=True, loss_weight=.5)), train_cfg=dict(assigner=dict(pos_iou_thr=.1, '
            'neg_iou_thr=.1), allowed_border=-1))')
    return '\n'.join(lines) + '\n'


def run(folder: Path, overlays: list[Path], *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of mmrepro with other packages in front."""
    env = {**os.environ, 'OMP_NUM_THREADS': '1',
           'PYTHONPATH': os.pathsep.join((*map(str, overlays), str(ROOT)))}
    return subprocess.run([sys.executable, '-W', 'ignore', '-m', 'mmrepro', *words], env=env,
                          cwd=folder, capture_output=True, text=True)


def row(upgrade: Upgrade, number: int, folder: Path) -> str:
    """Return a row of the table: what is said of an upgrade, and what came of it."""
    here = folder / 'upgrades'
    here.mkdir(parents=True, exist_ok=True)
    config = here / f'upgrade_{number}.py'
    config.write_text(config_text(upgrade))
    overlays = {name: [installed(one, folder, dependencies=one.startswith('torch'))
                       for one in (*packages, *upgrade.beside)]
                for name, packages in (('then', upgrade.then), ('now', upgrade.now))}
    works = {name: here / f'{number}_{name}' for name in (*overlays, 'resumed')}
    for work in works.values():
        shutil.rmtree(work, ignore_errors=True)
    if not (here / 'data').exists():
        run(here, [], 'demo', '--data-only').check_returncode()
    for name, paths in overlays.items():
        done = run(here, paths, 'train', str(config), '--work-dir', str(works[name]),
                   '--fingerprint')
        if done.returncode:
            raise RuntimeError(f'{upgrade.title}: {done.stdout[-1500:]}{done.stderr[-1500:]}')
    compared = json.loads(run(here, [], 'compare', str(works['then']), str(works['now']),
                              '--all', '--json').stdout)
    (here / f'{number}_compare.json').write_text(json.dumps(compared, indent=1))
    shutil.copytree(works['then'], works['resumed'])
    resumed = run(here, overlays['now'], 'train', str(config), '--work-dir', str(works['resumed']),
                  '--resume', str(works['resumed'] / 'epoch_1.pth'))
    said, = (one for one in compared['manifest'] if one['name'] == f'version.{upgrade.fact}')
    outcome = 'accepted'
    if resumed.returncode:
        outcome = 'refused' if REFUSED in resumed.stderr else 'FAILED'
    return (f'| {upgrade.title} | {said["severity"]}: {said["consequence"]} | '
            f'{shown(compared)} | {outcome} |')


def shown(compared: dict[str, Any]) -> str:
    """Return what fingerprints say of two runs, in a few words."""
    if compared['equal']:
        return f'same bits, {compared["common"]} iterations'
    first = compared['first']
    return f'differ from iteration {first["iteration"]} on, first the {first["field"]}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--folder', type=Path, default=ROOT / 'work_dirs' / 'versions')
    parser.add_argument('--only', type=int)
    args = parser.parse_args()
    print('| upgrade | what the table says | what fingerprints show | a resume is |')
    print('|---|---|---|---|')
    for number, upgrade in enumerate(UPGRADES):
        if args.only in (None, number):
            print(row(upgrade, number, args.folder.resolve()), flush=True)


if __name__ == '__main__':
    main()
