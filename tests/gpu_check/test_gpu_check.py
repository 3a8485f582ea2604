"""The check for a GPU, run on the CPU: the same code, small."""
from __future__ import annotations

import json
import os
import re

import pytest
import torch

from mmrepro import determinism, ops
from mmrepro.cli import gpu_check
from mmrepro.gpu_check import (
    cases_mmcv,
    cases_torch,
    check_loop,
    check_report,
    detectors,
    hardware,
    operator_check,
)
from mmrepro.gpu_check.operator_cases import Inputs, OperatorCall, OperatorCase
from mmrepro.ops import aten


@pytest.fixture(autouse=True)
def clean():
    provider = ops.provider()
    yield
    determinism.disable()
    assert ops.provider() == provider


def test_every_operator_has_a_row():
    covered = {name for case in cases_mmcv.CASES.values() for name in case.covers}
    assert covered == {name for name, row in ops.TABLE.items()
                       if row.target and row.source != 'info.py'}
    covered = {name for case in cases_torch.CASES.values() for name in case.covers}
    assert covered == {row.operator for row in aten.TABLE}


def check(case, **kwargs):
    return operator_check.check(case, 'cpu', True, times=3, **kwargs)


@pytest.mark.parametrize('name', ['RoIAlign', 'DCNv2', 'NMS', 'CARAFENaive', 'focal loss, sigmoid'])
def test_operators_of_mmcv_agree_and_repeat(name):
    row = check(cases_mmcv.CASES[name])
    assert row['agrees'] and row['equal'] and row['times'] == 3, row
    assert check_report.verdict(row) == 'equal' and row['ms'] > 0


@pytest.mark.parametrize('name', ['bilinear resize', 'grid sample', 'topk', 'max unpool', 'gather'])
def test_operators_of_torch_agree_and_repeat(name):
    row = check(cases_torch.CASES[name], against='flags')
    assert row['agrees'] and row['equal'] and row['default'] == 'torch', row


def test_compiled_kernels_are_the_default_where_they_are(compiled):
    with compiled():
        pass
    row = check(cases_mmcv.CASES['RoIAlign'], against='compiled')
    assert row['default'] == 'compiled mmcv' and row['default_ms'] > 0 and row['equal']
    row = check(cases_mmcv.CASES['RoIPool'], against='compiled')
    assert 'RuntimeError' in row['default_error'] and row['equal']  # mmcv has no such CPU kernel


@pytest.fixture
def compiled():
    if not operator_check.has_compiled_kernels():
        pytest.skip('no compiled mmcv here')
    return lambda: ops.using('compiled')


@pytest.mark.nightly
def test_every_row_of_torch_agrees_with_what_cuda_would_run(monkeypatch):
    rows = [row._replace(devices=('cpu',), until=(99, 0)) for row in aten.TABLE if row.target]
    monkeypatch.setattr(aten.dispatch, 'TABLE', rows)
    for name, case in cases_torch.CASES.items():
        row = check(case, against='flags', seconds=.2)
        assert row['equal'] and row.get('agrees', True), (name, row)


def test_a_difference_and_an_error_are_named():
    calls = iter(range(99))

    def restless(x):
        return x * 2, x + next(calls) * 1e-6

    def wrong(x):
        return x * (2.01 if x.dtype == torch.float32 else 2.)

    row = check(OperatorCase(('x',), lambda s: OperatorCall({}, dict(x=s.normal(64, 8)), restless)))
    assert not row['equal'] and row['differs'] == ['output 1']
    assert check_report.verdict(row) == 'DIFFERS: output 1'
    row = check(OperatorCase(('x',), lambda s: OperatorCall(dict(x=s.normal(64, 8)), {}, wrong)))
    assert row['equal'] and not row['agrees'] and 'WRONG: output' in check_report.verdict(row)
    # torch refuses what it cannot do; here it is asked for something that it can
    row = check(cases_torch.CASES['histogram'])
    assert row['refused'] is False and 'torch refuses' in check_report.verdict(row)


def test_nan_and_zeros_of_both_signs_are_compared_as_bits():
    first = dict(a=torch.tensor([float('nan'), 0.]))
    assert operator_check._unequal(first, dict(a=torch.tensor([float('nan'), 0.]))) == []
    assert operator_check._unequal(first, dict(a=torch.tensor([float('nan'), -0.]))) == ['a']
    assert operator_check._unequal(first, dict(a=torch.tensor([float('nan')]))) == ['a']
    both = torch.tensor([float('nan'), 1.])
    assert operator_check._error(both, both.clone()) == 0
    assert operator_check._error(torch.tensor([float('nan'), 1.]), torch.tensor([0., 1.])) == 1


def test_the_first_difference_of_two_runs():
    labels = [('loss', 'loss_cls'), ('loss', 'loss'), ('gradient of', 'backbone'),
              ('gradient of', 'head'), ('weight', 'backbone'), ('weight', 'head')]

    def run(*changed):
        digests = torch.zeros(3, 6, dtype=torch.int64)
        for position in changed:
            digests[position] = 1
        return detectors.DetectorRun([labels] * 3, list(digests), [1.], 1.)

    plain = run()
    assert detectors.first_difference(plain, run()) == ''
    assert detectors.first_difference(plain, run((2, 4))) == 'iteration 3: weight backbone'
    assert detectors.first_difference(plain, run((1, 2), (1, 3), (1, 4), (2, 0))) == (
        'iteration 2: gradient of head and 1 of 2 others')
    assert detectors.first_difference(plain, run((0, 0), (0, 1), (0, 2))) == (
        'iteration 1: loss loss_cls and 1 of 2 others')
    other = plain._replace(labels=[labels, [*labels[:-1], ('weight', 'neck')], labels])
    assert detectors.first_difference(plain, other) == (
        'iteration 2: only one run has weight head, weight neck')


def test_the_time_is_kept_and_what_does_not_fit_is_named():
    now = [0.]
    limit = check_loop.Budget(10., lambda: now[0])
    assert limit.allows() and limit.part(.5).left == 5
    now[0] = 4.
    limit.spent(4.)
    assert limit.allows()
    now[0] = 7.
    assert not limit.allows()
    row = check_loop.run_row(lambda: {}, limit, 'cpu')
    assert check_report.verdict(row) == 'left out: no time left'


def test_a_crash_is_a_result():
    def crash():
        raise RuntimeError('no such kernel\nand more')

    row = check_loop.run_row(crash, check_loop.Budget(9.), 'cpu')
    assert check_report.verdict(row) == 'failed: RuntimeError: no such kernel' and row['traceback']


def test_the_command_writes_both_files(tmp_path, capsys):
    code = gpu_check.main(['--out', str(tmp_path), '--device', 'cpu', '--quick', '--size', '64',
                           '--only', '^(detectors/YOLOX|mmcv/RoIPool|torch/roll)$'])
    result = json.loads((tmp_path / 'gpu_check.json').read_text())
    text = (tmp_path / 'gpu_check.md').read_text()
    assert code == 0 and result['summary']['equal'] == 3, result
    assert list(result['detectors']) == ['YOLOX'] and list(result['mmcv']) == ['RoIPool']
    row = result['detectors']['YOLOX']
    assert row['equal'] and row['iterations'] == 2 and row['ratio'] > 0
    assert '| YOLOX | equal |' in text and '| roll | equal |' in text
    assert str(tmp_path) not in text + json.dumps(result)
    assert 'YOLOX' in capsys.readouterr().out


def test_cublas_is_told_before_cuda_starts(tmp_path, monkeypatch):
    """Afterwards the policy would refuse: it might have been read already."""
    monkeypatch.delenv('CUBLAS_WORKSPACE_CONFIG', raising=False)
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    arguments = ['--out', str(tmp_path), '--device', 'cpu', '--quick', '--only', 'torch/roll']
    assert gpu_check.main(arguments) == 0
    monkeypatch.setenv('CUBLAS_WORKSPACE_CONFIG', ':16:8')
    assert gpu_check.main(arguments) == 0 and os.environ['CUBLAS_WORKSPACE_CONFIG'] == ':16:8'


def test_without_a_gpu_it_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert gpu_check.main(['--out', str(tmp_path)]) == 2
    assert '--device cpu' in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_machine_is_described_without_its_name():
    import getpass
    import platform
    facts = hardware.describe('cpu')
    assert {'cpu', 'torch', 'python', 'mmdet', 'mmrepro'} <= set(facts)
    words = set(re.split(r'[^\w.-]+', ' '.join(map(str, facts.values()))))
    assert not words & {platform.node(), getpass.getuser()}


def test_inputs_collide_and_are_the_same_every_time():
    first, second = (cases_mmcv.CASES['RoIAlign'].make(Inputs(False)) for _ in range(2))
    assert torch.equal(first.fixed['rois'], second.fixed['rois'])
    assert torch.equal(first.leaves['feature'], second.leaves['feature'])
    centres = (first.fixed['rois'][:, 1:3] + first.fixed['rois'][:, 3:]) / 2
    assert len(torch.unique((centres / 32).round(), dim=0)) < len(centres) / 8
