"""action.yml: what its script makes of the exit codes of ``mmrepro golden check``."""
import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ACTION = yaml.safe_load((ROOT / 'action.yml').read_text(encoding='utf-8'))


def test_every_input_is_described_and_reaches_the_script():
    step, = ACTION['runs']['steps']
    assert ACTION['runs']['using'] == 'composite' and step['shell'] == 'bash'
    for name, given in ACTION['inputs'].items():
        assert given['description'] and 'default' in given
        assert f'inputs.{name} ' in str(step['env']) + step['working-directory']
    assert '${{' not in step['run']  # an input that is part of the script could run anything
    page = (ROOT / 'docs' / 'how-to' / 'golden.md').read_text(encoding='utf-8')
    assert all(f'| `{name}` |' in page for name in ACTION['inputs'])


@pytest.mark.parametrize('code, said, outcome', [
    (0, 'EQUAL: a', 'equal'), (1, 'DIFFERENT after 2', 'different'), (2, '', 'error'),
    (3, 'NO GOLDEN for this machine', 'missing'), (0, 'NO GOLDEN for this machine', 'missing')])
def test_the_outcome(tmp_path, code, said, outcome):
    fake = tmp_path / 'mmrepro'
    fake.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\necho "{said}"\nexit {code}\n')
    fake.chmod(0o755)
    env = dict(os.environ, PATH=f'{tmp_path}:{os.environ["PATH"]}', GOLDENS='a folder',
               CONFIGS='one.py two.py', MISSING='pass', RUNNER_TEMP=str(tmp_path),
               GITHUB_OUTPUT=str(tmp_path / 'out'), GITHUB_STEP_SUMMARY=str(tmp_path / 'summary'))
    done = subprocess.run(['bash', '-eo', 'pipefail', '-c', ACTION['runs']['steps'][0]['run']],
                          env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert (tmp_path / 'arguments').read_text() == (
        'golden check one.py two.py --goldens a folder --missing pass\n')
    assert (tmp_path / 'out').read_text() == f'outcome={outcome}\n'
    assert said in (tmp_path / 'summary').read_text()
