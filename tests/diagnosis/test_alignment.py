"""Aligning streams of records: equal ones, longer ones, unrelated ones."""
import difflib
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
    """The textbook table."""
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
    assert difflib.SequenceMatcher(None, a[:100], b[:100], autojunk=False).ratio() > 0.9


def test_unrelated_streams_align_as_far_as_the_limit_reaches(monkeypatch):
    monkeypatch.setattr(alignment, 'MAX_EDITS', 5)
    a, b = list(range(20)), [0, 1, *range(100, 120), 19]
    pairs = matches(a, b)
    assert pairs[:2] == [(0, 0), (1, 1)] and all(a[i] == b[j] for i, j in pairs)


SAME = [op('one', ['00'], ['11']), op('two', ['11'], ['22']), op('three', ['22'], ['33'])]


def test_equal_streams_have_no_difference():
    assert first_differing_record(SAME, list(SAME)) is None


def test_the_first_record_with_equal_inputs_and_another_result_is_named():
    other = [SAME[0], op('two', ['11'], ['ff']), op('three', ['ff'], ['ee'])]
    found = first_differing_record(SAME, other)
    assert (found.kind, found.a, found.b, found.which) == ('output', 1, 1, (0,))


def test_an_input_that_no_operator_made():
    other = [SAME[0], op('two', ['ab'], ['ff']), SAME[2]]
    found = first_differing_record(SAME, other)
    assert (found.kind, found.a, found.which) == ('input', 1, (0,))


def test_a_different_number_as_argument():
    a, b = [op('mul', ['1'], ['2'], arguments='other=0.5')], [op('mul', ['1'], ['3'],
                                                                 arguments='other=0.25')]
    assert first_differing_record(a, b).kind == 'argument'


@pytest.mark.parametrize('swap', [False, True])
def test_an_extra_operator_that_makes_what_differs_is_named(swap):
    longer = [SAME[0], op('noise', ['11'], ['1f']), op('two', ['1f'], ['2f']),
              op('three', ['2f'], ['3f'])]
    found = first_differing_record(*((longer, SAME) if swap else (SAME, longer)))
    assert found.kind == ('missing' if swap else 'extra')
    assert (found.a, found.b) == ((1, None) if swap else (None, 1))


def test_an_extra_operator_without_consequences_does_not_hide_what_comes_later():
    longer = [SAME[0], op('print', ['11'], []), SAME[1], op('three', ['22'], ['ff'])]
    found = first_differing_record(SAME, longer)
    assert (found.kind, found.a, found.b, found.extra_b) == ('output', 2, 3, (1,))


def test_an_extra_operator_alone_is_a_difference():
    longer = [SAME[0], op('print', ['11'], []), *SAME[1:]]
    assert first_differing_record(SAME, longer).kind == 'extra'


@pytest.mark.parametrize('swap', [False, True])
def test_of_extra_operators_in_both_runs_the_first_is_named(swap):
    """One run resizes; after that all shapes, and so all records, differ."""
    resized = [op('resize', ['00'], ['0f']), SAME[0], op('two', ['1f'], ['2f'], shapes='64')]
    found = first_differing_record(*((resized, SAME) if swap else (SAME, resized)))
    assert found.kind == ('missing' if swap else 'extra')
    assert (found.a, found.b) == ((0, None) if swap else (None, 0))
    other = [op('one', ['00'], ['1f'], shapes='32'), SAME[1]]
    resized = [op('resize', ['00'], ['0f']), op('one', ['0f'], ['1e'], shapes='64'), SAME[1]]
    found = first_differing_record(*((resized, other) if swap else (other, resized)))
    assert (found.a, found.b) == ((0, None) if swap else (None, 0)), 'at the same point'
    found = first_differing_record(resized, [op('crop', ['00'], ['0e']), *SAME])
    assert (found.kind, found.a, found.b) == ('replaced', 0, 0)


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


def test_of_several_extra_operators_the_first_that_matters_is_named():
    longer = [op('print', ['00'], ['aa']), SAME[0], op('randn', [], ['bb']),
              op('noise', ['11', 'bb'], ['1f']), op('two', ['1f'], ['2f']),
              op('three', ['2f'], ['3f'])]
    found = first_differing_record(SAME, longer)
    assert (found.kind, found.b, found.extra_b) == ('extra', 2, (2, 3))


def state(outputs, numbers=''):
    return Record('hook', 'EMAHook.after_train_iter', 'state after the hook', arguments=numbers,
                  labels=('parameter a', 'parameter b'), outputs=outputs)


def test_a_state_names_the_tensors_that_differ():
    found = first_differing_record([state(('1', '2'))], [state(('1', 'f'))])
    assert (found.kind, found.which) == ('output', ('parameter b',))


def test_a_state_that_lacks_a_tensor_differs():
    lacking = state(('1',))._replace(labels=('parameter a',))
    found = first_differing_record([state(('1', '2'))], [lacking])
    assert found.which == ('parameter b',)


def test_a_number_of_a_state_comes_before_its_tensors():
    found = first_differing_record([state(('1', '2'), 'lr=0.1; m=0')],
                                   [state(('1', 'f'), 'lr=0.2; m=0')])
    assert (found.kind, found.which) == ('argument', ('lr=0.1', 'lr=0.2'))


def test_a_state_that_only_one_run_recorded_is_not_a_difference():
    assert first_differing_record(SAME, [*SAME, state(('1', '2'))]) is None


def test_an_operator_in_a_hook_that_made_the_state_is_named():
    a = [state(('1', '2'))]
    b = [op('mul_', ['2'], ['f']), state(('1', 'f'))]
    found = first_differing_record(a, b)
    assert (found.kind, found.b) == ('extra', 0)
