"""SHA-256 of nested values: every bit counts, addresses never do."""
import copy

import numpy as np
import pytest
import torch
from mmdet.structures.bbox import HorizontalBoxes
from mmdet.structures.mask import BitmapMasks
from mmengine.structures import InstanceData

from mmrepro.fingerprint.digest import tensor_digest, tensor_digests
from mmrepro.objects import digests
from mmrepro.objects.digests import exact_digest, first_difference, state_digest


def test_state_digest_sees_every_bit_and_the_dtype():
    state = dict(b=torch.tensor([0.0, 1.0]), a=dict(lr=0.1, steps=[1, 2]))
    base = state_digest(state)
    assert base == state_digest(dict(reversed(list(state.items()))))
    others = [
        dict(state, b=torch.tensor([-0.0, 1.0])),
        dict(state, b=torch.tensor([1.0, 0.0])),
        dict(state, b=torch.tensor([[0.0, 1.0]])),
        dict(state, b=torch.tensor([0.0, 1.0]).view(torch.int32)),
        dict(state, a=dict(lr=0.1, steps=[2, 1])),
        dict(state, c=torch.tensor(0.0)),
    ]
    assert len({base, *map(state_digest, others)}) == len(others) + 1


def test_state_digest_sees_every_element_of_a_long_array():
    array = np.zeros(5000)
    other = array.copy()
    other[2500] = 1e-9
    digests = {state_digest(value) for value in (array, other, array.astype('f4'),
                                                 array.reshape(50, 100))}
    assert len(digests) == 4 and state_digest(array) == state_digest(array[::1].copy())


def test_state_digest_reads_any_dtype_and_layout():
    matrix = torch.arange(6.0).reshape(2, 3)
    assert state_digest(matrix.t()) == state_digest(matrix.t().contiguous())
    assert state_digest(matrix.bfloat16()) != state_digest(matrix.half())
    assert state_digest(torch.tensor(True)) != state_digest(torch.tensor(False))


@pytest.mark.parametrize('read', [state_digest, exact_digest])
def test_views_that_are_conjugated_or_negated_when_they_are_read_have_bytes(read):
    spectrum = torch.fft.fft(torch.arange(5.))
    views = spectrum.conj(), spectrum.conj().imag, spectrum.imag, spectrum
    assert len(set(map(read, views))) == len(views)
    assert [*map(read, views)] == [read(view.clone().resolve_conj().resolve_neg())
                                   for view in views]
    assert first_difference(views[1], views[2])[0] == ''


def test_state_digest_of_today_is_that_of_every_version():
    state = dict(weight=torch.arange(4.).half(), step=3, lr=0.1, betas=(0.9, 0.999), none=None,
                 array=np.arange(3, dtype='i4'), names=['a', b'b'], empty=torch.zeros(0, 2))
    assert state_digest(state) == (
        'f146a7fc7358a565ff98a81c37441f0245828a3dcc71d7a4225a05f357cf5421')


def test_nothing_that_is_compared_within_a_run_counts_as_something_else():
    values = [[1, 11], [11, 1], (1, 11), [1, [11]], [[1, 1], 1], ['1', 11], dict(a=1), [1, '1'],
              {1: 1, 2: 1}, {1: (1, 2)}, [True, 1], [1., 1], [{1, 11}], [frozenset('a'), 'b'],
              {1}, {'1'}, frozenset([1]), np.array([1, None]), [1, None],
              ['a', 'b'], ["a'b"], np.array([1, 11]), [np.array([1]), np.array([11])]]
    assert len(set(map(exact_digest, values))) == len(values)
    assert list(map(exact_digest, copy.deepcopy(values))) == list(map(exact_digest, values))
    assert first_difference([1, 11], [11, 1]) == ('[0]', '1', '11')
    assert first_difference(dict(shape=(1, 2)), dict(shape=[1, 2])) == (
        "['shape']", '(1, 2)', '[1, 2]')


@pytest.mark.parametrize('kind', [np.float32, np.uint8, object, torch.bfloat16])
def test_the_first_element_that_differs_is_found_without_digests_of_all(kind, monkeypatch):
    before = np.zeros((40, 40)).astype(kind) if isinstance(kind, type) else \
        torch.zeros(40, 40, dtype=kind)
    after, calls = copy.deepcopy(before), []
    after[30, 7] = 1
    stock = digests._update
    monkeypatch.setattr(digests, '_update', lambda *args: (calls.append(1), stock(*args)))
    assert '[30, 7] of' in first_difference(before, after)[1]
    assert kind is object or len(calls) == 2


def test_objects_count_by_content_and_not_by_address():
    def sample(x=1., bit=0, order=('a', 'b')):
        mask = np.zeros((1, 40, 40), np.uint8)
        mask[0, 20, 20] = bit
        return dict(boxes=HorizontalBoxes(torch.full((300, 4), x)), masks=BitmapMasks(mask, 40, 40),
                    instances=InstanceData(scores=torch.full((3, ), x)), names=set(order),
                    objects=np.array([x, None], dtype=object))

    assert state_digest(sample()) == state_digest(sample(order=('b', 'a')))
    assert len({state_digest(one) for one in (sample(), sample(x=2.), sample(bit=1))}) == 3
    assert state_digest(object()) == state_digest(object())


def test_objects_that_refer_to_each_other_have_a_digest():
    one, other = torch.nn.Identity(), torch.nn.Identity()
    one.__dict__['friend'], other.__dict__['friend'] = other, one
    assert len(state_digest(one)) == 64


@pytest.mark.parametrize('tensor', [
    torch.tensor(5).expand(1, 1), torch.tensor([5]).expand(1), torch.empty_strided((1, ), (0, )),
    torch.empty_strided((0, ), (0, ), dtype=torch.long), torch.zeros(3, 0, dtype=torch.long)[:, :0],
    torch.arange(4.).as_strided((1, ), (3, )),
], ids=['0-d expanded', 'expanded', 'stride 0', 'empty, stride 0', 'empty slice', 'stride 3'])
def test_strides_of_small_tensors_do_not_matter(tensor):
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    assert state_digest(tensor) == state_digest(plain)
    assert torch.equal(tensor_digest(tensor), tensor_digest(plain))


@pytest.mark.parametrize('read', [
    state_digest, exact_digest, tensor_digest, lambda tensor: tensor_digests([tensor, tensor])])
def test_memory_that_was_read_can_still_be_resized(read):
    tensor = torch.zeros(2)
    read(tensor)
    assert len(tensor.resize_(3)) == 3
