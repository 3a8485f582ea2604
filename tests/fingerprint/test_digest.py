"""The digest: equal only for equal bits, the same value however it is computed."""
import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import Child
from mmengine.structures import InstanceData

from mmrepro.fingerprint import digest
from mmrepro.fingerprint import hash_arithmetic as arithmetic
from mmrepro.fingerprint.digest import tensor_digest, tensor_digests, to_hex, value_digest
from mmrepro.objects.digests import exact_digest, first_difference, state_digest

DTYPES = [getattr(torch, name) for name in (
    'bool', 'uint8', 'int8', 'int16', 'int32', 'int64', 'float16', 'bfloat16', 'float32',
    'float64', 'complex64', 'complex128', 'float8_e4m3fn', 'float8_e5m2') if hasattr(torch, name)]


def one(tensor):
    return to_hex([tensor_digest(tensor)])[0]


def of_bits(dtype, count, seed=0):
    """``count`` elements of random bytes; booleans of 0 and 1."""
    size = torch.empty(0, dtype=dtype).element_size()
    data = np.random.default_rng(seed).integers(0, 256, count * size, dtype=np.uint8)
    if dtype == torch.bool:
        data = data % 2
    return torch.from_numpy(data).view(dtype) if count else torch.zeros(0, dtype=dtype)


def by_hand(tensor):
    """Return the formula of the documentation in plain integers."""
    data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    data += bytes(-len(data) % 8)
    mask = (1 << 64) - 1
    lower, upper = arithmetic.keys().tolist()
    sums = {}
    for j in range(len(data) // 8):
        x = int.from_bytes(data[8 * j:8 * j + 8], 'little')
        b, k = divmod(j, arithmetic.BLOCK)
        sums[b] = (sums.get(b, 0) + x * lower[k] + (x >> 32) * upper[k]) & mask
    total = sum(arithmetic.mix_int((s + (b + 1) * arithmetic.GOLDEN) & mask)
                for b, s in sums.items())
    total &= mask
    header = f'{str(tensor.dtype)[6:]} {"x".join(map(str, tensor.shape))}'
    return f'{arithmetic.mix_int(total ^ digest.text_key(header)):016x}'


def on_a_device(tensors):
    """Take the path of GPUs on the CPU."""
    headers = [digest._header_key(t.dtype, tuple(t.shape)) for t in tensors]
    return arithmetic.device_digests([digest._plain(t) for t in tensors], headers)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_formula_host_and_device_agree(dtype):
    tensors = [of_bits(dtype, n) for n in (0, 1, 3, 7, 1000, 8 * arithmetic.BLOCK + 1, 20001)]
    tensors += [of_bits(dtype, 1).view(()), of_bits(dtype, 24).view(2, 3, 4)]
    expected = [by_hand(t) for t in tensors]
    assert to_hex(list(tensor_digests(tensors))) == expected
    assert to_hex(list(on_a_device(tensors))) == expected


@pytest.mark.parametrize('name, size, digests', [
    *(('DEVICE_BYTES', size * arithmetic.BLOCK_BYTES, on_a_device) for size in (1, 5)),
    *(('ROWS', size, tensor_digests) for size in (1, 3, 1000))])
def test_batches_on_a_device_and_pieces_on_the_host_do_not_matter(name, size, digests, monkeypatch):
    tensors = [torch.randn(n) for n in (0, 30000, 5, 2 * arithmetic.BLOCK, 7, 123457, 1)]
    tensors.insert(2, torch.arange(60001).to(torch.uint8))
    expected = tensor_digests(tensors)
    monkeypatch.setattr(arithmetic, name, size)
    assert torch.equal(digests(tensors), expected)


def test_threads_do_not_matter_before_and_after_a_fork(monkeypatch):
    tensor = torch.randn(999999)
    expected = one(tensor)
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 3)
    monkeypatch.setattr(arithmetic, 'MIN_SHARE', 7)
    assert one(tensor) == expected
    # a child has the pool of its parent, but none of its threads
    assert Child(one, tensor).result() == expected
    assert any(thread.name.startswith('mmrepro-digest') for thread in threading.enumerate())


GOLDEN = {  # part of the file format: these never change within a scheme
    'arange': (torch.arange(10, dtype=torch.float32), '1085a114424b05b0'),
    'bool': (torch.tensor([True, False, True]), 'ca3a245262b62905'),
    'two blocks': (torch.arange(3000, dtype=torch.int64), '1a7a22b7e0ada3c8'),
    'empty': (torch.zeros(0, 4), '6a21b43d74039d9a'),
    'scalar': (torch.tensor(-0.0), '2e3aaf295a8d8825'),
}


@pytest.mark.parametrize('name', GOLDEN)
def test_golden_values(name):
    tensor, value = GOLDEN[name]
    assert one(tensor) == value


def test_memory_layout_does_not_matter():
    tensor = torch.randn(2, 3, 5, 7)
    assert one(tensor.to(memory_format=torch.channels_last)) == one(tensor)
    assert one(tensor.permute(3, 1, 0, 2)) == one(tensor.permute(3, 1, 0, 2).contiguous())
    assert one(torch.randn(9)[1:].fill_(2)) == one(torch.full((8, ), 2.))
    assert one(torch.tensor([1 + 2j]).conj()) == one(torch.tensor([1 - 2j]))
    assert one(torch.nn.Parameter(tensor)) == one(tensor)
    assert one(torch.empty_strided((0, 4), (0, 0))) == one(torch.zeros(0, 4))


def test_dtype_and_shape_matter():
    zeros = torch.zeros(2, 6)
    assert len({one(zeros), one(zeros.view(3, 4)), one(zeros.view(12)), one(zeros.int()),
                one(torch.zeros(2, 7)), one(torch.zeros(0)), one(torch.zeros(0, 1))}) == 7


def test_values_that_compare_equal_have_other_bits():
    assert one(torch.zeros(4)) != one(-torch.zeros(4))
    nans = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001], dtype=torch.int32)
    assert len({one(nan.view(1).view(torch.float32)) for nan in nans}) == 3
    assert one(nans.view(torch.float32)) == one(nans.view(torch.float32).clone())


def test_no_collision_among_many_small_inputs():
    tensors = [torch.tensor(values, dtype=torch.uint8)
               for values in itertools.product(range(16), repeat=3)]
    tensors += [torch.eye(97)[i] * value for i in range(97) for value in range(1, 100)]
    tensors += [torch.full((97, ), float(value)) for value in range(5000)]
    assert len(set(to_hex(list(tensor_digests(tensors))))) == len(tensors)


def test_sparse_tensors():
    dense = torch.tensor([[0., 1.], [2., 0.]])
    digests = {one(dense), one(dense.to_sparse()), one((2 * dense).to_sparse()),
               one(dense.t().to_sparse()), one(dense.to_sparse_csr())}
    assert len(digests) == 5
    assert one(dense.to_sparse()) == one(dense.to_sparse())


# tensors that are no block of memory, by the dense tensor that they are made of
PACKED = {
    **{str(layout): (lambda x, layout=layout: x.to_sparse(layout=layout)) for layout in (
        torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)},
    **{str(layout): (lambda x, layout=layout: x.to_sparse(layout=layout, blocksize=(2, 2)))
       for layout in (torch.sparse_bsr, torch.sparse_bsc)},
    **{f'nested {layout}': (lambda x, layout=layout: torch.nested.nested_tensor(
        [x[0], x[1, :1]], layout=layout)) for layout in (torch.strided, torch.jagged)},
    'quantized': lambda x: torch.quantize_per_tensor(x, float(x.max()) / 99, 0, torch.qint8),
    'by channel': lambda x: torch.quantize_per_channel(
        x, x[0] / 9, torch.zeros(2), 0, torch.qint8),
    'MKL-DNN': lambda x: x.to_mkldnn()}


@pytest.mark.parametrize('kind', PACKED)
def test_tensors_that_are_no_block_of_memory(kind):
    def of(*values):
        return PACKED[kind](torch.tensor(values).view(2, 2))
    # the scale of a quantized one differs where its integers are those of the first
    a, same, other, scaled = of(1., 2., 3., 4.), of(1., 2., 3., 4.), of(1., 2., 4., 4.), \
        of(2., 4., 6., 8.)
    for digest_of in (one, exact_digest, state_digest, lambda x: int(value_digest(dict(x=x)))):
        assert digest_of(a) == digest_of(same)
        assert len({digest_of(a), digest_of(other), digest_of(scaled)}) == 3
    assert first_difference(dict(x=a), dict(x=same)) is None
    where, _, _ = first_difference(dict(x=a), dict(x=other))
    assert where.startswith("['x']")


def test_what_has_no_bits_is_refused():
    with pytest.raises(TypeError, match=r'\(2, 3\), torch.float32 on meta has no bits'):
        tensor_digest(torch.zeros(2, 3, device='meta'))


def test_combined_digests_are_by_name():
    a, b = tensor_digests([torch.zeros(1), torch.ones(1)])

    def combined(**digests):
        values = torch.stack(list(digests.values())) if digests else torch.zeros(0, dtype=a.dtype)
        found = to_hex([digest.combine_digests(list(digests), values)])[0]
        assert found == digest.combined_hex({name: int(value) for name, value in digests.items()})
        return found

    assert combined(a=a, b=b) == combined(b=b, a=a)
    different = [combined(a=a, b=b), combined(a=b, b=a), combined(a=a), combined(a=a, b=a),
                 combined()]
    assert len(set(different)) == len(different)


def test_nested_values():
    def value(**change):
        boxes = InstanceData(bboxes=torch.ones(2, 4), labels=torch.zeros(2))
        return {**dict(inputs=[torch.zeros(3, 2, 2)], samples=[boxes], name='a', flip=None,
                       factor=np.float32(1.5), scale=(1.0, 0.75), mask=np.eye(2), good=True),
                **change}

    equal = to_hex([value_digest(value()), value_digest(dict(reversed(value().items())))])
    assert equal[0] == equal[1]
    changes = [dict(name='b'), dict(flip=False), dict(factor=np.float64(1.5)), dict(factor=1.5),
               dict(scale=(1.0, 0.5)), dict(scale=[1, 0.75]), dict(mask=np.eye(2).T * 2),
               dict(mask=np.eye(2, dtype=np.float32)), dict(good=1), dict(more=None),
               dict(inputs=[torch.zeros(3, 2, 2), torch.zeros(0)]), dict(inputs=[]),
               dict(samples=[InstanceData(bboxes=torch.ones(2, 4), labels=torch.ones(2))]),
               dict(name=b'a'), dict(scale=(float('nan'), 0.75)), dict(scale=(1.0, -0.0))]
    found = to_hex([value_digest(value(**change)) for change in [{}, *changes]])
    assert len(set(found)) == len(found)


def test_a_path_has_the_digest_of_its_text():
    """It keeps its text and hash once asked for them, and loses them on the way to a worker."""
    path, equal = Path('a') / 'b.jpg', Path('a') / 'b.jpg'
    hash(path), str(path)
    assert to_hex([value_digest(path)]) == to_hex([value_digest(equal)])
    assert to_hex([value_digest(path)]) != to_hex([value_digest(Path('a') / 'c.jpg')])
    assert to_hex([value_digest(path)]) != to_hex([value_digest(str(path))])


def test_nested_values_with_masks_cycles_and_arrays_of_objects():
    from mmdet.structures.mask import BitmapMasks, PolygonMasks
    masks = BitmapMasks(np.eye(4, dtype=np.uint8)[None], 4, 4)
    polygons = PolygonMasks([[np.array([0., 0, 3, 0, 3, 3])]], 4, 4)
    others = [BitmapMasks(1 - masks.masks, 4, 4), masks, polygons,
              PolygonMasks([[np.array([0., 0, 3, 0, 3, 2])]], 4, 4)]
    assert len(set(to_hex([value_digest(dict(m=m)) for m in others]))) == 4
    loop = []
    loop.append(loop)
    assert to_hex([value_digest(loop)]) != to_hex([value_digest([[]])])
    ragged = np.array([[1], [1, 2]], dtype=object)
    assert to_hex([value_digest(ragged)]) != to_hex([value_digest(ragged[::-1])])
    single = [np.array(item, dtype=object) for item in (None, 'a')]  # without a dimension
    assert len(set(to_hex([value_digest(item) for item in single]))) == 2
    assert to_hex([value_digest([object()])]) == to_hex([value_digest([object()])])
    slots = [type('Slots', (), dict(__slots__=('x', )))() for _ in range(3)]
    for item, x in zip(slots, (1, 1, 2)):
        item.x = x
    assert len(set(to_hex([value_digest(item) for item in slots]))) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_cpu_and_cuda_agree_without_waiting(dtype):
    tensors = [of_bits(dtype, n) for n in (0, 1, 3, 1000, 20001)]
    there = [tensor.cuda() for tensor in tensors]
    tensor_digests(there)
    torch.cuda.set_sync_debug_mode('error')
    try:
        digests = tensor_digests(there)
    finally:
        torch.cuda.set_sync_debug_mode('default')
    assert torch.equal(digests.cpu(), tensor_digests(tensors))
