"""What cannot be loaded is named in one line: dataset, index, file and transform."""
import json

import cv2
import numpy as np
import pytest
from mmdet.registry import TRANSFORMS
from mmengine.dataset import BaseDataset, DefaultSampler
from mmengine.registry import DATA_SAMPLERS, DATASETS
from mmengine.runner import Runner
from small_runs import config

import mmrepro.errors
from mmrepro.errors import DatasetError, SampleError

CATEGORIES = [dict(id=1, name='cat'), dict(id=2, name='cup')]


@TRANSFORMS.register_module(force=True)
class Divides:
    def __call__(self, results):
        return 1 // 0


@DATASETS.register_module(force=True)
class Broken(BaseDataset):
    def load_data_list(self):
        return dict()['points']


def coco(folder, **content):
    images = [dict(id=i, file_name=f'{i}.png', width=8, height=8) for i in (1, 2)]
    boxes = [dict(id=i, image_id=i, category_id=1, bbox=[0, 0, 4, 4], area=16, iscrowd=0,
                  segmentation=[]) for i in (1, 2)]
    (folder / 'ann.json').write_text(json.dumps(dict(dict(
        images=images, annotations=boxes, categories=CATEGORIES), **content)))
    for one in images:
        cv2.imwrite(str(folder / one['file_name']), np.zeros((8, 8, 3), np.uint8))


def runner(folder, *pipeline, workers=0, classes=('cat', 'cup'), kind='mmdet.CocoDataset'):
    cfg = config(folder)
    cfg.train_dataloader.update(num_workers=workers, dataset=dict(
        type=kind, data_root=str(folder), ann_file='ann.json', data_prefix=dict(img=''),
        metainfo=dict(classes=classes),
        pipeline=[dict(type=f'mmdet.{name}' if isinstance(name, str) else name)
                  for name in pipeline]))
    return Runner.from_cfg(cfg)



@pytest.mark.parametrize('workers', [0, 1])
def test_a_truncated_image_is_named_with_dataset_index_and_transform(workers, tmp_path):
    coco(tmp_path)
    for number in (1, 2):
        path = tmp_path / f'{number}.png'
        path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(SampleError, match=(
            rf'^sample [01] of CocoDataset cannot be loaded: LoadImageFromFile raised '
            rf'AssertionError: failed to load image: {tmp_path}/[12].png \(loading.py, line')
            ) as error:
        runner(tmp_path, 'LoadImageFromFile', workers=workers).train()
    assert '\n' not in str(error.value)
    assert 'failed to load image' in str(error.value.__cause__)
    assert isinstance(error.value.__cause__, RuntimeError if workers else AssertionError)


@pytest.mark.parametrize('worker_seed', ['sample', 'worker'])
def test_a_transform_of_the_user_is_named_with_its_line(worker_seed, tmp_path):
    coco(tmp_path)
    cfg = runner(tmp_path, 'LoadImageFromFile', 'Divides').cfg
    cfg.randomness.worker_seed = worker_seed
    with pytest.raises(SampleError, match=(
            rf'Divides raised ZeroDivisionError: .*\(file {tmp_path}/[12].png; {__file__}, line')):
        Runner.from_cfg(cfg).train()


def test_an_empty_segmentation_is_said(tmp_path):
    coco(tmp_path)
    cfg = runner(tmp_path, 'LoadImageFromFile', 'LoadAnnotations').cfg
    cfg.train_dataloader.dataset.pipeline[1].with_mask = True
    with pytest.raises(SampleError, match="KeyError: 'mask' .*has no segmentation, or an empty"):
        Runner.from_cfg(cfg).train()


@pytest.mark.parametrize('content, says', [
    (dict(images=[], annotations=[]), r'has no sample: the file lists none, or filter_cfg'),
    ('<html>', 'cannot be loaded: JSONDecodeError: Expecting value'),
    (dict(annotations=[dict(id=1, image_id=i, category_id=1, bbox=[0, 0, 4, 4], area=16,
                            iscrowd=0) for i in (1, 2)]),
     'cannot be loaded: AssertionError: Annotation ids in .* are not unique!')])
def test_a_dataset_that_cannot_be_built_names_loader_and_file(content, says, tmp_path):
    coco(tmp_path, **(content if isinstance(content, dict) else {}))
    if isinstance(content, str):
        (tmp_path / 'ann.json').write_text(content)
    with pytest.raises(DatasetError, match=(
            rf'^train_dataloader: CocoDataset \({tmp_path}/ann.json\) {says}')) as error:
        runner(tmp_path).train()
    assert error.value.__cause__ is not None and '\n' not in str(error.value)


def test_an_error_of_the_users_dataset_has_its_line(tmp_path):
    coco(tmp_path)
    with pytest.raises(DatasetError, match=rf"Broken .*KeyError: 'points' \({__file__}, line"):
        runner(tmp_path, kind='Broken').train()


def test_classes_that_no_annotation_has_are_said(tmp_path):
    coco(tmp_path)
    with pytest.raises(DatasetError, match='no sample: 2 of 2 classes in metainfo are not among '
                       'the categories of its annotations: dog, cow; these have cat, cup'):
        cfg = runner(tmp_path, classes=('dog', 'cow')).cfg
        cfg.train_dataloader.dataset.filter_cfg = dict(filter_empty_gt=True)
        Runner.from_cfg(cfg).train()


@TRANSFORMS.register_module(force=True)
class Refuses:
    def __call__(self, results):
        return None


def test_a_transform_that_refuses_every_sample_is_named(tmp_path):
    coco(tmp_path)
    with pytest.raises(SampleError, match=r'Cannot find valid image .*\(Refuses returned None; '):
        runner(tmp_path, 'LoadImageFromFile', 'Refuses').train()


def test_an_empty_image_is_said(tmp_path):
    coco(tmp_path)
    for number in (1, 2):
        (tmp_path / f'{number}.png').write_bytes(b'')
    with pytest.raises(SampleError, match='png; the file is empty; '):
        runner(tmp_path, 'LoadImageFromFile').train()


def test_a_wrong_box_is_named_by_its_annotation(tmp_path):
    coco(tmp_path, annotations=[dict(
        id=17, image_id=1, category_id=1, bbox=[0, 0, 4], area=16, iscrowd=0)])
    with pytest.raises(DatasetError, match='cannot be loaded: annotation 17 of image 1: ValueErr'):
        runner(tmp_path).train()


def test_annotations_of_no_category_are_said(tmp_path):
    coco(tmp_path, annotations=[dict(
        id=1, image_id=1, category_id=99, bbox=[0, 0, 4, 4], area=16, iscrowd=0)])
    text = '1 annotation with a category_id that no category has: 99'
    assert said(tmp_path) == [f'train_dataloader: {text}']
    cfg = runner(tmp_path).cfg
    cfg.train_dataloader.dataset.filter_cfg = dict(filter_empty_gt=True)
    with pytest.raises(DatasetError, match=f'has no sample: {text}'):
        Runner.from_cfg(cfg).train()


def test_a_setting_of_the_loader_is_no_fault_of_the_dataset(tmp_path):
    coco(tmp_path)
    cfg = runner(tmp_path).cfg
    cfg.train_dataloader.batch_size = 0
    with pytest.raises(DatasetError, match='^train_dataloader cannot be built: .*batch_size=0'):
        Runner.from_cfg(cfg).train()


@DATA_SAMPLERS.register_module(force=True)
class TakesNoSettings(DefaultSampler):
    def __init__(self, dataset):
        super().__init__(dataset)


@pytest.mark.parametrize('setting, text', [
    (dict(sampler=dict(type='TakesNoSettings', shuffle=True)), "argument 'shuffle'"),
    (dict(sampler=dict(type='TakesNoSettings', seed=1)), 'TypeError'),
    (dict(collate_fn=dict(type='NotRegistered')), 'callable'),
    (dict(batch_sampler=dict(type='mmdet.AspectRatioBatchSampler', drop=1)), "argument 'drop'")])
def test_another_part_of_the_loader_is_no_fault_of_the_dataset(setting, text, tmp_path):
    coco(tmp_path)
    cfg = runner(tmp_path).cfg
    cfg.train_dataloader.update(setting)
    with pytest.raises(DatasetError, match=f'^train_dataloader cannot be built: .*{text}'):
        Runner.from_cfg(cfg).train()


def said(folder, **changes):
    texts = []
    one = runner(folder, 'LoadImageFromFile', **changes)
    one.logger.warning = lambda text, *rest: texts.append(text)
    one.build_dataloader(one.cfg.train_dataloader)
    return [text for text in texts if text.startswith('train_dataloader')]


def test_what_stock_code_passes_over_is_a_warning(tmp_path):
    coco(tmp_path)
    assert said(tmp_path) == []
    assert 'CocoDataset: 1 of 2 classes in metainfo are not' in ''.join(
        said(tmp_path, classes=('cat', 'cups')))
    coco(tmp_path, images=[dict(id=1, file_name=f'{i}.png', width=8, height=8) for i in (1, 2)],
         annotations=[])
    assert said(tmp_path) == [
        'train_dataloader: images with the same id (1): of each, the last is used only']


def test_errors_of_workers_keep_their_message():
    text = ('Caught SampleError in DataLoader worker process 0.\nOriginal Traceback (most recent '
            'call last):\n  x\nmmrepro.errors.SampleError: sample 3\n')
    assert str(mmrepro.errors.SampleError(text)) == 'sample 3'
    assert str(mmrepro.errors.SampleError('sample 3')) == 'sample 3'
