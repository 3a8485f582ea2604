"""What code meets on the device: each function runs in a fork of one process that has it.

    python tests/host_cuda/scripts.py       prints, as JSON, the traceback of each one, or nothing
"""
import json
import os
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from children import Child, ChildFailed

from mmrepro import determinism, on_virtual_ranks, ops, seeds, set_random_seed
from mmrepro.ops.guard import OperatorGuard

SCRIPTS = {}
FLAGS = dict(CUBLAS_WORKSPACE_CONFIG=':4096:8')  # read before CUDA starts
INTERPRETED = dict(TRITON_INTERPRET='1')  # read when Triton is imported


def script(**variables):
    def register(function):
        SCRIPTS[function.__name__] = function, variables
        return function
    return register


@script()
def it_refuses_and_drifts_and_draws_as_a_gpu():
    """The controls, without which the others could not fail."""
    def step():
        x = torch.linspace(-1, 1, 64, device='cuda').view(1, 1, 8, 8).requires_grad_()
        F.interpolate(x, scale_factor=2.5, mode='bicubic').pow(2).sum().backward()
        return x.grad.cpu()

    assert not torch.equal(step(), step()), 'additions by atomics drift'
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError, match='upsample_bicubic2d_backward does not have a determin'):
        step()
    with pytest.raises(RuntimeError, match='cuda:0 and cpu'):
        torch.ones(3, device='cuda') + torch.ones(3)
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        torch.ones(3, device='cuda').numpy()
    torch.manual_seed(1)
    a = torch.rand(3, device='cuda')
    torch.rand(5)
    b = torch.rand(3, device='cuda')
    torch.manual_seed(1)
    torch.rand(5)
    assert torch.equal(torch.cat((a, b)), torch.rand(6, device='cuda'))
    grown = torch.empty(0, device='cuda')
    torch.add(a, b, out=grown)
    assert grown.is_cuda and torch.equal(grown.cpu(), a.cpu() + b.cpu())
    view = grown.view(3, 1)[1:]
    view.fill_(7)
    assert grown.tolist()[1:] == [7, 7] and view.data_ptr() == grown.data_ptr() + 4


@script()
def two_devices_have_their_random_numbers():
    first, second = torch.ones(3, device='cuda'), torch.ones(3, device='cuda:1')
    with pytest.raises(RuntimeError, match='at least two devices, cuda:0 and cuda:1'):
        first + second
    torch.cuda.manual_seed_all(1)

    def draw():
        return [torch.rand(3, device=one.device).cpu() for one in (first, second, second)]

    draw()
    state = seeds.capture_rng()
    drawn = draw()
    seeds.restore_rng(state)
    assert torch.equal(torch.cat(drawn), torch.cat(draw()))
    seeds.seed_all(1, 'step', 0)
    once = draw()
    seeds.seed_all(1, 'step', 0)
    assert torch.equal(torch.cat(once), torch.cat(draw()))
    assert torch.equal(once[0], once[1]) and not torch.equal(once[1], once[2])


@script()
def products_of_sparse_tensors_are_reported():
    from mmrepro.fingerprint.digest import tensor_digest
    words = torch.nn.Embedding(5, 3, sparse=True).cuda()
    with OperatorGuard().watch() as guard:
        words(torch.tensor([1, 4, 1]).cuda()).square().sum().backward()
        gradient = words.weight.grad
        matrix = gradient.to_dense().to_sparse()
        assert gradient.is_sparse and not guard.findings, guard.findings
        assert int(tensor_digest(gradient)) == int(tensor_digest(gradient.cpu()))
        torch.sparse.mm(matrix, torch.ones(3, 2).cuda())
    assert [finding.operator for finding in guard.findings] == ['aten::_sparse_addmm']


@script()
def cuda_starts_when_its_variables_are_set():
    """Also through the API: cuBLAS reads the variable once, and too late would be refused."""
    os.environ.pop('CUBLAS_WORKSPACE_CONFIG', None)

    def main():
        if torch.distributed.get_rank() == 0:
            assert not torch.cuda.is_initialized()
        set_random_seed(1, deterministic=True)
        return torch.rand(3, device='cuda').is_cuda

    assert on_virtual_ranks(2, main) and torch.cuda.is_initialized()
    assert os.environ['CUBLAS_WORKSPACE_CONFIG'] == ':4096:8'


@script(**FLAGS)
def topk_takes_the_lower_index_as_on_a_cpu():
    """With a kernel that chooses by prefix scans and sorts equal values in reverse."""
    nan, inf = float('nan'), float('inf')
    steps = torch.arange(13 * 9 * 11).view(13, 9, 11) * 7919 % 1000 % 11 - 4
    some = torch.tensor([0., -0., nan, inf, -inf])
    with determinism.deterministic():
        for dtype in (torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8,
                      torch.bool):
            x = steps.abs().to(dtype)
            if dtype.is_floating_point:
                x = torch.where(steps > 1, some.to(dtype)[steps.clamp(2) - 2], steps.to(dtype))
            for dim in (0, 1, -1):
                for largest in (True, False):
                    for k in (1, 4, x.shape[dim]):
                        found = torch.topk(x.cuda(), k, dim, largest)
                        expected = torch.topk(x, k, dim, largest)
                        assert torch.equal(found[1].cpu(), expected[1]), (dtype, dim, largest, k)
                        assert torch.equal(found[0].cpu().signbit(), expected[0].signbit())
    same = torch.ones(3, device='cuda')
    found = torch.topk(same, 2, out=(same.new_empty(0), same.new_empty(0).long()))[1]
    assert found.tolist() == [1, 0], 'the control: without mmrepro the kernel is used as is'


@script(**FLAGS, **INTERPRETED)
def writes_by_index_do_not_sort():
    """In deterministic mode only."""
    from mmrepro.ops.triton import write_kernels
    write, written = write_kernels.write, []
    write_kernels.write = lambda *args: written.append(args) or write(*args)
    values, index = torch.arange(8.).view(4, 2), torch.tensor([3, -6, 0, 3])

    def put(device):
        target = torch.zeros(6, 2, device=device)
        leaf = values.clone().to(device).requires_grad_()
        target[index.to(device)] = leaf
        target[index.to(device), index.to(device) % 2] = leaf[:, 0] + 10
        target.square().sum().backward()
        target.detach()[target[:, 0] == 0] = 7.
        return target.detach().cpu(), leaf.grad.cpu()

    with determinism.deterministic(), ops.using('torch'):
        for one, other in zip(put('cuda'), put('cpu')):
            assert torch.equal(one, other)
        assert not written, "no GPU has run it, so it is not chosen without operators='triton'"
    with determinism.deterministic(), ops.using('triton'):
        found = put('cuda')
        assert len(written) == 3  # the gradient of the second is 0 where it wrote
        for one, other in zip(found, put('cpu')):
            assert torch.equal(one, other)
        with pytest.raises(IndexError, match='out of (range|bounds)'):
            torch.zeros(3, device='cuda')[torch.tensor([3], device='cuda')] = torch.ones(1).cuda()
    count = len(written)
    put('cuda')
    assert len(written) == count


@script(**INTERPRETED)
def a_bad_roi_is_named_without_a_wait_for_it():
    ops.install()
    import mmcv.ops
    feature = torch.ones(1, 2, 8, 8, device='cuda')

    def align(image):
        box = torch.tensor([[image, 1., 1, 5, 5]], device='cuda')
        return float(mmcv.ops.roi_align(feature, box, 2, 1., 0, 'avg', True).sum())

    with ops.using('triton'):
        assert align(0) == 8
        with pytest.raises(RuntimeError, match='^roi_align: rois name image 1, and'):
            align(1)
        assert align(0) == 8


@script(**INTERPRETED)
def functions_of_mmcv_reach_the_kernels():
    ops.install()
    import mmcv.ops

    from mmrepro.ops import triton

    def wave(*shape):
        return torch.linspace(-9, 9, torch.Size(shape).numel()).sin().mul(40).frac().view(shape)

    feature, box = wave(1, 4, 9, 13), torch.tensor([[0., 8, 8, 60, 40], [0, 30, 2, 66, 70]])
    value, share = wave(1, 12, 2, 4), wave(1, 3, 2, 1, 2)
    location = wave(1, 3, 2, 1, 2, 2) * .4 + .5

    def bits(device):
        leaves = [tensor.to(device).requires_grad_()
                  for tensor in (feature, value, location, share)]
        aligned = mmcv.ops.roi_align(leaves[0], box.to(device), (2, 2), 1 / 8, 0, 'avg', True)
        attended = mmcv.ops.multi_scale_deform_attn.MultiScaleDeformableAttnFunction.apply(
            leaves[1], torch.tensor([[3, 4]], device=device), torch.tensor([0], device=device),
            leaves[2], leaves[3], 64)
        ((aligned ** 2).sum() + (attended ** 2).sum()).backward()
        kept = mmcv.ops.nms(wave(40, 4).to(device) + torch.tensor([0, 0, 9, 9], device=device),
                            wave(40, 1)[:, 0].to(device), 0.3)[1]
        results = aligned, attended, kept, *(leaf.grad for leaf in leaves)
        return [tensor.detach().cpu() for tensor in results]

    expected, launched = bits('cuda'), set()
    with ops.using('triton'):
        for name in triton.FUSED:
            assert ops.provider_of(name, 'cuda') == 'triton'
        from triton.runtime.interpreter import InterpretedFunction
        run = InterpretedFunction.run

        def counted(self, *args, **kwargs):
            launched.add(self.fn.__name__)
            return run(self, *args, **kwargs)

        InterpretedFunction.run = counted
        for found, wanted in zip(bits('cuda'), expected):
            assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert launched == {
        f'_{name}_kernel' for name in ('add', 'attend', 'conflict', 'convert', 'filter', 'list',
                                       'mean', 'peak', 'scatter', 'slope', 'sweep')}


def _outcome(function, variables):
    with mock.patch.dict(os.environ, variables):
        try:
            Child(function).result()
        except ChildFailed as error:
            return str(error)
    return ''


if __name__ == '__main__':
    print(json.dumps({name: _outcome(*SCRIPTS[name]) for name in sys.argv[1:]}))
