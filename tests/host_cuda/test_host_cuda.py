"""The way that code takes on a GPU, on CUDA devices made of the host (see host_cuda/device.cpp).

Tensors say ``cuda:0`` or ``cuda:1``, kernels that are put in front of torch's for CUDA answer,
tensors of two devices do not mix, each has random numbers of its own, torch refuses there what it
refuses on a GPU, and what adds with atomics there drifts. Not shown: what a GPU's kernels compute,
how fast.
"""
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import host_device  # noqa: E402
import pytest
import scripts
from harness import environment  # noqa: E402
from warm import Warm  # noqa: E402

from mmrepro import ops  # noqa: E402

FOLDER = Path(__file__).parent
COUNT = FOLDER.parents[1] / 'benchmarks' / 'device_calls.py'


@pytest.fixture(scope='module')
def on_device(tmp_path_factory):
    """Run Python in a fork of a process that has the device; check its exit code, return outputs.

    See tests/support/warm.py.
    """
    if host_device.compiler() is None:
        pytest.skip('no C++ compiler to build the device with')
    if ops.provider() == 'compiled':
        pytest.skip('kernels of a compiled mmcv do not know the device; needs mmcv-lite')
    folder = tmp_path_factory.mktemp('host_cuda')
    library = host_device.build(folder)
    variables = host_device.environment(library, environment())
    # not Triton, which reads a variable when it is imported
    warm = Warm(['mmengine.runner', 'matplotlib.pyplot', 'mmcv.ops', 'mmrepro.run.runner'],
                variables)

    def run(*arguments, code=0, cwd=None, **more):
        with open(folder / 'out', 'w+') as out, open(folder / 'err', 'w+') as err:
            ended = warm.popen([sys.executable, *arguments], stdout=out, stderr=err, cwd=cwd,
                               env={**variables, **more}).wait()
            done = subprocess.CompletedProcess(
                arguments, ended, *(Path(file.name).read_text() for file in (out, err)))
        assert code in (None, ended), (done.stdout + done.stderr)[-4000:]
        return done

    yield run
    warm.close()


def check(on_device, out, only, *before):
    """(exit code, rows by name) of ``gpu_check --quick``; ``before`` are lines to run first."""
    script = ('import sys', *before, 'from dev.gpu_check.command import COMMAND, main',
              'from mmrepro import cli', 'sys.exit(cli.run(COMMAND, main=main))')
    done = on_device('-c', '\n'.join(script), '--quick', '--out', out, '--only', only,
                     '--seconds', 1100, code=None)  # a busy machine leaves no row out
    assert (out / 'gpu_check.json').exists(), done.stderr[-4000:]
    result = json.loads((out / 'gpu_check.json').read_text())
    rows = {name: row for group in ('mmcv', 'torch', 'detectors')
            for name, row in result[group].items()}
    return done.returncode, rows


@pytest.fixture(scope='module')
def outcomes(on_device):
    has_triton = importlib.util.find_spec('triton') is not None
    names = [name for name, (_, variables) in scripts.SCRIPTS.items()
             if has_triton or 'TRITON_INTERPRET' not in variables]
    return json.loads(on_device(FOLDER / 'scripts.py', *names).stdout.splitlines()[-1])


@pytest.mark.parametrize('name', scripts.SCRIPTS)
def test_on_the_device(name, outcomes):
    if name not in outcomes:
        pytest.skip('no triton here')
    assert outcomes[name] == ''


# torch refuses the mode "max" of an embedding bag inside of a kernel that other modes need as well
ALL = '^mmcv/|^torch/(?!embedding bag, max$)'
FEW = '^mmcv/(roi_align|nms|deform)|^torch/(?!embedding bag, max$|topk)[a-f]'


@pytest.mark.parametrize('only, least', [
    (FEW, 10), pytest.param(ALL, 65, marks=pytest.mark.nightly)])
def test_every_operator(on_device, tmp_path, only, least):
    code, rows = check(on_device, tmp_path, only)
    bad = {name: row for name, row in rows.items()
           if not row.get('equal') or not row.get('agrees', True) or 'error_text' in row}
    assert code == 0 and not bad, bad
    assert len(rows) > least
    refusals = {name: row for name, row in rows.items() if 'refused' in row}
    assert len(refusals) > least // 4
    for name, row in refusals.items():  # also those that torch does not refuse
        operator = row['covers'][0].partition('.')[0]
        assert row['refused'] and operator in row['message'], (name, row)


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
    done = on_device(COUNT, '--only', f'^({"|".join(most)})$', '--provider', provider)
    rows = {cells[0]: [int(cell or 0) for cell in cells[1:5]] for cells in table(done.stdout)}
    assert set(rows) == set(most)
    assert [(name, found) for name, found in rows.items()
            if any(a > b for a, b in zip(found, most[name]))] == []


def table(printed):
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
    # its exit code is 1 if a config fails or differs
    on_device('-m', 'dev.zoo', 'yolo', 'atss', 'foveabox', 'reppoints', 'sabl', '--device', 'cuda',
              cwd=COUNT.parents[1], CUBLAS_WORKSPACE_CONFIG=':4096:8')


@pytest.mark.parametrize('model, options', [
    *(pytest.param(model, options, marks=pytest.mark.nightly) for model, options in (
        ('deformable-detr_r50', ()), ('yolox_s', ()), ('faster-rcnn_r50_fpn', ()),
        ('rtmdet_tiny', ()), ('soft-teacher_faster-rcnn_r50', ()),
        # half precision takes minutes on a CPU
        ('yolox_s', ('--amp', 64)))),
    ('tiny', ('--amp', 65536)),
])
@pytest.mark.nightly
def test_training_repeats_and_resumes(on_device, data_root, tmp_path, model, options):
    on_device(FOLDER / 'scenario.py', model, data_root, tmp_path, *options)
    runs = json.loads((tmp_path / 'results.json').read_text())
    bits = {name: {key: run[key] for key in ('data', 'loss', 'weights', 'optimizer')}
            for name, run in runs.items()}
    assert len(bits['saving']['loss']) > 4
    point = len(bits['saving']['loss']) - len(bits['resumed']['loss'])
    assert point > 0
    rest = {key: value[point:] if isinstance(value, list) else value
            for key, value in bits['saving'].items()}
    assert bits['resumed'] == rest
    assert not any(runs[name]['kernels'] for name in ('saving', 'resumed'))
    if 65536 in options:
        assert runs['saving']['scale'] < 65536, 'no step was skipped'
        assert runs['saving']['scale'] == runs['resumed']['scale']
    if model == 'tiny':
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
    on_device('-c', PREEMPTED, cwd=tmp_path)  # whose assertions end it with an error


@pytest.mark.nightly
def test_virtual_ranks_do_not_depend_on_the_number_of_processes_and_devices(on_device, tmp_path):
    """Two ranks of a process use its device, which is not the first one."""
    done = on_device(FOLDER / 'virtual.py', tmp_path, 4)
    assert 'cuda:1' in done.stderr
    assert set(json.loads(done.stdout.splitlines()[-1]).values()) == {True}, done.stdout


@pytest.mark.nightly
def test_states_of_ranks_take_no_memory_of_the_device(on_device, tmp_path):
    """A checkpoint within an accumulation cycle holds the gradients of all ranks."""
    done = on_device(FOLDER / 'checkpoint_memory.py', tmp_path)
    peak = {way: max(sum(processes, [])) for way, processes in json.loads(
        done.stdout.splitlines()[-1]).items()}
    # those of one tensor that is copied to the host
    assert peak['ours'] == peak['virtual'] == peak['stock'] == 432
    assert peak['device'] > 20_000, 'the control'


@pytest.mark.nightly
def test_the_kernel_is_named(on_device, data_root, tmp_path):
    """Without deterministic=True the first kernel that adds as threads arrive is found."""
    from mmrepro.demo.dataset import demo_config
    cfg = demo_config('yolox_s', data_root)
    cfg.randomness.deterministic = False
    cfg.dump(tmp_path / 'config.py')
    done = on_device('-m', 'mmrepro', 'localise', tmp_path / 'config.py', '--iters', 1,
                     '--work-dir', tmp_path / 'work', '--no-values', code=1, cwd=tmp_path)
    assert 'aten.convolution_backward.default' in done.stdout
    assert 'order of additions on the device' in done.stdout


@pytest.mark.parametrize('free, said', [
    (1 << 33, 'resumed by a witness at iterations 4, 8: same bits'),
    (0, '0.0 GiB are free on cuda:0, and a second process takes 1.0')], ids=['free', 'full'])
def test_a_witness_runs_on_the_device_and_steps_back_where_memory_is_short(
        on_device, tmp_path, free, said):
    script = ('import sys, torch, mmrepro', 'torch.set_num_threads(1)', 'import witnessed',
              'runner = witnessed.train(witnessed.config(sys.argv[1]))',
              'assert next(runner.model.parameters()).is_cuda')
    on_device('-c', '\n'.join(script), tmp_path, HOST_CUDA_FREE=str(free))
    log, = tmp_path.glob('*/*.log')
    assert said in log.read_text().splitlines()[-1]
