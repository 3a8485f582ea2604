"""A fault in one virtual rank is named with the rank, whatever the number of processes."""
import pytest
import torch
import torch.distributed as dist
from faults import tiny
from launches import text_of
from test_planted_faults import Forks

from mmrepro.localise.compared_runs import RunSpec, trainings_of
from mmrepro.localise.search import Localiser
from mmrepro.report.comparison import compare_paths as compare

RANKS, RANK, SINCE = 4, 2, 1
SIZE = 32  # samples; an epoch of four iterations on four ranks


def planted_in(owner, name):
    """The function replaces a method in one virtual rank, from the second call there on."""
    def plant(function):
        original, calls = getattr(owner, name), [0]

        def method(*args, **kwargs):
            if dist.get_rank() == RANK:
                calls[0] += 1
                if calls[0] > SINCE * function.per_iteration:
                    return function(original, *args, **kwargs)
            return original(*args, **kwargs)

        setattr(owner, name, method)
    return plant


def in_a_hook(run, moment='after_train_iter'):
    def change(original, self, runner, *args, **kwargs):
        runner.model.module.head.fc.bias.detach().numpy()[0] += 0.5

    change.per_iteration = 1
    planted_in(tiny.QuietHook, moment)(change)


def in_a_hook_before_the_step(run):
    in_a_hook(run, 'before_train_iter')


def in_a_transform(run):
    def brighter(original, self, results):
        results = original(self, results)
        results['img'] = results['img'] * 1.5
        return results

    brighter.per_iteration = 2  # images of a batch
    planted_in(tiny.TinyJitter, 'transform')(brighter)


def in_an_operator(run):
    def rounded(original, self, x):
        return original(self, x + torch.full((), 1e-4))

    rounded.per_iteration = 1
    planted_in(tiny.Head, 'forward')(rounded)


FAULTS = {
    in_a_hook: dict(phase='hook', path='QuietHook.after_train_iter',
                    cause='hook changes the state'),
    in_a_hook_before_the_step: dict(phase='hook', path='QuietHook.before_train_iter',
                                    cause='hook changes the state'),
    in_a_transform: dict(phase='data', operator='TinyJitter', cause='noise in a transform'),
    in_an_operator: dict(phase='forward', path='head', operator='aten.full.default'),
}


class Runs(Forks):
    def __init__(self, plant):
        self.plant = plant

    def __call__(self, spec, folder, plan):
        for job in trainings_of(spec, folder, plan):
            self.run(spec, job, self.plant if spec.name == 'B' else None)


@pytest.fixture
def config(tmp_path):
    cfg = tiny.tiny(tmp_path)
    # the hooks write to weights, which would end a run whose ranks share them
    cfg.randomness.virtual_ranks = dict(ranks=RANKS, memory='separate')
    cfg.train_dataloader.dataset.size = SIZE
    cfg.env_cfg = dict(dist_cfg=dict(backend='gloo'))
    cfg.dump(str(tmp_path / 'config.py'))
    return str(tmp_path / 'config.py')


PROCESSES = {in_a_hook: 1, in_a_hook_before_the_step: 2, in_a_transform: 2, in_an_operator: 1}


def localised(fault, config, folder, processes):
    specs = RunSpec('A', config), RunSpec('B', config, ranks=processes)
    found = Localiser(specs, str(folder), Runs(fault)).search(3, values=False)
    return found, compare(*(str(folder / name / 'fingerprints') for name in 'AB'))


@pytest.mark.parametrize('fault', FAULTS, ids=lambda one: one.__name__)
def test_the_virtual_rank_is_named(fault, config, tmp_path):
    found, comparison = localised(fault, config, tmp_path / 'runs', PROCESSES[fault])
    text = text_of(found)
    assert found.verdict == 'found', text
    expected = dict(FAULTS[fault], rank=RANK, iteration=SINCE)
    assert {name: getattr(found.diagnosis, name) for name in expected} == expected, text
    assert '(rank 2)' in text
    if fault is in_a_transform:  # what differs before ranks exchange anything
        assert 'iteration 1, rank 2: batch.data' in comparison.verdict()
    else:
        assert not comparison.equal


def test_without_a_fault_the_number_of_processes_changes_nothing(config, tmp_path):
    found, comparison = localised(None, config, tmp_path / 'runs', 3)
    assert found.verdict == 'equal' and found.compared == 3, text_of(found)
    assert comparison.equal and comparison.exact
    row, = [row for row in comparison.manifest if row.name == 'processes']
    assert (row.then, row.now, row.severity) == (1, 3, 'harmless')
