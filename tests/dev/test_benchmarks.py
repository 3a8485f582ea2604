"""The benchmark of operators runs, and keeps rows that it does not measure."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPS = ROOT / 'benchmarks' / 'ops'


def bench(*args, check=True):
    return subprocess.run([sys.executable, OPS, *args], cwd=ROOT, capture_output=True, text=True,
                          check=check)


@pytest.mark.nightly
@pytest.mark.skipif(not Path('/proc/self/clear_refs').exists(), reason='needs Linux')
def test_rows_are_measured_and_others_stay(tmp_path):
    out = tmp_path / 'ops.json'
    args = '--quick', '--repeats', '1', '--only', 'carafe|masked_conv2d', '--out', out
    printed = bench(*args).stdout
    report = json.loads(out.read_text())
    (carafe,), (masked,) = report['features'], report['boxes']
    assert carafe['case'] == 'carafe x2' and min(carafe['seconds']['torch']) > 0
    assert masked['operator'] == 'masked_conv2d' and masked['ratio'] > 0
    page = bench('--page', out).stdout
    for line in page.splitlines():
        assert line in printed
    report['features'] = [{**carafe, 'case': 'another'}, {**carafe, 'peer': 'old'}]
    out.write_text(json.dumps(report))
    bench(*args)
    assert [(row['case'], row['peer']) for row in json.loads(out.read_text())['features']] == [
        ('another', carafe['peer']), ('carafe x2', carafe['peer'])]
    report['machine']['cpu'] = 'a slide rule'
    out.write_text(json.dumps(report))
    refused = bench(*args, check=False)
    assert refused.returncode and "'cpu': 'a slide rule'" in refused.stderr
    assert json.loads(out.read_text()) == report


@pytest.mark.nightly
def test_virtual_ranks_are_measured_and_other_rows_stay(tmp_path, data_root):
    out = tmp_path / 'virtual_ranks.json'
    command = [sys.executable, ROOT / 'benchmarks' / 'virtual_ranks.py', data_root, '--models',
               'yolox_s', '--out', out, '--no-ddp', '--ranks']
    for ranks in ('1', '2'):
        subprocess.run([*command, ranks], check=True, capture_output=True)
    rows = json.loads(out.read_text())['accumulation']
    assert [row['ranks'] for row in rows] == [1, 2]
    for row in rows:
        assert len(row['virtual']['all_seconds'][0]) > 1  # steps
        assert row['time_ratio'] > 0 and row['virtual']['mib'] > 0
