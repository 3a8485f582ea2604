"""The diagnosis of two streams: what is named, and how it reads."""
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
