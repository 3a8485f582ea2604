"""The diagnosis of two streams: what is named, and how it reads."""
from mmrepro.diagnosis.first_difference import diagnose
from mmrepro.fingerprint.records import Record


def test_one_sample_of_a_batch_does_not_make_another():
    def load(position, name):
        return Record('data', f'sample 0.{position}/0', 'Load', inputs=(name, 'height'),
                      outputs=(name, 'height', 'img'))

    a, b = [load(1, 'x'), load(2, 'y')], [load(0, 'y'), load(2, 'z')]
    found = diagnose(0, 0, a, b)
    assert (found.path, found.kind) == ('sample 0.2/0', 'input')
