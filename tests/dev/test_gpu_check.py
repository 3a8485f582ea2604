"""The check for a GPU, run on the CPU: the same code, small."""
import functools
import json

import pytest
import torch
from command import exit_code_of, provider_stays  # noqa: F401  a fixture

from dev.gpu_check import checking, command, detectors, report, rows

pytestmark = pytest.mark.usefixtures('provider_stays')


def check(*words, **operators):
    """Run the command with these groups of operators beside the detectors; its exit code."""
    return exit_code_of(command.COMMAND, functools.partial(command.main, operators=operators),
                        *words)


def test_the_first_difference_of_two_runs():
    labels = [('loss', 'loss_cls'), ('loss', 'loss'), ('gradient of', 'backbone'),
              ('gradient of', 'head'), ('weight', 'backbone'), ('weight', 'head')]

    def run(*changed):
        digests = torch.zeros(3, 6, dtype=torch.int64)
        for position in changed:
            digests[position] = 1
        return detectors.DetectorRun([labels] * 3, list(digests), [1.], [1.])

    plain = run()
    assert detectors.first_difference(plain, run()) == ''
    assert detectors.first_difference(plain, run((2, 4))) == 'iteration 3: weight backbone'
    assert detectors.first_difference(plain, run((1, 2), (1, 3), (1, 4), (2, 0))) == (
        'iteration 2: gradient of head and 1 of 2 others')
    assert detectors.first_difference(plain, run((0, 0), (0, 1), (0, 2))) == (
        'iteration 1: loss loss_cls and 1 of 2 others')
    other = plain._replace(labels=[labels, [*labels[:-1], ('weight', 'neck')], labels])
    assert detectors.first_difference(plain, other) == (
        'iteration 2: weight head and 1 of 2 others')


def test_the_time_is_kept_and_what_does_not_fit_is_named():
    now = [0.]
    limit = checking.Budget(10., lambda: now[0])
    assert limit.allows('torch') and limit.part(.5).left == 5
    now[0] = 4.
    limit.spent(4., 'torch')
    assert limit.allows('torch')
    now[0] = 7.
    # a long row leaves out those of its own kind only
    assert not limit.allows('torch') and limit.allows('mmcv')
    row = checking.run_row(lambda: {}, limit, 'cpu', 'torch')
    assert report.verdict(row) == 'left out: no time left'


def test_a_crash_is_a_result():
    def crash():
        raise RuntimeError('no such kernel\nand more')

    row = checking.run_row(crash, checking.Budget(9.), 'cpu')
    assert report.verdict(row) == 'failed: RuntimeError: no such kernel' and row['traceback']


def test_the_command_writes_both_files(tmp_path, capsys):
    code = check('--out', tmp_path, '--device', 'cpu', '--quick', '--size', '64',
                 '--only', '^(detectors/YOLOX|mmcv/RoIPool)$')
    result = json.loads((tmp_path / 'gpu_check.json').read_text())
    text = (tmp_path / 'gpu_check.html').read_text()
    assert code == 0 and result['summary']['equal'] == 1, result
    assert list(result['detectors']) == ['YOLOX'] and 'mmcv' not in result
    row = result['detectors']['YOLOX']
    assert row['equal'] and row['iterations'] == 2 and row['ratio'] > 0
    assert '<td>YOLOX</td><td>equal</td><td>2</td><td>64</td>' in text
    assert str(tmp_path) not in text + json.dumps(result)
    assert 'YOLOX' in capsys.readouterr().out


@pytest.mark.parametrize('words, said', [
    ([], 'the following arguments are required: --out'),
    (['--out', 'OUT', '--device', 'cpu', '--only', '^mmcv/'], '--only ^mmcv/: no row matches'),
    (['--out', 'OUT', '--only', '['], '--only [: not a regular expression'),
    (['--out', 'OUT/file/w'], 'OUT/file/w: cannot be made')])
def test_wrong_usage_is_one_line(words, said, tmp_path, capsys):
    (tmp_path / 'file').touch()
    assert check(*(word.replace('OUT', str(tmp_path)) for word in words)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(lines) == 1 and said.replace('OUT', str(tmp_path)) in lines[0]
    assert [path.name for path in tmp_path.iterdir()] == ['file']


def test_rows_of_the_caller_are_run_and_shown(tmp_path, capsys):
    seen = []

    def drifts(settings):
        seen.append(settings)
        return dict(equal=False, differs=['output'], ms=2.5)

    columns = ('ms', rows.cell('ms', '.2f')), ('error', rows.cell('error', '.1e'))
    group = rows.RowGroup(
        'Mine', 'operator', columns,
        lambda settings, time_is_left: dict(drifting=functools.partial(drifts, settings)))
    arguments = ['--out', str(tmp_path), '--device', 'cpu', '--quick', '--only', '^mine/']
    assert check(*arguments, mine=group) == 1
    assert seen == [rows.Settings('cpu', True, 2, 128)]
    result = json.loads((tmp_path / 'gpu_check.json').read_text())
    assert result['mine']['drifting']['ms'] == 2.5 and result['detectors'] == {}
    assert result['summary']['unequal'] == result['summary']['rows'] == 1
    text = (tmp_path / 'gpu_check.html').read_text()
    assert '1 of 1 rows ran: 0 gave equal bits, 1 did not, 0 gave equal bits that are wrong' in text
    assert '<h2>Mine</h2>' in text and '<th>ms</th><th>error</th>' in text
    assert '<td>drifting</td><td>DIFFERS: output</td><td>2.50</td><td></td>' in text
    assert '1 of 1 rows ran: ' in capsys.readouterr().out
    assert check(*arguments, '--seconds', '0', mine=group) == 3
    odd = checking._summary([dict(equal=True, finite=False), dict(equal=True)], 2)
    assert (odd['equal'], odd['unequal'], odd['wrong']) == (1, 0, 1)


@pytest.mark.parametrize('missing, arguments, said', [
    ('torch.cuda.is_available', [], '--device cpu'),
    ('dev.gpu_check.command.has_mmdet', ['--device', 'cpu'], 'pip install "mmcv-lite<2.2" mmdet')])
def test_without_a_gpu_or_mmdetection_it_says_so(tmp_path, capsys, monkeypatch, missing, arguments,
                                                 said):
    monkeypatch.setattr(missing, lambda: False)
    assert check('--out', tmp_path, *arguments) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_digests_of_two_processes_are_compared():
    machine = dict(gpu='H100', torch='2.13')
    other = dict(machine=machine, mmcv={'NMS': dict(digest='1')})
    same, off, elsewhere, missing = (dict(equal=True, digest=digest) for digest in '1221')
    checking.compare_digests(same, 'mmcv', 'NMS', machine, other)
    checking.compare_digests(off, 'mmcv', 'NMS', machine, other)
    checking.compare_digests(elsewhere, 'mmcv', 'NMS', dict(machine, gpu='H200'), other)
    checking.compare_digests(missing, 'mmcv', 'RoIAlign', machine, other)
    assert [report.verdict(row) for row in (same, off, elsewhere, missing)] == [
        'equal, also in another process', 'DIFFERS from the other process',
        'equal, different bits on the other machine', 'equal']
    assert [row['equal'] for row in (same, off, elsewhere, missing)] == [True, False, True, True]


def test_the_digest_of_a_run_follows_every_bit():
    def run(changed):
        digests = torch.zeros(2, 3, dtype=torch.int64)
        digests[1, 2] = changed
        return detectors.DetectorRun([[('loss', 'a')]] * 2, list(digests), [1.], [3., 1., 2., 4.])
    assert run(0).digest() == run(0).digest() != run(1).digest()
