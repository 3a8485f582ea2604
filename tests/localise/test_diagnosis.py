"""The diagnosis of two streams: how they are aligned, what is named, and how it reads."""
import json
import random
import types
from pathlib import Path

import pytest
import torch

from mmrepro.fingerprint.attributes import record_attributes
from mmrepro.fingerprint.records import ATTRIBUTES, Record
from mmrepro.localise import alignment
from mmrepro.localise.alignment import first_differing_record, matches
from mmrepro.localise.causes import CAUSES
from mmrepro.localise.diagnosis import diagnose

PLANTED = Path(__file__).parents[2] / 'docs' / 'results' / 'planted_faults.json'


def op(name, inputs=(), outputs=(), **more):
    return Record('forward', 'm', name, inputs=tuple(inputs), outputs=tuple(outputs), **more)


def test_long_streams_with_few_edits_align_fully():
    draw = random.Random(0)
    a = [draw.randrange(30) for _ in range(20000)]
    b = [*a[:50], 99, *a[50:9000], *a[9004:], 98]
    assert len(matches(a, b)) == len(a) - 4


def test_unrelated_streams_align_as_far_as_the_limit_reaches(monkeypatch):
    monkeypatch.setattr(alignment, 'MAX_EDITS', 5)
    a, b = list(range(20)), [0, 1, *range(100, 120), 19]
    pairs = matches(a, b)
    assert pairs[:2] == [(0, 0), (1, 1)] and all(a[i] == b[j] for i, j in pairs)


SAME = [op('one', ['00'], ['11']), op('two', ['11'], ['22']), op('three', ['22'], ['33'])]


def state(outputs, numbers=''):
    return Record('hook', 'EMAHook.after_train_iter', 'state after the hook', arguments=numbers,
                  labels=tuple(f'parameter {name}' for name, _ in zip('ab', outputs)),
                  outputs=outputs)


NOISE = [SAME[0], op('noise', ['11'], ['1f']), op('two', ['1f'], ['2f']),
         op('three', ['2f'], ['3f'])]
PRINTS = op('print', ['11'], [])
# one run resizes; after that all shapes, and so all records, differ
RESIZED = [op('resize', ['00'], ['0f']), op('one', ['0f'], ['1e'], shapes='64'), SAME[1]]
# two streams, and attributes of the difference
DIFFERENCES = {
    'a result': (SAME, [SAME[0], op('two', ['11'], ['ff']), op('three', ['ff'], ['ee'])],
                 dict(kind='output', a=1, b=1, which=(0, ))),
    'an input that no operator made': (SAME, [SAME[0], op('two', ['ab'], ['ff']), SAME[2]],
                                       dict(kind='input', a=1, which=(0, ))),
    'an argument': ([op('mul', ['1'], ['2'], arguments='other=0.5')],
                    [op('mul', ['1'], ['3'], arguments='other=0.25')], dict(kind='argument')),
    'an extra operator that makes what differs': (SAME, NOISE, dict(kind='extra', a=None, b=1)),
    'an extra operator without consequences does not hide what comes later': (
        SAME, [SAME[0], PRINTS, SAME[1], op('three', ['22'], ['ff'])],
        dict(kind='output', a=2, b=3, extra_b=(1, ))),
    'an extra operator alone': (SAME, [SAME[0], PRINTS, *SAME[1:]], dict(kind='extra')),
    'of several extra operators the first that matters': (
        SAME, [op('print', ['00'], ['aa']), SAME[0], op('randn', [], ['bb']),
               op('noise', ['11', 'bb'], ['1f']), op('two', ['1f'], ['2f']),
               op('three', ['2f'], ['3f'])], dict(kind='extra', b=2, extra_b=(2, 3))),
    'of extra operators in both runs the first': (
        SAME, [RESIZED[0], SAME[0], op('two', ['1f'], ['2f'], shapes='64')],
        dict(kind='extra', a=None, b=0)),
    'of extra operators at the same point the first': (
        [op('one', ['00'], ['1f'], shapes='32'), SAME[1]], RESIZED, dict(a=None, b=0)),
    'another operator': (RESIZED, [op('crop', ['00'], ['0e']), *SAME],
                         dict(kind='replaced', a=0, b=0)),
    'a tensor of a state': ([state(('1', '2'))], [state(('1', 'f'))],
                            dict(kind='output', which=('parameter b', ))),
    'a tensor that a state lacks': ([state(('1', '2'))], [state(('1', ))],
                                    dict(which=('parameter b', ))),
    'a number of a state before its tensors': (
        [state(('1', '2'), 'lr=0.1; m=0')], [state(('1', 'f'), 'lr=0.2; m=0')],
        dict(kind='argument', which=('lr=0.1', 'lr=0.2'))),
    'an operator in the hook that made the state': (
        [state(('1', '2'))], [op('mul_', ['2'], ['f']), state(('1', 'f'))],
        dict(kind='extra', b=0)),
}


@pytest.mark.parametrize('other', [SAME, [*SAME, state(('1', '2'))]],
                         ids=['equal', 'a state that only one run recorded'])
def test_equal_streams_have_no_difference(other):
    assert first_differing_record(SAME, list(other)) is None


@pytest.mark.parametrize('name', DIFFERENCES)
def test_the_first_difference_is_named(name):
    a, b, expected = DIFFERENCES[name]
    found = first_differing_record(a, b)
    assert {key: getattr(found, key) for key in expected} == expected
    if expected.get('kind') == 'extra':  # in the other run it is missing
        assert first_differing_record(b, a).kind == 'missing'


def test_a_generator_that_was_moved_before():
    def stream(moved):
        return [op('one', ['00'], ['11'], generators=('g0',)),
                op('two', ['11'], ['22'], generators=('g0',)),
                op('three', ['22'], ['22'], generators=('g1' if moved else 'g0',)),
                op('dropout', ['22'], ['44' if moved else '33'], drew=True,
                   generators=('g1' if moved else 'g0',))]
    found = first_differing_record(stream(False), stream(True))
    assert (found.kind, found.a) == ('generator', 3)
    assert (found.moved.a, found.moved.b) == (1, 1)


def test_one_sample_of_a_batch_does_not_make_another():
    def load(position, name):
        return Record('data', f'sample 0.{position}/0', 'Load', inputs=(name, 'height'),
                      outputs=(name, 'height', 'img'))

    a, b = [load(1, 'x'), load(2, 'y')], [load(0, 'y'), load(2, 'z')]
    found = diagnose(0, 0, a, b)
    assert (found.path, found.kind) == ('sample 0.2/0', 'input')


def adds(*inputs, line=7):
    return [Record('forward', 'm', 'add', inputs=(one, ), outputs=(f'{n}{one}', ),
                   stack=(('m.py', line, 'f'), )) for n, one in enumerate(inputs)]


def test_the_same_tensors_in_another_order_are_named():
    found = diagnose(0, 0, adds('x', 'y', 'z'), adds('y', 'x', 'z'))
    assert found.cause == 'same tensors in another order' and 'from a set' in found.sentence
    stacked = [[Record('forward', 'm', 'stack', inputs=inputs, outputs=('o', ))]
               for inputs in (('x', 'y'), ('y', 'x'))]
    assert diagnose(0, 0, *stacked).cause == 'same tensors in another order'
    # another tensor is another one
    assert diagnose(0, 0, adds('x', 'y'), adds('w', 'y')).cause == 'value from outside'


@pytest.mark.parametrize('name, cause', [
    ('MKL_CBWR', 'processor'), ('NCCL_P2P_DISABLE', 'operator'), ('OPENCV_IPP', 'operator')])
def test_variables_of_kernels_are_a_cause_and_no_others(name, cause):
    streams = [[Record('', '', ATTRIBUTES, labels=(f'environment {name}={value}', )),
                op('mm', ['1'], [value])] for value in 'ab']
    assert diagnose(0, 0, *streams).cause == cause


def test_attributes_of_the_module_that_differs_come_first():
    streams = [[Record('', '', ATTRIBUTES, labels=(
        f'resumed={n}', f'head.seen={n}', f'm.calls={n}')),
                op('mul', ['1'], [n], arguments=f'other={n}')] for n in '12']
    found = diagnose(0, 0, *streams)
    assert found.cause == 'state lost at resume'
    assert found.evidence[-2:] == ('attribute m.calls: 1 / 2', 'attribute head.seen: 1 / 2')


def states(path, lr):
    return [Record(*site, arguments=f'optimizer group 0 lr={value}') for *site, value in (
        ('hook', path, 'state before the hook', 1), ('hook', path, 'state after the hook', lr),
        ('start', '', 'state before the iteration', lr))]


def test_a_hook_is_named_at_the_iteration_in_which_it_ran():
    for path, iteration in (('MyHook.after_train_iter', 6), ('MyHook.after_val_epoch', 6),
                            ('MyHook.before_train_epoch', 7), ('MyHook._before_iter', 7)):
        found = diagnose(7, 0, states(path, 1), states(path, 2))
        assert (found.iteration, found.path, found.cause) == (iteration, path, 'another setting')
        assert found.text().splitlines()[0].endswith(f'iteration {iteration}, in {path}')


class Warm(torch.nn.Linear):
    calls = 0
    noise = torch.Generator()


class Held:
    def __init__(self):
        self.seen, self.recent, self.back = 0, [], self


def test_attributes_of_classes_objects_and_containers_are_recorded_once():
    model = torch.nn.Sequential(Warm(1, 1))
    model[0].held = Held()
    runner = types.SimpleNamespace(
        model=model, cfg=None, hooks=[], _resume=False, optim_wrapper={},
        train_dataloader=types.SimpleNamespace(batch_sampler=None))

    def recorded():
        labels.clear()
        record_attributes(recorder, runner)
        return [label for label in labels if label.startswith('0.')]

    labels = []
    recorder = types.SimpleNamespace(
        explanation=lambda *args, **given: labels.extend(given['labels']))
    before = recorded()
    assert '0.calls=0' in before and '0.held.seen=0' in before
    assert any(label.startswith('0.noise=generator ') for label in before)
    model[0].calls += 1
    model[0].held.recent.append(2.5)
    assert set(before) ^ set(recorded()) == {
        '0.calls=0', '0.calls=1', '0.len(held.recent)=0', '0.len(held.recent)=1',
        '0.held.recent[0]=2.5'}


def test_every_cause_is_reached_by_a_planted_fault():
    """Rows with the same name differ in their sentence, which a search may have completed."""
    found = [row.get('why') or '' for row in json.loads(PLANTED.read_text()).values()]
    missed = [cause for cause in CAUSES if not any(why.startswith(cause.why) for why in found)]
    assert missed == []
