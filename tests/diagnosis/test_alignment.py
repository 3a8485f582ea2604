"""Aligning streams of records: equal ones, longer ones, unrelated ones."""
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrepro.diagnosis import alignment
from mmrepro.diagnosis.alignment import first_differing_record, matches
from mmrepro.fingerprint.records import Record


def op(name, inputs=(), outputs=(), **more):
    return Record('forward', 'm', name, inputs=tuple(inputs), outputs=tuple(outputs), **more)


def subsequence_length(a, b):
    """Compute the length with the table of textbooks."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = (table[i][j] + 1 if x == y
                                   else max(table[i][j + 1], table[i + 1][j]))
    return table[-1][-1]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from('abcd'), max_size=14), st.lists(st.sampled_from('abcd'),
                                                                max_size=14))
def test_matches_are_a_longest_common_subsequence(a, b):
    pairs = matches(a, b)
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(p[0] < q[0] and p[1] < q[1] for p, q in zip(pairs, pairs[1:]))
    assert len(pairs) == subsequence_length(a, b)


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
                  labels=('parameter a', 'parameter b')[:len(outputs)], outputs=outputs)


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
