"""What differs first: one order of causes, and every verb names the same difference."""
import itertools
import os
import tempfile

import pytest
from fake_runs import changed
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import write_steps

from mmrepro.fingerprint import divergence
from mmrepro.fingerprint.divergence import (
    compare_logs,
    compare_steps,
    first_differing_metric,
    first_divergence,
)
from mmrepro.fingerprint.reader import RankLog, read_run
from mmrepro.fingerprint.schema import FIELDS, STREAMS, value_of
from mmrepro.localise.search import first_iteration
from mmrepro.report.comparison import compare_paths as compare
from mmrepro.verbs.variations import Variation, result_of

RECORD = dict(
    kind='step', iteration=0, epoch=0, batch=dict(positions=[0, 1], indices=[4, 2], data='d'),
    losses=dict(loss='0x1p+0', loss_cls='0x1p-1'), lr=dict(lr=['0x1p-4']), gradients='g',
    parameters='p', buffers='b', optimizer='o', averages='v',
    modules=[['conv', 'forward', 0, '1', '2'], ['conv', 'backward', 0, '3', '4']],
    operators=[['forward', 'conv', 'aten.x', 0, '1', '2', 's'],
               ['backward', 'conv', 'aten.y', 0, '1', '2', 's'],
               ['optimizer', '', 'aten.z', 0, '1', '2', 's']],
    by_name=dict(gradients=dict(w='1', v='2'), averages=dict(w='1', v='2'), parameters={}))


def differing(a, b):
    return [one for one in compare_steps(a, b) if not one.same]


def log(steps, level='step'):
    return RankLog('', [dict(level=level)], steps, [], True, [])


# what is planted, from cause to effect: where, the field, and what of it is named
CAUSES = [
    (('epoch', ), 'epoch', 'epoch'), (('batch', 'positions'), 'batch.positions', 'batch.positions'),
    (('batch', 'indices'), 'batch.indices', 'batch.indices'),
    (('batch', 'data'), 'batch.data', 'batch.data'),
    (('operators', 0, 5), 'operators', 'output of forward conv aten.x (call 0)'),
    (('modules', 0, 4), 'modules', 'output of conv forward (call 0)'),
    (('losses', 'loss'), 'losses', 'losses.loss'), (('buffers', ), 'buffers', 'buffers'),
    (('operators', 1, 5), 'operators', 'output of backward conv aten.y (call 0)'),
    (('modules', 1, 4), 'modules', 'output of conv backward (call 0)'),
    (('gradients', ), 'gradients', 'gradients'), (('lr', 'lr'), 'lr', 'lr.lr'),
    (('operators', 2, 5), 'operators', 'output of optimizer aten.z (call 0)'),
    (('optimizer', ), 'optimizer', 'optimizer'), (('parameters', ), 'parameters', 'parameters'),
    (('averages', ), 'averages', 'averages'),
]
VALUES = {'epoch': 7, 'batch.positions': [9], 'batch.indices': [9], 'losses': '0x1p+9',
          'lr': ['0x1p+9']}


def plant(cause, record=RECORD):
    path, field, _ = cause
    return changed(record, *path, value=VALUES.get(field, 'x'))


@pytest.mark.parametrize(('path', 'value', 'part'), [
    *((path, VALUES.get(field, 'x'), part) for path, field, part in CAUSES),
    (('losses', 'loss_cls'), '0x1p-2', 'losses.loss_cls'),
    (('modules', 0, 3), 'x', 'input of conv forward (call 0)'),
    (('modules', 0, 0), 'x', 'order of modules'),
    (('modules', ), RECORD['modules'][:1], 'number of modules'),
    (('operators', 0, 6), 'x', 'shapes of forward conv aten.x (call 0)')])
def test_every_field_is_compared(path, value, part):
    other = changed(RECORD, *path, value=value)
    assert [one.first_part()[0] for one in differing(RECORD, other)] == [part]
    assert first_divergence({0: log({0: RECORD})}, {0: log({0: other})}).as_dict()['field'] == part


def test_what_only_one_run_recorded_is_not_compared_and_said():
    small = {key: RECORD[key] for key in ('iteration', 'epoch', 'losses', 'parameters')}
    assert differing(RECORD, small) == differing(small, RECORD) == []
    a, b = {0: log({}, 'module'), 1: log({})}, {0: log({})}
    assert divergence.not_compared(a, b) == [
        'A has fingerprints of ranks [0, 1], B of [0]: [0] are compared',
        'recorded at different levels, A module, step, B step: what both have is compared']


def test_gradients_are_named_where_names_are_known():
    other = changed(dict(RECORD, gradients='x'), 'by_name', 'gradients', 'v', value='x')
    (found, ) = differing(RECORD, other)
    assert found.names == ('v', ) and found.first_part() == ('gradients of v', 'g', 'x')


def test_the_first_iteration_and_the_earliest_cause_are_named():
    later = dict(RECORD, parameters='x')
    both = dict(later, gradients='y')
    found = first_divergence({0: log({0: RECORD, 1: RECORD, 2: RECORD, 9: RECORD})},
                             {0: log({0: RECORD, 1: both, 2: later})})
    assert found.as_dict() == dict(iteration=1, field='gradients', first='g', second='y')
    assert found.text() == 'iteration 1, gradients: g and y'
    loss = changed(RECORD, 'losses', 'loss', value='0x1.8p+0')
    assert first_divergence({1: log({3: RECORD})}, {1: log({3: loss})}).text() == (
        'iteration 3, rank 1, losses.loss: 1.0 (0x1p+0) and 1.5 (0x1.8p+0)')


def calls(*entries):
    return dict(modules=[[name, phase, 0, *digests] for name, phase, digests in entries])


def nested(outputs):
    names = ['(model)', 'neck', 'neck.conv', 'neck.other', 'head']
    return calls(*((name, 'forward', (f'in {name}', out)) for name, out in zip(names, outputs)))


CHAIN = ('backbone', 'forward', 'io'), ('neck', 'forward', 'op'), ('head', 'forward', 'pq')
BOTH = ('head', 'forward', 'io'), ('head', 'backward', 'gh')


@pytest.mark.parametrize('a, b, call', [
    # the call whose inputs agree
    (calls(*CHAIN), calls(CHAIN[0], ('neck', 'forward', 'oX'), ('head', 'forward', 'XY')),
     'output of neck forward'),
    # of modules within each other the innermost
    (nested('abcde'), nested('ABCde'), 'output of neck.conv forward'),
    (nested('abcde'), nested('ABcde'), 'output of neck forward'),
    (nested('abcde'), nested('Abcde'), 'output of (model) forward'),
    # backward is not blamed for what forward did
    (calls(*BOTH), calls(('head', 'forward', 'IO'), ('head', 'backward', 'gH')),
     'input of head forward'),
    (calls(*BOTH), calls(BOTH[0], ('head', 'backward', 'gH')), 'output of head backward')])
def test_of_the_calls_of_modules_the_one_that_made_the_difference_is_named(a, b, call):
    assert [one.call for one in differing(a, b)] == [f'{call} (call 0)']


def test_a_metric_counts_up_to_the_last_iteration_that_is_compared():
    a, b = ({0: log({})._replace(vals=[dict(iteration=4, metrics=dict(mAP=value))])}
            for value in ('0x1p-1', '0x1p-2'))
    assert compare_logs(a, b, 3) is None and compare_logs(a, b, 4).iteration == 4


def validated(*metrics):
    return {0: log({})._replace(vals=[dict(iteration=4, metrics=dict(mAP=value))
                                      for value in metrics])}


def test_a_metric_that_either_run_has_alone_is_a_difference():
    a, b = ({0: log({})._replace(vals=[dict(iteration=4, metrics=metrics)])}
            for metrics in (dict(mAP='x'), dict(mAP='x', AR='y')))
    both = first_differing_metric(a, b), first_differing_metric(b, a)
    assert [found.as_dict()['field'] for found in both] == ['metric AR of the validation'] * 2


def test_several_validations_after_an_iteration_are_compared_in_their_order():
    a = validated('0x1p-1', '0x1p-2')
    assert compare_logs(a, validated('0x1p-1', '0x1p-2'), 4) is None
    assert compare_logs(a, validated('0x1p-1'), 4) is None  # the other run ended before the second
    assert compare_logs(a, validated('0x1p-1', '0x1p-3'), 4).iteration == 4
    assert compare_logs(a, validated('0x1p-3', '0x1p-2'), 4).iteration == 4


ITERATIONS, RANKS = 2, 2


def write(folder, planted, stream):
    for rank in range(RANKS):
        steps = []
        for iteration in range(ITERATIONS):
            record = {name: RECORD[name] for name in {*RECORD} - {*STREAMS} | {stream} & {*RECORD}}
            for where, number, cause in planted:
                if (where, number) == (rank, iteration) and CAUSES[cause][0][0] in record:
                    record = plant(CAUSES[cause], record)
            steps.append(dict(record, iteration=iteration))
        write_steps(folder, steps, rank, RANKS, end=True)


def test_every_field_of_the_schema_is_planted():
    assert {field for _, field, _ in CAUSES} == {*FIELDS, *STREAMS}
    assert all(value_of(RECORD, field) is not None for field in (*FIELDS, *STREAMS))


def test_of_two_causes_the_earlier_is_named():
    for earlier, later in itertools.combinations(CAUSES, 2):
        field = earlier[1]
        if field in STREAMS and later[1] in STREAMS:  # a run records one of them
            continue
        assert differing(RECORD, plant(later, plant(earlier)))[0].field == field, (earlier, later)
        # on two ranks, the one with the earlier cause
        found = first_divergence({0: log({0: RECORD}), 1: log({0: RECORD})},
                                 {0: log({0: plant(later)}), 1: log({0: plant(earlier)})})
        assert (found.rank, found.field.field) == (1, field)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, RANKS - 1), st.integers(0, ITERATIONS - 1),
                          st.integers(0, len(CAUSES) - 1)), max_size=4),
       st.sampled_from([None, *STREAMS]))
def test_every_verb_names_the_same_first_difference(planted, stream):
    with tempfile.TemporaryDirectory() as folder:
        a, b = os.path.join(folder, 'a'), os.path.join(folder, 'b')
        write(a, [], stream)
        write(b, planted, stream)
        compared = compare(a, b, weights=False)
        runs = read_run(a), read_run(b)
        found = [compared.first, result_of('b', Variation(''), folder, 'a', ITERATIONS).difference,
                 first_iteration(*runs)[1], compare_logs(runs[0].ranks, runs[1].ranks, ITERATIONS)]
    planted = [one for one in planted if CAUSES[one[2]][1] in {*FIELDS, stream}]
    if not planted:
        assert compared.equal and found == [None] * 4
        return
    iteration = min(number for _, number, _ in planted)
    cause, rank = min((cause, rank) for rank, number, cause in planted if number == iteration)
    expected = iteration, rank, CAUSES[cause][1]
    assert [(one.iteration, one.rank, one.field.field) for one in found] == [expected] * 4
