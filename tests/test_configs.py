"""The shipped configs: inheritance, both styles, and what they promise to set."""
import glob
import os

import pytest
from mmengine.config import Config

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
EXAMPLES = {
    'faster-rcnn_r50_fpn_1x_coco': 'faster_rcnn',
    'retinanet_r50_fpn_1x_coco': 'retinanet',
    'yolox_s_8xb8-300e_coco': 'yolox',
    'rtmdet_tiny_8xb32-300e_coco': 'rtmdet',
    'deformable-detr_r50_16xb2-50e_coco': 'deformable_detr',
}
# of a method whose training takes days, and one for studies of seeds
ONLY_DEMOS = ('soft-teacher', 'rtmdet_small')
# the detectors; the classifier draws its images
DEMOS = sorted(name for name in map(os.path.basename, glob.glob(
    os.path.join(ROOT, 'configs/demo/*_demo.py'))) if name != 'classifier_demo.py')
MIXINS = {'reproducible': dict(deterministic=True), 'seeded': dict(deterministic=False)}
ADDED = {'custom_imports', 'runner_type', 'randomness'}


def _base(name):
    return os.path.join(ROOT, 'configs', '_base_', f'{name}.py')


def test_every_example_is_tested_and_has_a_demo():
    found = {os.path.basename(p) for p in glob.glob(os.path.join(ROOT, 'configs/*.py'))}
    assert found == {f'{name}_repro.py' for name in EXAMPLES}
    demos = [name.split('_')[0] for name in DEMOS if not name.startswith(ONLY_DEMOS)]
    assert sorted(demos) == sorted(name.split('_')[0] for name in EXAMPLES)
    assert len(DEMOS) == len(EXAMPLES) + len(ONLY_DEMOS)


@pytest.mark.parametrize('name', EXAMPLES)
def test_an_example_is_mmdetections_config_plus_three_keys(name):
    ours = Config.fromfile(os.path.join(ROOT, 'configs', f'{name}_repro.py'))
    import mmdet
    theirs = Config.fromfile(os.path.join(
        os.path.dirname(mmdet.__file__), '.mim', 'configs', EXAMPLES[name], f'{name}.py'))
    assert set(ours) - set(theirs) == ADDED
    assert not ours.env_cfg.cudnn_benchmark
    assert ours.randomness == dict(seed=42, deterministic=True)
    for key in theirs:
        assert _unscoped(ours[key]) == _unscoped(theirs[key]), key


def _unscoped(node):
    """Without the ``_scope_`` keys that MMEngine adds to what comes from `mmdet::`."""
    if isinstance(node, dict):
        return {key: _unscoped(value) for key, value in node.items() if key != '_scope_'}
    if isinstance(node, (list, tuple)):
        return [_unscoped(value) for value in node]
    return node


STYLES = {
    'text': lambda name: f"_base_ = ['mmdet::_base_/default_runtime.py', {_base(name)!r}]\n",
    'lazy': lambda name: ('from mmengine.config import read_base\nwith read_base():\n'
                          f'    from mmrepro.configs._base_.{name} import *\n'
                          'randomness.update(seed=7)\n')}


@pytest.mark.parametrize('style', STYLES)
@pytest.mark.parametrize('name, own', MIXINS.items())
def test_a_mixin_works_in_both_styles(tmp_path, name, own, style):
    path = tmp_path / 'config.py'
    path.write_text(STYLES[style](name))
    cfg = Config.fromfile(str(path))
    assert cfg.randomness == dict(seed=42 if style == 'text' else 7, **own)
    assert cfg.get('default_scope') == 'mmdet' or set(cfg) == {*ADDED, 'read_base'}


def test_the_runner_type_of_the_mixins_is_found_without_an_import():
    from mmengine.registry import RUNNERS

    import mmrepro
    assert RUNNERS.get(Config.fromfile(_base('reproducible')).runner_type) is mmrepro.ReproRunner


@pytest.mark.parametrize('name', DEMOS)
def test_a_demo_config_reads_the_demo_data_and_downloads_nothing(name):
    cfg = Config.fromfile(os.path.join(ROOT, 'configs', 'demo', name))
    for key in ('train_dataloader', 'val_dataloader', 'test_dataloader', 'val_evaluator',
                'test_evaluator'):
        assert 'data/coco' not in str(cfg[key]) and 'data/demo' in str(cfg[key])
    assert 'Pretrained' not in str(cfg.model)
    assert 'num_classes=80' not in str(cfg.model) and "'num_classes': 80" not in str(cfg.model)
    assert cfg.randomness == dict(seed=42, deterministic=True)


@pytest.mark.parametrize('name', DEMOS)
def test_use_data_reaches_every_data_set_and_metric(name, tmp_path):
    from mmrepro.demo import demo_config
    cfg = demo_config(name[:-len('_demo.py')], str(tmp_path))
    for key in ('train_dataloader', 'val_dataloader', 'val_evaluator'):
        assert 'data/demo' not in str(cfg[key]) and str(tmp_path) in str(cfg[key])
    assert cfg.val_evaluator.ann_file == str(tmp_path / 'annotations' / 'instances_val2017.json')
