"""How far two runs are apart: relative differences, where they exceed."""
import json
import math
from pathlib import Path

import pytest
from fake_runs import write_log, write_run

from mmrepro import cli
from mmrepro.report.comparison import compare_paths as compare
from mmrepro.report.tolerance import measure, relative


def main(arguments):
    return cli.main(['compare', *arguments])


@pytest.fixture
def runs(tmp_path):
    def make(write=write_run, **second):
        return write(tmp_path / 'a'), write(tmp_path / 'b', **second)
    return make


def test_relative_differences():
    assert relative(0., 0.) == 0 and relative(0., 1e-30) == 1 and relative(-1., 1.) == 2
    assert relative(math.inf, math.inf) == 0 and relative(math.nan, 1.) == math.inf


def test_the_iteration_from_which_a_number_is_too_far(runs):
    result = measure(compare(*runs(since=7, noise=1e-7, field='losses')), 1e-5)
    loss = next(row for row in result.distances if row.field == 'loss')
    # the noise is multiplied by 3 in every iteration
    values = [(2. / (i + 1) + .1 * math.sin(i), 1e-7 * 3.**(i - 7) if i >= 7 else 0.)
              for i in range(20)]
    apart = [size / max(abs(value), abs(value + size)) for value, size in values]
    assert loss.relative == pytest.approx(max(apart)) and loss.at == apart.index(max(apart))
    assert loss.exceeds == next(i for i, distance in enumerate(apart) if distance > 1e-5)
    assert not result.within and f'in iteration {loss.exceeds}' in result.verdict()
    assert any(row.field.startswith('norm of head') for row in result.distances)
    assert any(row.field == 'metric coco/bbox_mAP' for row in result.distances)


def test_exit_codes_and_words(runs, capsys):
    a, b = runs(since=7, noise=1e-9)
    assert main([a, b]) == 1
    assert main([a, b, '--tolerance', '0.1']) == 0
    assert 'WITHIN 0.1' in capsys.readouterr().out
    assert main([a, b, '--tolerance', '1e-12']) == 1
    assert 'BEYOND 1e-12' in capsys.readouterr().out
    assert main([a, b, '--tolerance', '0.1', '--json']) == 0
    assert json.loads(capsys.readouterr().out)['tolerance']['within']
    for wrong in ('0', '-1', 'nan'):
        assert main([a, b, '--tolerance', wrong]) == 2
        assert '--tolerance' in capsys.readouterr().err


def test_other_samples_have_no_tolerance(runs, capsys):
    a, b = runs()
    path = Path(b, 'mmrepro', 'fingerprints.rank0.jsonl')
    text = path.read_text()
    assert '"positions": [6, 7]' in text
    path.write_text(text.replace('"positions": [6, 7]', '"positions": [7, 6]'))
    assert main([a, b, '--tolerance', '1']) == 1
    assert 'batch.positions differs in iteration 3' in ' '.join(capsys.readouterr().out.split())


def test_logs_of_mmengine_have_relative_differences(runs):
    result = measure(compare(*runs(write_log, off=5)), 1e-6)
    assert not result.within and {'loss', 'loss_cls'} <= {row.field for row in result.distances}
