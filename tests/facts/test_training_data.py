"""A resume trains on the same data: annotations and images count, not where they lie."""
import json
import shutil

import pytest
import torch
from mmengine.dataset import BaseDataset
from mmengine.registry import DATASETS
from mmengine.runner import Runner
from small_runs import finish, small_run, warnings_of, weights_of

from mmrepro.errors import ResumeError
from mmrepro.facts.training_data import training_facts


@DATASETS.register_module(force=True)
class Annotated(BaseDataset):
    """Eight points, as MMEngine's own format of annotations."""

    def __getitem__(self, i):
        info = self.get_data_info(i)
        return dict(x=torch.tensor([info['value'], 1.]) + torch.rand(2))


def write(folder, values=range(8), suffix='jpg'):
    (folder / 'annotations').mkdir(parents=True, exist_ok=True)
    (folder / 'annotations' / 'train.json').write_text(json.dumps(dict(
        metainfo={}, data_list=[dict(img_path=f'{i}.{suffix}', value=float(value))
                                for i, value in enumerate(values)])))
    return str(folder)


def run(work_dir, root, point=None, **dataset):
    cfg = small_run(work_dir)
    cfg.train_dataloader.dataset = dict(
        type='Annotated', data_root=root, ann_file='annotations/train.json',
        data_prefix=dict(img_path='images'), **dataset)
    cfg.resume, cfg.load_from = point is not None, point and str(point)
    return cfg


@pytest.fixture(scope='module')
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp('base')
    root = write(folder / 'data')
    return folder, root, finish(run(folder / 'run', root))


OTHER = {'annotations': dict(values=[0, 1, 2, 3, 4, 5, 6, 9]), 'images': dict(suffix='png')}


@pytest.mark.parametrize('what', OTHER)
def test_other_data_of_the_same_size_are_refused(what, base, tmp_path):
    root = write(tmp_path / 'data', **OTHER[what])
    with pytest.raises(ResumeError, match=f'train_{what}.*the training data are not the same'):
        Runner.from_cfg(run(tmp_path / 'run', root, base[0] / 'run' / 'iter_3.pth')).train()


@pytest.mark.parametrize('how', ['data_root', 'absolute paths'])
def test_data_that_have_moved_are_the_same(how, base, tmp_path):
    folder, root, expected = base
    moved = shutil.copytree(root, tmp_path / 'elsewhere' / 'data')
    cfg = run(tmp_path / 'run', str(moved), folder / 'run' / 'iter_3.pth')
    if how == 'absolute paths':
        cfg.train_dataloader.dataset.update(
            data_root='', ann_file=str(moved / 'annotations' / 'train.json'),
            data_prefix=dict(img_path=str(moved / 'images')))
    runner = Runner.from_cfg(cfg)
    assert not [text for text in warnings_of(runner) if 'train_' in text]
    assert weights_of(runner) == expected


def test_a_checkpoint_without_digests_of_data_resumes(base, tmp_path):
    folder, root, expected = base
    content = torch.load(folder / 'run' / 'iter_3.pth', weights_only=False)
    for name in ('train_annotations', 'train_images'):
        assert len(content['meta']['mmrepro']['facts'].pop(name)) == 16
    torch.save(content, tmp_path / 'old.pth')
    assert finish(run(tmp_path / 'run', root, tmp_path / 'old.pth')) == expected


def test_the_order_of_the_images_counts(tmp_path):
    def facts(*names):
        dataset = Annotated(ann_file='', lazy_init=True)
        dataset.data_list, dataset._fully_initialized = [dict(img_path=n) for n in names], True
        dataset.serialize_data = False
        return training_facts(dataset)

    assert facts('a/1', 'a/2') == facts('b/1', 'b/2') != facts('b/2', 'b/1')
    assert facts('a/1')['train_samples'] == 1
