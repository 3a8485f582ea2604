"""The way that code takes on a GPU, on CUDA devices made of the host (see host_cuda/device.cpp).

Tensors say ``cuda:0`` or ``cuda:1``, kernels that are put in front of torch's for CUDA answer,
tensors of two devices do not mix, each has random numbers of its own, torch refuses there what it
refuses on a GPU, and what adds with atomics there drifts. Not shown: what a GPU's kernels compute,
how fast.
"""
import json
import subprocess
import sys
from pathlib import Path

import host_device  # noqa: E402
import pytest
from harness import environment  # noqa: E402

from mmrepro import ops  # noqa: E402

FOLDER = Path(__file__).parent
COUNT = FOLDER.parents[1] / 'benchmarks' / 'device_calls.py'


@pytest.fixture(scope='session')
def on_device(tmp_path_factory):
    """Run Python in a process that has the device, check its exit code, and return what it says."""
    if host_device.compiler() is None:
        pytest.skip('no C++ compiler to build the device with')
    if ops.provider() == 'compiled':
        pytest.skip('kernels of a compiled mmcv do not know the device; needs mmcv-lite')
    library = host_device.build(tmp_path_factory.mktemp('host_cuda'))

    def run(*arguments, code=0, cwd=None, **variables):
        done = subprocess.run(
            [sys.executable, '-W', 'ignore', *map(str, arguments)], cwd=cwd, text=True,
            env=host_device.environment(library, {**environment(), **variables}),
            capture_output=True, timeout=1200)
        assert code in (None, done.returncode), done.stderr[-4000:]
        return done
    return run


def check(on_device, out, only, *before):
    """(exit code, rows by name) of ``gpu_check --quick``; ``before`` are lines to run first."""
    script = ('import sys', *before, 'from dev.operator_check import GROUPS',
              'from mmrepro import cli',
              'sys.exit(cli.run("doctor", ["--gpu", *sys.argv[1:]], operators=GROUPS))')
    done = on_device('-c', '\n'.join(script), '--quick', '--out', out, '--only', only,
                     '--seconds', 1100, code=None)  # a busy machine leaves no row out
    assert (out / 'gpu_check.json').exists(), done.stderr[-4000:]
    result = json.loads((out / 'gpu_check.json').read_text())
    rows = {name: row for group in ('mmcv', 'torch', 'detectors')
            for name, row in result[group].items()}
    return done.returncode, rows


def test_the_device_behaves(on_device):
    """The controls: it refuses, drifts and draws as a GPU does, so the tests below can fail."""
    done = on_device('-c', '''
import torch, torch.nn.functional as F
def step():
    x = torch.linspace(-1, 1, 64, device='cuda').view(1, 1, 8, 8).requires_grad_()
    F.interpolate(x, scale_factor=2.5, mode='bicubic').pow(2).sum().backward()
    return x.grad.cpu()
assert not torch.equal(step(), step()), 'additions by atomics drift'
torch.use_deterministic_algorithms(True)
for call in (step, lambda: torch.ones(3, device='cuda') + torch.ones(3),
             lambda: torch.ones(3, device='cuda').numpy()):
    try:
        call()
    except (RuntimeError, TypeError) as error:
        print(error)
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
''')
    words = done.stdout
    assert 'upsample_bicubic2d_backward does not have a deterministic implementation' in words
    assert 'cuda:0 and cpu' in words and "can't convert cuda:0" in words


TWO_DEVICES = """
import torch
from mmrepro import seeds
first, second = torch.ones(3, device='cuda'), torch.ones(3, device='cuda:1')
try:
    first + second
except RuntimeError as error:
    print(error)
torch.cuda.manual_seed_all(1)
def draw(): return [torch.rand(3, device=one.device).cpu() for one in (first, second, second)]
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
"""


def test_two_devices_have_their_random_numbers(on_device):
    done = on_device('-c', TWO_DEVICES)
    assert 'at least two devices, cuda:0 and cuda:1' in done.stdout


SPARSE = """
import torch
from mmrepro.ops.guard import OperatorGuard
from mmrepro.fingerprint.digest import tensor_digest
words = torch.nn.Embedding(5, 3, sparse=True).cuda()
with OperatorGuard().watch() as guard:
    words(torch.tensor([1, 4, 1]).cuda()).square().sum().backward()
    gradient = words.weight.grad
    matrix = gradient.to_dense().to_sparse()
    assert gradient.is_sparse and not guard.findings, guard.findings
    assert int(tensor_digest(gradient)) == int(tensor_digest(gradient.cpu()))
    torch.sparse.mm(matrix, torch.ones(3, 2).cuda())
print(*(finding.operator for finding in guard.findings))
"""


def test_products_of_sparse_tensors_are_reported(on_device):
    done = on_device('-c', SPARSE)
    assert done.stdout.split() == ['aten::_sparse_addmm']


API = """
import os, torch
del os.environ['CUBLAS_WORKSPACE_CONFIG']
import mmrepro
from mmrepro import on_virtual_ranks
def main():
    if torch.distributed.get_rank() == 0:
        assert not torch.cuda.is_initialized()
    mmrepro.set_random_seed(1, deterministic=True)
    return torch.rand(3, device='cuda').is_cuda
print(on_virtual_ranks(2, main), torch.cuda.is_initialized(), os.environ['CUBLAS_WORKSPACE_CONFIG'])
"""


def test_cuda_starts_when_its_variables_are_set(on_device):
    """Also through the API: cuBLAS reads the variable once, and too late would be refused."""
    done = on_device('-c', API)
    assert done.stdout.split() == ['True', 'True', ':4096:8'], done.stdout


# torch refuses the mode "max" of an embedding bag inside of a kernel that other modes need as well
ALL_BUT = r'^mmcv/|^torch/(?!embedding bag, max$)'


def test_every_operator(on_device, tmp_path):
    code, rows = check(on_device, tmp_path, ALL_BUT)
    bad = {name: row for name, row in rows.items()
           if not row.get('equal') or not row.get('agrees', True) or 'error_text' in row}
    assert code == 0 and not bad, bad
    assert len(rows) > 65
    refusals = {name: row for name, row in rows.items() if 'refused' in row}
    assert len(refusals) > 20
    for name, row in refusals.items():  # also those that torch does not refuse
        operator = row['covers'][0].partition('.')[0]
        assert row['refused'] and operator in row['message'], (name, row)


def test_the_maximum_of_roi_align_is_refused(on_device):
    done = on_device('-c', '''
import torch
from mmrepro import determinism, ops
ops.install()
from mmcv.ops import roi_align
x, boxes = torch.ones(1, 2, 8, 8, device='cuda'), torch.tensor([[0., 1, 1, 5, 5]], device='cuda')
with determinism.deterministic():
    roi_align(x, boxes, 2, 1., 0, 'max')
''', code=1, CUBLAS_WORKSPACE_CONFIG=':4096:8')
    assert "roi_align: pool_mode='max'" in done.stderr.splitlines()[-1]


# Operator -> calls forward and backward, waits forward and backward.
MOST = {'RoIAlign': (132, 134, 2, 2), 'MSDeformAttn': (163, 224, 1, 1), 'NMS': (56, 0, 2, 0),
        'topk': (8, 2, 0, 0), 'dynamic k, 60 objects': (54, 0, 6, 0)}
MOST_TRITON = {'RoIAlign': (6, 6, 0, 0), 'MSDeformAttn': (5, 21, 0, 0), 'NMS': (14, 0, 1, 0),
               'dynamic k, 60 objects': (44, 0, 2, 0)}


@pytest.mark.parametrize('provider, most', [
    pytest.param('torch', MOST, marks=pytest.mark.nightly), ('triton', MOST_TRITON)])
def test_calls_and_waits_are_few(on_device, provider, most):
    if provider == 'triton':
        pytest.importorskip('triton')
    done = on_device(COUNT, '--only', f'^({"|".join(most)})$',
                     '--provider', provider)
    rows = {cells[0]: [int(cell or 0) for cell in cells[1:5]] for cells in table(done.stdout)}
    assert set(rows) == set(most)
    assert [(name, found) for name, found in rows.items()
            if any(a > b for a, b in zip(found, most[name]))] == []


def table(printed):
    """Return the cells of a table in Markdown, without its head."""
    return [[cell.strip() for cell in line.split('|')[1:]] for line in printed.splitlines()
            if line.startswith('|')][2:]


@pytest.mark.parametrize('detector', ['RTMDet', 'Faster R-CNN', 'Mask R-CNN', 'DINO'])
@pytest.mark.nightly
def test_an_iteration_launches_and_waits_as_without_mmrepro(on_device, detector):
    """At most a tenth more calls, and no more waits; the sizes of DINO's levels are one."""
    pytest.importorskip('triton')
    done = on_device(COUNT, '--detectors', '--only', f'^{detector},')
    (_, name, calls, _, waits, *_), *ours = table(done.stdout)
    assert name == 'stock' and int(calls) > 1000
    assert [path for _, path, *_ in ours] == ['compiled mmcv', 'mmcv-lite']
    for _, path, found, _, waited, *_ in ours:
        assert int(found) <= 1.1 * int(calls), (path, found, calls)
        assert int(waited) <= int(waits) + (detector == 'DINO' and path == 'mmcv-lite')


WRITES = '''
import torch
from mmrepro import determinism
from mmrepro.ops import triton
triton.default_requirement = lambda: ''
from mmrepro.ops.triton import write_kernels
write, written = write_kernels.write, []
write_kernels.write = lambda *args: written.append(args) or write(*args)
values, index = torch.arange(8.).view(4, 2), torch.tensor([3, -6, 0, 3])
def put(device):
    target, leaf = torch.zeros(6, 2, device=device), values.clone().to(device).requires_grad_()
    target[index.to(device)] = leaf
    target[index.to(device), index.to(device) % 2] = leaf[:, 0] + 10
    target.square().sum().backward()
    target.detach()[target[:, 0] == 0] = 7.
    return target.detach().cpu(), leaf.grad.cpu()
with determinism.deterministic():
    found = put('cuda')
    assert len(written) == 3  # the gradient of the second is 0 where it wrote
    for one, other in zip(found, put('cpu')):
        assert torch.equal(one, other)
    try:
        torch.zeros(3, device='cuda')[torch.tensor([3], device='cuda')] = torch.ones(1).cuda()
    except IndexError as error:
        print(error)
count = len(written)
put('cuda')
assert len(written) == count
'''


def test_writes_by_index_do_not_sort(on_device):
    """In deterministic mode only; run here by Triton's interpreter."""
    pytest.importorskip('triton')
    done = on_device('-c', WRITES, TRITON_INTERPRET='1', CUBLAS_WORKSPACE_CONFIG=':4096:8')
    assert 'out of range' in done.stdout or 'out of bounds' in done.stdout


FAULTS = '''
import torch
from mmrepro import ops
ops.install()
import mmcv.ops
feature = torch.ones(1, 2, 8, 8, device='cuda')
def align(image):
    box = torch.tensor([[image, 1., 1, 5, 5]], device='cuda')
    return mmcv.ops.roi_align(feature, box, 2, 1., 0, 'avg', True)
with ops.using('triton'):
    for image in (0, 1, 0):
        try:
            print(float(align(image).sum()))
        except RuntimeError as error:
            print(error)
'''


def test_a_bad_roi_is_named_without_a_wait_for_it(on_device):
    pytest.importorskip('triton')
    done = on_device('-c', FAULTS, TRITON_INTERPRET='1')
    first, error, last = done.stdout.splitlines()
    assert first == last == '8.0' and error.startswith('roi_align: rois name image 1, and')


TOPK = """
import torch
from mmrepro import determinism
zero, nan, inf = 0., float('nan'), float('inf')
steps = torch.arange(13 * 9 * 11).view(13, 9, 11) * 7919 % 1000 % 11 - 4
some = torch.tensor([zero, -zero, nan, inf, -inf])
with determinism.deterministic():
    for name in 'float32 float64 float16 int64 uint8 bool'.split():
        dtype = getattr(torch, name)
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
print(torch.topk(same, 2, out=(same.new_empty(0), same.new_empty(0).long()))[1].tolist())
"""


def test_topk_takes_the_lower_index_as_on_a_cpu(on_device):
    """With a kernel that chooses by prefix scans and sorts equal values in reverse."""
    done = on_device('-c', TOPK, CUBLAS_WORKSPACE_CONFIG=':4096:8')
    assert done.stdout.strip() == '[1, 0]', 'the control: without mmrepro the kernel is used as is'


def test_without_replacements_the_check_fails(on_device, tmp_path):
    code, rows = check(
        on_device, tmp_path, r'^torch/(reflection pad|grid sample|cumprod)$',
        'import mmrepro', 'from mmrepro.ops.aten import dispatch',
        'dispatch.active = lambda device: []')
    assert code == 1
    for name in ('reflection pad', 'grid sample'):
        assert 'does not have a deterministic' in rows[name]['error_text']
    assert rows['cumprod']['refused'] is False


# those that resize while they train, sample points and pool adaptively reach what torch refuses
@pytest.mark.nightly
@pytest.mark.parametrize('only', [
    'SOLOv2', 'YOLOX|Faster|Mask R|Cascade|RTMDet|PointRend|DCN|CARAFE',
    'DETR|DINO|Mask2Former|HTC'])
def test_detectors(on_device, tmp_path, only):
    code, rows = check(on_device, tmp_path, f'^detectors/.*({only})')
    assert code == 0 and rows, rows
    assert all(row['equal'] and row['finite'] for row in rows.values()), rows


@pytest.mark.nightly
def test_configs_of_mmdetection(on_device):
    on_device('-m', 'dev.zoo', 'yolo', 'atss', 'foveabox', 'reppoints', 'sabl', '--device', 'cuda',
              cwd=COUNT.parents[1], CUBLAS_WORKSPACE_CONFIG=':4096:8')


@pytest.mark.parametrize('model, options', [
    ('deformable-detr_r50', ()),
    *(pytest.param(model, options, marks=pytest.mark.nightly) for model, options in (
        ('yolox_s', ()), ('faster-rcnn_r50_fpn', ()), ('rtmdet_tiny', ()),
        ('soft-teacher_faster-rcnn_r50', ()),
        # half precision takes minutes on a CPU
        ('yolox_s', ('--amp', 64)))),
    ('tiny', ('--amp', 65536)),
])
def test_training_repeats_and_resumes(on_device, data_root, tmp_path, model, options):
    on_device(FOLDER / 'scenario.py', model, data_root, tmp_path, *options)
    runs = json.loads((tmp_path / 'results.json').read_text())
    bits = {name: {key: run[key] for key in ('data', 'loss', 'weights', 'optimizer')}
            for name, run in runs.items()}
    assert len(bits['saving']['loss']) > 4
    assert bits['workers'] == bits['saving']
    point = len(bits['saving']['loss']) - len(bits['resumed']['loss'])
    assert point > 0
    rest = {key: value[point:] if isinstance(value, list) else value
            for key, value in bits['saving'].items()}
    assert bits['resumed'] == rest
    assert not any(runs[name]['kernels'] for name in ('saving', 'workers', 'resumed'))
    if 65536 in options:
        assert runs['saving']['scale'] < 65536, 'no step was skipped'
        assert runs['saving']['scale'] == runs['resumed']['scale'] == runs['workers']['scale']
    # the same without the promise: what users see on a GPU
    assert bits['loose']['weights'] != bits['loose again']['weights']
    if model == 'deformable-detr_r50':
        assert runs['saving']['dropouts'], 'nothing was drawn on the device'


PREEMPTED = """
from preempted_runs import Signals, run, settings
from mmrepro.errors import Preempted
both = dict(randomness=dict(deterministic=True))
whole, _ = run(settings('whole', **both))
first, preempted = run(settings('part', **both), hook=Signals(at=6))
assert isinstance(preempted, Preempted)
rest, _ = run(settings('part', **both), resume=True)
assert 0 < len(first.records) < len(whole.records)
assert {**first.records, **rest.records} == whole.records
"""


def test_a_preempted_training_goes_on(on_device, tmp_path):
    on_device('-c', PREEMPTED, cwd=tmp_path)


def test_virtual_ranks_do_not_depend_on_the_number_of_processes_and_devices(on_device, tmp_path):
    """Two ranks of a process use its device, which is not the first one."""
    done = on_device(FOLDER / 'virtual.py', tmp_path, 4)
    assert 'cuda:1' in done.stderr
    assert set(json.loads(done.stdout.splitlines()[-1]).values()) == {True}, done.stdout


@pytest.mark.nightly
def test_the_kernel_is_named(on_device, data_root, tmp_path):
    """Without deterministic=True the first kernel that adds as threads arrive is found."""
    from mmrepro.demo.shipped_configs import demo_config
    cfg = demo_config('yolox_s', data_root)
    cfg.randomness.deterministic = False
    cfg.dump(tmp_path / 'config.py')
    done = on_device('-m', 'mmrepro', 'localise', tmp_path / 'config.py', '--iters', 1,
                     '--work-dir', tmp_path / 'work', '--no-values', code=1, cwd=tmp_path)
    assert 'aten.convolution_backward.default' in done.stdout
    assert 'order of additions on the device' in done.stdout


KERNELS = '''
import torch
from mmrepro import ops
from mmrepro.ops import triton
ops.install()
import mmcv.ops
def wave(*shape):
    return torch.linspace(-9, 9, torch.Size(shape).numel()).sin().mul(40).frac().view(shape)
feature, box = wave(1, 4, 9, 13), torch.tensor([[0., 8, 8, 60, 40], [0, 30, 2, 66, 70]])
value, location, share = wave(1, 12, 2, 4), wave(1, 3, 2, 1, 2, 2) * .4 + .5, wave(1, 3, 2, 1, 2)


def bits(device):
    leaves = [tensor.to(device).requires_grad_() for tensor in (feature, value, location, share)]
    aligned = mmcv.ops.roi_align(leaves[0], box.to(device), (2, 2), 1 / 8, 0, 'avg', True)
    attended = mmcv.ops.multi_scale_deform_attn.MultiScaleDeformableAttnFunction.apply(
        leaves[1], torch.tensor([[3, 4]], device=device), torch.tensor([0], device=device),
        leaves[2], leaves[3], 64)
    ((aligned ** 2).sum() + (attended ** 2).sum()).backward()
    kept = mmcv.ops.nms(wave(40, 4).to(device) + torch.tensor([0, 0, 9, 9], device=device),
                        wave(40, 1)[:, 0].to(device), 0.3)[1]
    results = aligned, attended, kept, *(leaf.grad for leaf in leaves)
    return [tensor.detach().cpu() for tensor in results]


expected = bits('cuda')
launched = []
with ops.using('triton'):
    for name in triton.FUSED:
        assert ops.provider_of(name, 'cuda') == 'triton'
    from triton.runtime.interpreter import InterpretedFunction
    run = InterpretedFunction.run
    def counted(self, *args, **kwargs):
        launched.append(self.fn.__name__)
        return run(self, *args, **kwargs)
    InterpretedFunction.run = counted
    for found, wanted in zip(bits('cuda'), expected):
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
print(*sorted(set(launched)))
'''


def test_kernels_on_the_device(on_device):
    """mmcv's own functions reach the kernels on CUDA, run here by Triton's interpreter."""
    pytest.importorskip('triton')
    done = on_device('-c', KERNELS, TRITON_INTERPRET='1')
    assert done.stdout.split()[-11:] == [
        '_add_kernel', '_attend_kernel', '_conflict_kernel', '_convert_kernel', '_filter_kernel',
        '_list_kernel', '_mean_kernel', '_peak_kernel', '_scatter_kernel', '_slope_kernel',
        '_sweep_kernel']
