"""The operators' part of the check for a GPU, run on the CPU: the same code, small."""
import contextlib
import json
import os

import pytest
import torch
from command import provider_stays  # noqa: F401  a fixture
from harness import ROOT, fresh

from dev.gpu_check import command, report
from dev.operator_check import (
    cases_compiled,
    cases_mmcv,
    cases_scatter,
    cases_selection,
    cases_torch,
    checking,
    processes,
)
from dev.operator_check.operator_cases import OperatorCall, OperatorCase
from mmrepro.ops import aten
from mmrepro.ops.aten.kernel_table import family_of

pytestmark = pytest.mark.usefixtures('provider_stays')


def test_every_operator_of_torch_has_a_row():
    covered = {name for case in cases_torch.CASES.values() for name in case.covers}
    assert {row.operator for row in aten.TABLE if row.target} <= covered | {
        'adaptive_max_pool3d_backward.grad_input'}  # which no function of torch calls
    rows = {row.operator for row in aten.TABLE}
    assert [name for name in covered - rows if family_of(name) is None] == []


def check(case, **kwargs):
    return checking.check(case, 'cpu', True, times=3, **kwargs)


CASES = {kind: cases for module in (cases_mmcv, cases_torch, cases_compiled, cases_selection)
         for kind, cases in module.CASES.items()} | cases_scatter.SORTED


@pytest.mark.parametrize('name, against', [
    *((name, None) for name in (
        'RoIAlign', 'DCNv2', 'NMS', 'CARAFE', 'focal loss, sigmoid', 'grid sample: sorted',
        'RoIAlign, sampled: sorted')),
    *((name, 'flags') for name in (
        'bilinear resize', 'grid sample', 'topk', 'gather', 'topk, 100 of 50000, 4 rows')),
    *(pytest.param(name, 'flags', marks=pytest.mark.nightly)
      for name in ('cumsum', 'scatter_add'))])
def test_operators_agree_and_repeat(name, against):
    row = check(CASES[name], **(dict(against=against) if against else {}))
    assert row['agrees'] and row['equal'] and row['times'] == 3, row
    assert report.verdict(row) == 'equal' and row['ms'] > 0
    assert name not in cases_torch.CASES or row['default'] == 'torch', row


@pytest.mark.parametrize('halved', [1, 2, None])
def test_bits_on_fewer_multiprocessors_are_said_and_not_judged(halved, monkeypatch):
    """Kernels may be chosen by the number of multiprocessors."""
    class Halves:
        def __init__(self, device):
            pass

        expect = staticmethod(lambda milliseconds: None)
        around = staticmethod(lambda repetition: contextlib.nullcontext())
        takes_multiprocessors = staticmethod(lambda repetition: repetition == halved)

    calls = iter(range(99))

    def run(x):  # the reference, the small input and the first run come before repetition 1
        return x + (next(calls) == 2 + (halved or 1)) * 1e-3

    monkeypatch.setattr(checking, 'Disturbance', Halves)
    row = check(OperatorCase(('x',), lambda s: OperatorCall({}, dict(x=s.normal(64, 8)), run)))
    assert row['equal'] is (halved is not None)
    assert report.verdict(row) == ('DIFFERS: output' if halved is None else
                                   'equal, different bits on fewer multiprocessors')


def test_processes_need_a_gpu_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    assert report.verdict(processes.row('cuda')) == (
        'left out: 1 GPU; NCCL wants one for each process')


@pytest.mark.nightly
def test_collective_operations_on_two_processes_repeat():
    row = processes.row('cpu')
    assert row['equal'] and not row['differs'] and len(row['digest']) == 32


def test_compiled_kernels_are_the_default_where_they_are(compiled):
    row = check(cases_mmcv.CASES['RoIAlign'], against='compiled')
    assert row['default'] == 'compiled mmcv' and row['default_ms'] > 0 and row['equal']
    row = check(cases_mmcv.CASES['RoIPool'], against='compiled')
    assert 'RuntimeError' in row['default_error'] and row['equal']  # mmcv has no such CPU kernel


def test_a_difference_and_an_error_are_named():
    calls = iter(range(99))

    def restless(x):
        return x * 2, x + next(calls) * 1e-6

    def wrong(x):
        return x * (2.01 if x.dtype == torch.float32 else 2.)

    row = check(OperatorCase(('x',), lambda s: OperatorCall({}, dict(x=s.normal(64, 8)), restless)))
    assert not row['equal'] and row['differs'] == ['output 1']
    assert report.verdict(row) == 'DIFFERS: output 1'
    row = check(OperatorCase(('x',), lambda s: OperatorCall(dict(x=s.normal(64, 8)), {}, wrong)))
    assert row['equal'] and not row['agrees'] and 'WRONG: output' in report.verdict(row)
    # torch refuses what it cannot do; here it is asked for something that it can
    row = check(cases_torch.CASES['histogram'])
    assert row['refused'] is False and 'torch refuses' in report.verdict(row)


def test_cublas_is_told_before_cuda_starts(tmp_path, monkeypatch):
    """Afterwards the policy would refuse: it might have been read already."""
    monkeypatch.delenv('CUBLAS_WORKSPACE_CONFIG', raising=False)
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    arguments = ['--out', str(tmp_path), '--device', 'cpu', '--quick', '--only', 'torch/roll']
    assert command.main(arguments) == 0
    monkeypatch.setenv('CUBLAS_WORKSPACE_CONFIG', ':16:8')
    assert command.main(arguments) == 0
    assert os.environ['CUBLAS_WORKSPACE_CONFIG'] == ':16:8'


def test_the_script_of_a_checkout_checks_operators(tmp_path):
    fresh(ROOT / 'tools' / 'gpu_check.py', '--out', tmp_path, '--device', 'cpu', '--quick',
          '--only', '^(mmcv/RoIPool|torch/roll)$')
    result = json.loads((tmp_path / 'gpu_check.json').read_text())
    assert result['summary']['equal'] == 2 and result['detectors'] == {}
    assert list(result['mmcv']) == ['RoIPool'] and list(result['torch']) == ['roll']
    text = (tmp_path / 'gpu_check.html').read_text()
    assert 'Operators of mmcv' in text and '<td>RoIPool</td><td>equal</td><td>4</td>' in text
    assert '<td>roll</td>' in text and str(tmp_path) not in text + json.dumps(result)
