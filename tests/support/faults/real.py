"""Faults planted in real detectors, searched for by the command line in processes of its own.

A fault is a file of ``detectors/``, as a user would write it for ``custom_imports``, and a demo
config that uses it. All of them take a quarter of an hour on one core.
"""
from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import mmdet
import mmengine
import torch

from mmrepro.fingerprint.records import useful_calls
from mmrepro.localise.diagnosis import Diagnosis

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]

FASTER, YOLOX = 'faster-rcnn_r50_fpn', 'yolox_s'
LOCALISE = ('localise', '--iters', '1', '--no-values')

# the demo configs with fewer weights and pixels: whatever is in them stays
SMALL = {
    FASTER: '''model = dict(
    backbone=dict(depth=18), neck=dict(in_channels=[64, 128, 256, 512]),
    roi_head=dict(bbox_head=dict(fc_out_channels=64)))
train_pipeline = _base_.train_pipeline
train_pipeline[2]['scale'] = (160, 120)
''',
    YOLOX: 'train_pipeline = _base_.train_pipeline\n',
}
BASE = '_base_ = [{base!r}]\n'
HEAD = '''_base_ = ['./small.py']
custom_imports = dict(imports=['mmrepro', {module!r}], allow_failed_imports=False)
'''
PIPELINE = '''train_pipeline = _base_.train_pipeline
{change}
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
'''
# for faults that a run by itself would find and name
UNCHECKED = '\nrandomness = dict(self_checks=False)\n'


class Fault(NamedTuple):
    module: str  # of detectors/; the config imports it
    config: str  # what the config has beside its base and imports
    # attributes of the diagnosis; `mentions` are parts of what is printed. None: nothing is found
    expect: Any
    command: tuple[str, ...] = LOCALISE  # verb and options
    model: str = FASTER  # name of the demo config


FAULTS = {
    'noise_in_a_lateral_convolution': Fault(
        'lateral_noise', "model = dict(neck=dict(type='NoisyFPN'))",
        dict(iteration=0, phase='forward', path='neck.lateral_convs.1', kind='argument',
             operator='aten.randn.generator', cause='generator of its own',
             mentions=('lateral_noise.py:11 in forward', ))),
    'noise_in_the_backward_of_roi_align': Fault(
        'roi_align_backward',
        "model = dict(roi_head=dict(bbox_roi_extractor=dict(roi_layer=dict("
        "type='RacyRoIAlign'))))",
        dict(iteration=0, phase='backward', kind='output', operator='planted.add_up.default',
             path='roi_head.bbox_roi_extractor.roi_layers.1', cause='operator',
             mentions=('roi_align_backward.py:28 in backward', 'roi_align_backward.py:33 in')),
        ('localise', '--iters', '2')),
    'a_flip_with_a_generator_of_its_own': Fault(
        'own_flip', PIPELINE.format(change="train_pipeline[3] = dict(type='OwnFlip', prob=0.5)"),
        dict(iteration=0, phase='data', operator='OwnFlip', kind='output',
             cause='generator of its own in a transform',
             mentions=('own_flip.py:13 in OwnFlip', 'rng: state')),
        (*LOCALISE, '--a', 'TASK_ID=0', '--b', 'TASK_ID=2')),
    'features_through_numpy_in_blocks_by_the_clock': Fault(
        'numpy_features', "model = dict(neck=dict(type='CentredFPN'))",
        dict(iteration=0, phase='forward', path='neck', kind='input', cause='clock',
             mentions=('in mean_of', 'perf_counter_ns'))),
    'a_data_list_in_the_order_of_a_set_of_names': Fault(
        'set_of_names', "train_dataloader = dict(dataset=dict(type='UniqueCoco'))",
        dict(iteration=0, phase='data', operator='UniqueCoco', kind='input',
             cause='hash order of the data list', mentions=('img_path', 'PYTHONHASHSEED')),
        ('verify', '--localise', '--vary', 'hashseed', '--iters', '2')),
    'a_hook_that_draws_and_is_harmless': Fault(
        'drawing_hook', "custom_hooks = [dict(type='DrawingHook')]", None,
        ('verify', '--iters', '4', '--vary', 'process,workers,resume,validation')),
    'a_hook_that_draws_and_steps_without_seeds': Fault(
        'drawing_hook', "custom_hooks = [dict(type='DrawingHook')]\n"
        'randomness = dict(worker_seed="mmengine")',
        dict(iteration=1, kind='generator', cause='other draws before',
             mentions=('DrawingHook.after_train_iter', )),
        ('localise', '--iters', '3', '--a', 'LOOKS=1', '--b', 'LOOKS=3')),
    'a_counter_that_is_lost_at_resume': Fault(
        'counting_loss', "model = dict(roi_head=dict(bbox_head=dict(loss_cls=dict("
        "type='WarmLoss'))))" + UNCHECKED,
        dict(iteration=1, phase='loss', path='roi_head.bbox_head.loss_cls', kind='argument',
             operator='aten.mul.Tensor', cause='state lost at resume',
             mentions=('roi_head.bbox_head.loss_cls.calls', 'counting_loss.py:12 in forward')),
        ('verify', '--localise', '--vary', 'resume', '--iters', '3')),
    'entropy_in_a_loss': Fault(
        'entropy_loss', "model = dict(roi_head=dict(bbox_head=dict(loss_bbox=dict("
        "type='JitterLoss'))))",
        dict(iteration=0, phase='loss', path='roi_head.bbox_head.loss_bbox', kind='argument',
             operator='aten.mul.Tensor', cause='entropy',
             mentions=('entropy_loss.py:12 in forward', 'urandom'))),
    'memory_that_a_head_never_wrote': Fault(
        'unwritten_head', "model = dict(roi_head=dict(bbox_head=dict(type='CarelessHead')))",
        dict(iteration=0, phase='forward', path='roi_head.bbox_head', kind='output',
             cause='uninitialized memory', mentions=('unwritten_head.py:12 in forward', ))),
    'a_learning_rate_by_the_clock': Fault(
        'clock_lr', "custom_hooks = [dict(type='TimedLRHook')]",
        dict(iteration=0, phase='hook', path='TimedLRHook.before_train_iter', kind='argument',
             cause='clock in a hook', mentions=('clock_lr.py:14 in before_train_iter', ' lr='))),
    'a_transform_that_counts_in_every_worker': Fault(
        'counting_transform', PIPELINE.format(
            change="train_pipeline.insert(3, dict(type='Curriculum'))") + UNCHECKED,
        dict(phase='data', operator='Curriculum', kind='output',
             cause='state of its own in a transform',
             mentions=('counting_transform.py:10 in Curriculum', 'seen')),
        ('verify', '--localise', '--vary', 'workers', '--iters', '3')),
    'a_head_that_remembers_a_validation': Fault(
        'remembering_head', "model = dict(roi_head=dict(bbox_head=dict(type='SharpHead')))",
        dict(iteration=1, phase='forward', path='roi_head.bbox_head', kind='argument',
             operator='aten.div.Tensor', cause='state that a validation leaves',
             mentions=('remembering_head.py:14 in forward', 'temperature')),
        ('verify', '--localise', '--vary', 'validation', '--iters', '3')),
    'a_mosaic_with_partners_of_its_own': Fault(
        'own_mosaic', PIPELINE.format(change="train_pipeline[0]['type'] = 'OwnMosaic'"),
        dict(iteration=0, phase='data', operator='OwnMosaic.get_indexes', kind='output',
             cause='entropy in a transform',
             mentions=('own_mosaic.py:12 in OwnMosaic', 'partners: state')), model=YOLOX),
    'a_batch_size_in_pixels_with_a_generator_of_its_own': Fault(
        'own_batch_size',
        "model = dict(data_preprocessor=dict(batch_augments=[dict(type='OwnRandomResize', "
        'random_size_range=(160, 224), size_divisor=32, interval=2)]))',
        dict(iteration=2, phase='data', path='data_preprocessor.batch_augments.0',
             cause='generator of its own',
             mentions=('data_preprocessor.batch_augments.0.generator: generator', )),
        ('localise', '--iters', '4', '--a', 'TASK_ID=0', '--b', 'TASK_ID=2'), YOLOX),
}


def config_of(fault, folder):
    shutil.copy(HERE / 'detectors' / f'{fault.module}.py', folder)
    base = str(ROOT / 'configs' / 'demo' / f'{fault.model}_demo.py')
    (folder / 'small.py').write_text(BASE.format(base=base) + SMALL[fault.model])
    (folder / 'config.py').write_text(HEAD.format(module=fault.module) + fault.config + '\n')
    return 'config.py'


def search(name, root):
    """Run the command on a fault, in a folder of ``root``, which has data/demo; what it prints."""
    fault = FAULTS[name]
    verb, *options = fault.command
    folder = root / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / 'data').symlink_to(root / 'data')
    command = [sys.executable, '-m', 'mmrepro', verb, config_of(fault, folder), *options, '--json',
               '--work-dir', 'runs']
    env = dict(os.environ, PYTHONPATH=f'.{os.pathsep}{ROOT}', OMP_NUM_THREADS='1',
               MKL_NUM_THREADS='1')
    env.pop('PYTHONHASHSEED', None)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if not done.stdout.strip():
        raise RuntimeError(f'{" ".join(command)}: exit code {done.returncode}\n{done.stderr}')
    return dict(json.loads(done.stdout), exit_code=done.returncode)


def versions():
    return (f'torch {torch.__version__}, mmengine {mmengine.__version__}, mmdet '
            f'{mmdet.__version__}, Python {platform.python_version()}')


def row_of(name, found):
    """Return a row of the table: what was named, and in ``wrong`` what should have been."""
    fault = FAULTS[name]
    outcome = found if fault.command[0] == 'localise' else found.get('localise')
    finding = (outcome or {}).get('finding')
    row = dict(model=fault.model, command=f'mmrepro {" ".join(fault.command)}',
               found=finding is not None, versions=versions())
    if finding is None:
        wrong = [] if fault.expect is None and found['exit_code'] == 0 else [
            f'nothing was named: {json.dumps(found)}']
    else:
        wrong = _wrong(fault.expect, finding, found['exit_code'])
        calls = useful_calls([tuple(call) for call in finding['stack']])
        row.update({key: finding[key] for key in ('iteration', 'phase', 'path', 'operator', 'kind',
                                                  'cause', 'mover')}, why=finding['sentence'])
        row['line'] = ':'.join(map(str, (os.path.basename(calls[0][0]), calls[0][1]))) \
            if calls else ''
    return dict(row, right=not wrong, wrong=wrong)


def _wrong(expect, finding, exit_code):
    finding = {key: tuple(value) if isinstance(value, list) else value
               for key, value in finding.items()}
    finding['stack'] = tuple(map(tuple, finding['stack']))
    if expect is None:
        return [f'nothing was planted that matters: {finding}']
    text = Diagnosis(**finding).text()
    expect = dict(expect)
    mentions = expect.pop('mentions', ())
    wrong = [f'{key}: {finding[key]!r}, not {value!r}' for key, value in expect.items()
             if finding[key] != value]
    wrong += [f'{part!r} is not in:\n{text}' for part in mentions if part not in text]
    return wrong + ([] if exit_code == 1 else [f'exit code {exit_code}'])
