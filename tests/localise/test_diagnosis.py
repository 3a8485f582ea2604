"""The diagnosis of two streams: what is named, and how it reads."""
from mmrepro.fingerprint.records import Record
from mmrepro.localise.diagnosis import diagnose


def test_another_sample_of_the_batch_made_nothing_of_this_one():
    def load(index, name):
        return Record('data', f'sample 0.{index}/0', 'Load', inputs=(name, 'height'),
                      outputs=(name, 'height', 'img'))

    a, b = [load(1, 'x'), load(2, 'y')], [load(0, 'y'), load(2, 'z')]
    found = diagnose(0, 0, a, b)
    assert (found.path, found.kind) == ('sample 0.2/0', 'input')
