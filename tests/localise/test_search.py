"""The search: where two runs diverge, what is repeated, what is reported when nothing is found."""
import json
import os
from pathlib import Path

import pytest
from launches import write_steps
from result_text import text_of

from mmrepro.fingerprint.reader import RankLog, RecordedRun
from mmrepro.fingerprint.records import Record, write_records
from mmrepro.localise.compared_runs import RunSpec
from mmrepro.localise.search import Localiser, first_iteration, positions_of


def run_of(*losses, positions=(0, 1), ranks=(0,), notes=()):
    steps = {i: dict(kind='step', iteration=i, batch=dict(data='d', positions=list(positions)),
                     losses=dict(loss=loss), lr={}, gradients='', parameters='', buffers='',
                     optimizer='') for i, loss in enumerate(losses)}
    logs = {rank: RankLog('', [], steps, [], True, []) for rank in ranks}
    return RecordedRun('somewhere', [], logs, list(notes))


def test_positions_of_both_runs_are_recorded_and_none_when_one_run_does_not_know_them():
    runs = run_of('1', positions=(0, 1)), run_of('1', positions=(1, 2))
    assert positions_of(*runs, 0) == (0, 1, 2)
    runs[1].ranks[0].steps[0]['batch'].pop('positions')
    assert positions_of(*runs, 0) is None


def test_equal_runs_and_runs_that_cannot_be_compared():
    assert first_iteration(run_of('1', '2'), run_of('1')) == (1, None)
    with pytest.raises(ValueError, match='no iteration in common'):
        first_iteration(run_of(), run_of('1'))
    with pytest.raises(ValueError, match=r'ranks \[0\], somewhere has ranks \[0, 1\]'):
        first_iteration(run_of('1'), run_of('1', ranks=(0, 1)))


class Scripted:
    """Replaces the processes: writes the fingerprints and records that a test gives."""

    def __init__(self, losses, records):
        self.losses, self.records, self.plans = losses, records, []

    def __call__(self, spec, folder, plan):
        self.plans.append((spec.name, plan))
        steps = run_of(*self.losses[spec.name].pop(0)).ranks[0].steps
        write_steps(folder, list(steps.values())[:plan.stop + 1])
        if plan.record is not None:
            Path(folder, 'batch.rank0.json').write_text('null')
            record = Record('forward', 'fc', 'aten.mm.default', inputs=('1',),
                            outputs=(self.records[spec.name].pop(0),))
            write_records(os.path.join(folder, 'operators.rank0.jsonl'), [record])


def scripted(tmp_path, losses, records):
    launch = Scripted(losses, records)
    specs = RunSpec('A', 'a.py'), RunSpec('B', 'b.py')
    return launch, Localiser(specs, str(tmp_path), launch).search(3, values=False)


def test_equal_runs_run_once(tmp_path):
    launch, result = scripted(tmp_path, dict(A=['123'], B=['123']), {})
    assert result.verdict == 'equal' and len(launch.plans) == 2
    assert text_of(result).splitlines()[0] == 'SAME BITS: 3 iterations agree'


def test_runs_that_differ_in_a_validation_only_are_not_called_equal(tmp_path):
    runs = [run_of('1', '2') for _ in 'ab']
    for run, metric in zip(runs, ((0.5).hex(), (0.25).hex())):
        run.ranks[0].vals.append(dict(iteration=2, metrics={'coco/bbox_mAP': metric}))
    specs = RunSpec('A', 'a.py'), RunSpec('B', 'b.py')
    result = Localiser(specs, str(tmp_path), None).explain(*runs)
    assert result.verdict == 'metrics'
    assert text_of(result).splitlines()[0] == (
        'DIFFERENT BITS: 2 iterations of training agree, and iteration 2, metric coco/bbox_mAP of '
        'the validation: 0.5 (0x1.0000000000000p-1) and 0.25 (0x1.0000000000000p-2)')
    assert result.as_dict()['divergence']['iteration'] == 2


def test_a_difference_is_recorded_where_it_is(tmp_path):
    launch, result = scripted(tmp_path, dict(A=['123', '123'], B=['129', '129']),
                               dict(A=['2'], B=['3']))
    assert result.verdict == 'found' and result.diagnosis.operator == 'aten.mm.default'
    assert [(name, plan.stop, plan.record) for name, plan in launch.plans[2:]] == [
        ('A', 2, 2), ('B', 2, 2)]
    assert text_of(result).splitlines()[0] == (
        'DIFFERENT BITS: the runs first differ at iteration 2, in losses')
    found = json.loads(json.dumps(result.as_dict()))
    assert found['divergence'] == dict(iteration=2, positions=[0, 1], fields={'0': ['losses']})
    assert found['finding']['cause'] == 'operator' and found['finding']['fix']


def test_a_difference_that_is_not_reproduced_is_not_invented(tmp_path):
    launch, result = scripted(tmp_path, dict(A=['123'] * 3, B=['193', '123', '123']),
                               dict(A=['2', '2'], B=['2', '2']))
    assert result.verdict == 'flaky' and result.diagnosis is None
    assert len(launch.plans) == 2 + 2 * 2  # at most two more runs of A and of B
    assert 'NOT REPRODUCED' in text_of(result) and 'intermittent' in text_of(result)
    unequal = text_of(result._replace(unequal=('GAIN is 1 in A, 2 in B', )))
    assert 'GAIN is 1 in A' in unequal and 'race' not in unequal and 'hardware' not in unequal


def test_an_earlier_difference_in_the_repetition_is_followed(tmp_path):
    launch, result = scripted(tmp_path, dict(A=['123'] * 3, B=['129', '199', '199']),
                               dict(A=['2', '2'], B=['2', '3']))
    assert result.verdict == 'found' and result.diagnosis.iteration == 1
    assert 'the cause is intermittent' in text_of(result)
    assert launch.plans[-1][1].record == 1
