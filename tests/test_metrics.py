"""Metrics of MMDetection have the same value on every CPU, as `guarantees.md` says of each."""
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import environment
from mmdet.evaluation import metrics

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / 'tests' / 'support' / 'metrics_of_mmdet.py'
LEAST = dict(NPY_DISABLE_CPU_FEATURES='', ATEN_CPU_CAPABILITY='default',
             MKL_ENABLE_INSTRUCTIONS='SSE4_2', ONEDNN_MAX_CPU_ISA='SSE41')


def table():
    """Return what is said of each metric: name -> row."""
    text = (ROOT / 'docs' / 'reference' / 'guarantees.md').read_text()
    section = text.partition('## Metrics')[2].partition('\n## ')[0]
    return {name: row for row in section.splitlines() if row.startswith('| `')
            for name in re.findall(r'`(\w+)`', row.split('|')[1])}


def test_every_metric_has_a_row():
    assert {*metrics.__all__} <= table().keys()


def values(*arguments, **variables):
    return subprocess.Popen([sys.executable, str(SCRIPT), *arguments], text=True,
                            stdout=subprocess.PIPE, env={**environment(), **variables})


@pytest.mark.nightly
def test_metrics_are_the_same_with_the_least_instruction_set_and_other_cores():
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
    found = [name for name in __cpu_dispatch__ if __cpu_features__.get(name)]
    least = {**LEAST, 'NPY_DISABLE_CPU_FEATURES': ','.join(found)}
    first, second = values(), values('--cores', '7', **least)
    results = [json.loads(process.communicate(timeout=300)[0]) for process in (first, second)]
    assert first.returncode == second.returncode == 0 and results[0] == results[1]
    measured = {name for name, found in results[0].items() if isinstance(found, dict)}
    rows = {name for name, row in table().items() if '| measured' in row}
    assert measured <= rows
    # these need packages that are not installed everywhere
    assert {name for name in rows if not name.startswith('Dump')} - measured <= {
        'LVISMetric', 'CityScapesMetric', 'CocoPanopticMetric'}
