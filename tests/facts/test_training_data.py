"""A resume trains on the same data: annotations and images count, not where they lie."""
import copy
import json
import shutil
import time

import pytest
import torch
from mmengine.dataset import BaseDataset
from mmengine.registry import DATA_SAMPLERS, DATASETS
from mmengine.runner import Runner
from small_runs import continued, finish, small_run, warnings_of, weights_of

from mmrepro.errors import ResumeError
from mmrepro.facts import training_data
from mmrepro.facts.training_data import sampled_files, training_facts


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


@DATASETS.register_module(force=True)
class WithoutLength(torch.utils.data.Dataset):
    """Only its sampler knows how many samples there are, which PyTorch allows."""
    metainfo = {}

    def __getitem__(self, i):
        return dict(x=torch.tensor([i, 1.]) + torch.rand(2))


@DATA_SAMPLERS.register_module(force=True)
class EightSamples(torch.utils.data.Sampler):
    def __init__(self, dataset, seed=None):
        pass

    def __iter__(self):
        return iter(torch.randperm(8).tolist())

    def __len__(self):
        return 8


def test_a_dataset_need_not_know_its_length(tmp_path):
    changes = dict(train_dataloader=dict(
        batch_size=1, dataset=dict(type='WithoutLength'),
        sampler=dict(_delete_=True, type='EightSamples')),
        custom_hooks=[dict(type='FingerprintHook')])
    expected = finish(small_run(tmp_path, **copy.deepcopy(changes)))
    assert finish(continued(tmp_path, 5, **changes)) == expected


def test_the_order_of_the_images_counts(tmp_path):
    def facts(*names):
        dataset = Annotated(ann_file='', lazy_init=True)
        dataset.data_list, dataset._fully_initialized = [dict(img_path=n) for n in names], True
        dataset.serialize_data = False
        return training_facts(dataset)

    assert facts('a/1', 'a/2') == facts('b/1', 'b/2') != facts('b/2', 'b/1')
    assert facts('a/1')['train_samples'] == 1


class WithLists(torch.utils.data.Dataset):
    """What users write without MMEngine: the paths are in an attribute."""

    def __init__(self, folder):
        self.samples = [(str(path), 0) for path in sorted((folder / 'images').iterdir())]

    def __len__(self):
        return len(self.samples)


def annotated(folder):
    dataset = Annotated(ann_file='', lazy_init=True)
    dataset.data_list, dataset._fully_initialized = [
        dict(img_path=str(path), nested=dict(seg_map_path=str(path).replace('images', 'maps')))
        for path in sorted((folder / 'images').iterdir())], True
    dataset.serialize_data = False
    return dataset


@pytest.fixture
def folder(tmp_path):
    for kind in ('images', 'maps'):
        (tmp_path / 'a' / kind).mkdir(parents=True)
        for number in range(24):
            (tmp_path / 'a' / kind / f'{number:02}.jpg').write_bytes(bytes([number]) * 100)
    return tmp_path / 'a'


FILES = {'another size': ('images/07.jpg', b'x'), 'another content': ('images/07.jpg', b'x' * 100),
         'a map of segments': ('maps/07.jpg', b'x')}


@pytest.mark.parametrize('make', [annotated, WithLists])
@pytest.mark.parametrize('what', FILES)
def test_files_of_the_same_names_count_by_their_content(what, make, folder, tmp_path):
    name, content = FILES[what]
    copy = shutil.copytree(folder, tmp_path / 'elsewhere' / 'b')
    then = training_facts(make(folder))
    assert training_facts(make(copy)) == then and then['train_files']
    (copy / name).write_bytes(content)
    if make is annotated or name.startswith('images'):
        assert training_facts(make(copy))['train_files'] != then['train_files']
        a, b = (set(sampled_files(make(root)).items()) for root in (folder, copy))
        assert len(a ^ b) == 2 and all(text.endswith('07.jpg') for text, _ in a ^ b)


def test_of_many_files_a_sample_is_read_the_same_in_every_run(folder, monkeypatch):
    monkeypatch.setattr(training_data, 'SAMPLED', 10)
    monkeypatch.setattr(training_data, 'READ', 3)
    monkeypatch.setattr(training_data, 'READ_BYTES', 0)
    found = sampled_files(annotated(folder))
    assert len(found) == 20 and found == sampled_files(annotated(folder))
    assert sum('SHA-256' in text for text in found.values()) == 3
    assert len(training_data.sample_of(5)) == 5 and len(set(training_data.sample_of(10**9))) == 10


def test_a_resume_with_another_image_of_the_same_name_is_refused(tmp_path):
    root = write(tmp_path / 'data')
    images = tmp_path / 'data' / 'images'
    images.mkdir()
    for number in range(8):
        (images / f'{number}.jpg').write_bytes(b'1')
    finish(run(tmp_path / 'run', root))
    point = tmp_path / 'run' / 'iter_3.pth'
    finish(run(tmp_path / 'again', root, point))
    (images / '5.jpg').write_bytes(b'2')
    with pytest.raises(ResumeError, match='train_files.*other sizes or contents'):
        Runner.from_cfg(run(tmp_path / 'run2', root, point)).train()


@DATASETS.register_module(force=True)
class OpensItsFileLate(Annotated):
    """Values are in a file, which each worker shall open for itself."""

    file = None

    def get_data_info(self, idx):
        if self.file is None:
            self.file = open(f'{self.data_root}/values', 'rb', buffering=0)
        self.file.seek(idx)
        time.sleep(.001)  # as long as it takes to read a real file
        return dict(super().get_data_info(idx), value=float(self.file.read(1)[0]))


def test_workers_open_files_for_themselves(tmp_path):
    """A file that was open before they were forked would have one position for all of them."""
    root = write(tmp_path / 'data')
    (tmp_path / 'data' / 'values').write_bytes(bytes(range(8)))
    weights = []
    for workers in (0, 2):
        cfg = run(tmp_path / str(workers), root)
        cfg.train_dataloader.dataset.type = 'OpensItsFileLate'
        cfg.train_dataloader.num_workers = workers
        runner = Runner.from_cfg(cfg)
        weights.append(weights_of(runner))
        opened = runner.train_dataloader.dataset.file
        assert opened is None or not workers, 'not in this process'
    assert weights[0] == weights[1]
