"""Changes of configs; a training that is made small keeps its code path."""
import pytest
from mmengine.config import Config, ConfigDict
from mmengine.model import PretrainedInit
from mmengine.registry import DATASETS

from mmrepro.runs import reduction
from mmrepro.runs.config_edits import import_mmrepro


def test_sizes_keep_their_proportions_and_are_multiples():
    loader = ConfigDict(batch_size=8, dataset=dict(pipeline=[
        dict(type='Resize', scale=(1333, 800)), dict(type='Other', scale=(0.1, 2.0)),
        dict(type='RandomChoiceResize', scales=[(480, 1333), (512, 1333)]),
        dict(type='Mosaic', img_scale=(640, 640)), dict(type='Pad', size_divisor=32)]))
    cfg = Config(dict(train_dataloader=loader, load_from='http://x', model=dict(
        backbone=dict(init_cfg=dict(type='Pretrained', checkpoint='torchvision://resnet50'),
                      scale=(999, 999)),
        data_preprocessor=dict(batch_augments=[dict(random_size_range=(480, 800))]))))
    assert reduction.shrink(cfg) == 1333
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
        head=dict(init_cfg=drawn))))
    reduction.shrink(cfg)
    assert cfg.model.backbone.init_cfg is None
    assert cfg.model.neck.init_cfg == [drawn] and cfg.model.head.init_cfg == drawn


@DATASETS.register_module(force=True)
class WholeDataset:
    """Has no argument ``indices``, as datasets that are not derived from MMEngine's."""

    def __init__(self, size=8):
        self.size = size


def test_datasets_that_cannot_be_cut_stay_whole_and_are_named():
    cfg = Config(dict(train_dataloader=dict(dataset=dict(type='ConcatDataset', datasets=[
        dict(type='WholeDataset'), dict(type='CocoDataset'), dict(type='BaseDataset')]))))
    assert reduction.few_images(cfg, 'train', 3) == ['WholeDataset']
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
