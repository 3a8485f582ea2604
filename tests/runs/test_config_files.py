"""Configs: what cannot be read or set is one line; a small training keeps its code path."""
import os
import subprocess
import sys

import pytest
from harness import ROOT
from mmengine.config import Config, ConfigDict
from mmengine.model import PretrainedInit
from mmengine.registry import DATASETS

from mmrepro.errors import ConfigError
from mmrepro.runs import config_edits
from mmrepro.runs.config_edits import import_mmrepro
from mmrepro.runs.config_files import merge_options, read_config, without_mark


def config():
    return Config(dict(
        data_root='d', train_cfg=dict(max_epochs=1), val_cfg=None, randomness=dict(seed=1),
        train_dataloader=dict(num_workers=2, dataset=dict(pipeline=[dict(type='A'), dict(p=1)])),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', save_last=True)),
        model=dict(head=dict(fc_out_channels=8, num_classes=3))))


@pytest.mark.parametrize('key, message', [
    ('train_cfg.max_epoch', "train_cfg has no key 'max_epoch'; did you mean train_cfg.max_epochs?"),
    ('train_cfg.maxepochs', 'did you mean train_cfg.max_epochs?'),
    ('model.head.num_clases', 'did you mean model.head.num_classes?'),
    ('trian_cfg.max_epochs', 'did you mean train_cfg?'),
    ('data_rot', 'the config has no key \'data_rot\', and MMEngine reads none of that name; did '
     'you mean data_root?'),
    ('vall_dataloader.batch_size', 'did you mean val_dataloader?'),
    ('colour', "MMEngine reads none of that name (+colour=1 adds it)"),
    ('train_dataloader.dataset.pipeline.2.p', "pipeline is a list, and '2' is not in it; allowed "
     'is an index from 0 to 1'),
    ('train_dataloader.dataset.pipeline.².p', "and '²' is not in it"),
    ('train_dataloader.dataset.pipeline.p', "and 'p' is not in it"),
    ('train_cfg.max_epochs.x', 'train_cfg.max_epochs is 1, which has no keys'),
    ('val_cfg.fp16', 'val_cfg is None, which has no keys'),
    ('randomness.sede', "unknown key 'sede' (value 1); did you mean 'seed'?"),
])
def test_a_key_that_is_no_key_is_refused(key, message):
    with pytest.raises(ConfigError) as error:
        merge_options(config(), {key: 1})
    assert message in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize('key', [
    'train_dataloader.persistent_workers', 'train_dataloader.prefetch_factor', 'compile',
    'train_cfg.max_iters', 'custom_hooks', 'randomness.numerics.num_threads', 'seed', 'tta_model',
    'default_hooks.checkpoint.save_best', 'default_hooks.early_stopping.patience',
    'model.head.conv_out_channels', 'model.head._delete_', 'optim_wrapper.clip_grad.max_norm',
    'train_dataloader.dataset.pipeline.1.q', 'train_dataloader.dataset.indices'])
def test_a_key_that_the_config_leaves_out_may_be_added(key):
    cfg = config()
    merge_options(cfg, {key: 1})
    if not key.endswith('_'):
        assert cfg != config()


def test_the_mark_adds_a_key_whatever_it_resembles():
    cfg = config()
    merge_options(cfg, {'+train_cfg.max_epoch': 3, '+colour': 'red'})
    assert cfg.train_cfg == dict(max_epochs=1, max_epoch=3) and cfg.colour == 'red'
    assert without_mark({'+a.b': 1, 'c': 2}) == {'a.b': 1, 'c': 2}


@pytest.mark.parametrize('text, base, message', [
    ('a = 1\nb = (\n', '', "a.py, line 2: '(' was never closed"),
    ('a = 1\nb = c\n', '', "a.py, line 2: NameError: name 'c' is not defined"),
    ("_base_ = 'no.py'\n", '', 'no.py: FileNotFoundError: '),
    ("custom_imports = dict(imports=['no_such_module_x'], allow_failed_imports=False)\n", '',
     "a.py: ModuleNotFoundError: No module named 'no_such_module_x' (its folder must be on "
     'PYTHONPATH)'),
    ("_base_ = './base.py'\n", 'x = y\n', "base.py, line 1: NameError: name 'y'"),
    ("_base_ = './base.py'\n", 'x = )\n', './base.py, line 1: unmatched'),
])
def test_a_config_that_cannot_be_read(tmp_path, text, base, message):
    (tmp_path / 'base.py').write_text(base)
    (tmp_path / 'a.py').write_text(text)
    with pytest.raises(ConfigError) as error:
        read_config(str(tmp_path / 'a.py'))
    assert str(error.value).startswith(f'{tmp_path}/{message}')
    assert '\n' not in str(error.value)


def test_no_warning_of_a_library_stands_above_a_config(tmp_path):
    (tmp_path / 'a.py').write_text("_base_ = 'mmdet::_base_/schedules/schedule_1x.py'\n")
    code = f"from mmrepro.runs.config_files import read_config; read_config('{tmp_path}/a.py')"
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True,
                          env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert done.stderr == ''


def test_sizes_keep_their_proportions_and_are_multiples():
    loader = ConfigDict(batch_size=8, dataset=dict(pipeline=[
        dict(type='Resize', scale=(1333, 800)), dict(type='Other', scale=(0.1, 2.0)),
        dict(type='RandomChoiceResize', scales=[(480, 1333), (512, 1333)]),
        dict(type='Mosaic', img_scale=(640, 640)), dict(type='Pad', size_divisor=32)]))
    cfg = Config(dict(train_dataloader=loader, load_from='http://x', model=dict(
        backbone=dict(init_cfg=dict(type='Pretrained', checkpoint='torchvision://resnet50'),
                      scale=(999, 999)),
        data_preprocessor=dict(batch_augments=[dict(random_size_range=(480, 800))]))))
    assert config_edits.shrink(cfg) == 1333
    resize, ratio, choice, mosaic, _ = cfg.train_dataloader.dataset.pipeline
    assert resize.scale == (256, 160) and ratio.scale == (0.1, 2.0)
    assert [tuple(size) for size in choice.scales] == [(96, 256), (96, 256)]
    assert mosaic.img_scale == (128, 128) and cfg.train_dataloader.batch_size == 2
    assert cfg.model.data_preprocessor.batch_augments[0].random_size_range == (96, 160)
    assert cfg.model.backbone.init_cfg is None and cfg.model.backbone.scale == (999, 999)
    assert cfg.load_from is None


def test_no_pretrained_weights_are_read_however_a_config_names_them():
    drawn = dict(type='Kaiming', layer='Conv2d')
    cfg = Config(dict(train_dataloader={}, model=dict(
        backbone=dict(init_cfg=dict(type=PretrainedInit, checkpoint='torchvision://resnet50')),
        neck=dict(init_cfg=[drawn, dict(type='mmengine.Pretrained', checkpoint='neck.pth')]),
        head=dict(init_cfg=drawn), teacher_ckpt='teacher.pth', timm=dict(pretrained=True),
        rfp_backbone=dict(pretrained='torchvision://resnet50'))))
    config_edits.shrink(cfg)
    assert cfg.model.backbone.init_cfg is None and cfg.model.teacher_ckpt is None
    assert cfg.model.timm.pretrained is False and cfg.model.rfp_backbone.pretrained is None
    assert cfg.model.neck.init_cfg == [drawn] and cfg.model.head.init_cfg == drawn


def test_weights_on_this_disk_stay(tmp_path):
    path = str(tmp_path / 'weights.pth')
    (tmp_path / 'weights.pth').touch()
    start = dict(type='Pretrained', checkpoint=path)
    cfg = Config(dict(train_dataloader={}, load_from=path, model=dict(
        backbone=dict(init_cfg=start), teacher_ckpt=path)))
    config_edits.shrink(cfg)
    assert cfg.load_from == cfg.model.teacher_ckpt == path
    assert cfg.model.backbone.init_cfg == start


@DATASETS.register_module(force=True)
class WholeDataset:
    """Has no argument ``indices``, as datasets that are not derived from MMEngine's."""

    def __init__(self, size=8):
        self.size = size


def test_datasets_that_cannot_be_cut_stay_whole_and_are_named():
    cfg = Config(dict(train_dataloader=dict(dataset=dict(type='ConcatDataset', datasets=[
        dict(type='WholeDataset'), dict(type='CocoDataset'), dict(type='BaseDataset')]))))
    assert config_edits.few_images(cfg, 'train', 3) == ['WholeDataset']
    assert [dataset.get('indices') for dataset in cfg.train_dataloader.dataset.datasets] == [
        None, 3, 3]


@pytest.mark.parametrize('given, added, expected', [
    (None, True, ['mmrepro']), (['mine'], True, ['mine', 'mmrepro']),
    (['mmrepro'], False, ['mmrepro']), ('mine.mmrepro', True, ['mine.mmrepro', 'mmrepro'])])
def test_mmrepro_is_imported_once(given, added, expected):
    imports = given and dict(imports=given, allow_failed_imports=True)
    cfg = Config(dict(custom_imports=imports))
    assert import_mmrepro(cfg) is added
    assert cfg.custom_imports['imports'] == expected
