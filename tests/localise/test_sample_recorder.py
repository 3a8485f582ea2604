"""Transforms are recorded, the choice of partners included."""
import pickle
import random

import pytest
import torch
from mmcv.transforms.utils import cache_randomness

from mmrepro.localise.sample_recorder import SampleRecorder, read_samples


class Mixing:
    """As MMDetection's Mosaic: the dataset asks it for partners, then calls it."""
    partners = random.Random()

    def __init__(self):
        self.own = random.Random(1)

    @cache_randomness
    def get_indexes(self, dataset):
        return [self.own.randint(0, len(dataset) - 1) for _ in range(3)]

    def __call__(self, results):
        return results


class Mixed(torch.utils.data.Dataset):
    def __init__(self):
        self.pipeline = [Mixing()]

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        mixing = self.pipeline[0]
        return mixing(dict(partners=mixing.get_indexes(self)))


@pytest.mark.parametrize('travels', [False, True])
def test_the_indexes_of_partners_are_recorded(tmp_path, travels):
    dataset = Mixed()
    SampleRecorder(str(tmp_path), 0, None).instrument(dataset)
    if travels:
        dataset = pickle.loads(pickle.dumps(dataset))
    found = dataset[7]
    indexes, mixed = read_samples(str(tmp_path), 0)[1:3]
    assert (indexes.name, mixed.name) == ('Mixing.get_indexes', 'Mixing')
    assert indexes.outputs == (str(found['partners']), )
    assert [text.split('=')[0] for text in indexes.own] == ['partners', 'own']
    assert indexes.stack[0][2] == 'Mixing.get_indexes' and indexes.stack[0][1] < mixed.stack[0][1]
