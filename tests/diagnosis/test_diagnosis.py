"""The diagnosis of two streams: what is named, and how it reads."""
import types

import torch

from mmrepro.diagnosis.attributes import record_attributes
from mmrepro.diagnosis.diagnosis import diagnose
from mmrepro.fingerprint.records import Record


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


def states(path, lr):
    def state(phase, path, name, value):
        return Record(phase, path, name, arguments=f'optimizer group 0 lr={value}')

    return [state('hook', path, 'state before the hook', 1), state('hook', path,
            'state after the hook', lr), state('start', '', 'state before the iteration', lr)]


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
