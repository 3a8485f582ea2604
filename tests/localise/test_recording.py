"""Recording an iteration changes no bit, and sees the samples of any worker."""
import json
import os
import pickle
import random

import pytest
import torch
from checked_runs import bits
from faults.tiny import tiny
from harness import Child
from mmcv.transforms.utils import cache_randomness
from mmengine.runner import Runner

from mmrepro.fingerprint import operator_recorder
from mmrepro.fingerprint.records import Record, write_records
from mmrepro.localise.recording import SETTINGS, RecordingPlan, attach, diagnose_ranks, read_stream
from mmrepro.localise.sample_recorder import SampleRecorder, read_samples
from mmrepro.runs.stopping import StopTraining


def trained(folder, stop, record, **changes):
    torch.set_num_threads(1)
    cfg = tiny(folder)
    cfg.merge_from_dict(changes)
    runner = Runner.from_cfg(cfg)
    attach(runner, RecordingPlan(str(folder), stop, record))
    with pytest.raises(StopTraining):
        runner.train()
    return bits(runner)


def test_recording_changes_no_bit_of_the_training(tmp_path):
    plain, *recorded = [Child(trained, tmp_path / str(i), 5, record).result()
                        for i, record in enumerate((None, 2, 4))]
    assert all(one == plain for one in recorded)


def test_operators_of_hooks_of_mmrepro_are_left_out(tmp_path):
    """Their digests of the state are no part of the training."""
    Child(trained, tmp_path, 1, 1, custom_hooks=[dict(type='FingerprintHook')]).result()
    operators = [record for record in read_stream(str(tmp_path), 0)
                 if record.name.startswith('aten.')]
    assert operators and not any(
        file.startswith(operator_recorder.NOT_TRAINING)
        for record in operators for file, *_ in record.stack)
    folders = [part for part in operator_recorder.SKIPPED
               if part.startswith(operator_recorder.PACKAGE)]
    assert all(map(os.path.isdir, [operator_recorder.NOT_TRAINING, *folders]))


@pytest.mark.parametrize('start_method', ['fork', pytest.param('spawn', marks=pytest.mark.nightly)])
def test_samples_are_recorded_in_worker_processes(tmp_path, start_method):
    samples = []
    for workers in (0, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        Child(trained, folder, 1, 1, **SETTINGS, **{'train_dataloader': dict(
            num_workers=workers, **(dict(multiprocessing_context=start_method) if workers else {}))
        }).result()
        samples.append([record._replace(stack=()) for record in read_stream(str(folder), 0)
                        if record.path.startswith('sample ')])
    assert [record.name for record in samples[0][:6]] == [
        'TinyData', 'TinyLoad', 'TinyFlip', 'TinyJitter', 'TinyPack', 'TinyData']
    assert samples[0] == samples[1] and len(samples[0]) == 12


def test_a_sample_that_one_run_rejected_is_compared(tmp_path):
    for run, positions, samples in (('a', [[0, 1], [0, 2]], 4), ('b', [[0, 0], [0, 2]], 3)):
        folder = tmp_path / run
        folder.mkdir()
        (folder / 'batch.rank0.json').write_text(json.dumps(positions))
        write_records(str(folder / 'samples.rank0.1.jsonl'), [
            Record('data', f'sample 0.{i}/0', 'Load', inputs=(f'{run}{i}',), outputs=('x',))
            for i in range(samples)])
        write_records(str(folder / 'operators.rank0.jsonl'), [])
    paths = [record.path for record in read_stream(str(tmp_path / 'a'), 0, str(tmp_path / 'b'))]
    assert paths == ['sample 0.0/0', 'sample 0.1/0', 'sample 0.2/0']
    found = diagnose_ranks(0, str(tmp_path / 'a'), str(tmp_path / 'b'), [0])
    assert (found.path, found.kind) == ('sample 0.0/0', 'input')


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
