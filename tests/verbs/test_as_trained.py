"""The verbs train with the settings, and the kind of memory, that a training of the config has."""
import logging
import os
import re
import sys
from pathlib import Path

import pytest
from faults.tiny import tiny
from mmcv.transforms import BaseTransform
from mmengine.config import Config
from mmengine.registry import TRANSFORMS

from mmrepro.cli import demo, golden, localise, replay, verify
from mmrepro.fingerprint.manifest import read_manifest

CHECKS = ('randomness.self_checks.samples', 'randomness.self_checks.steps')
SHARED = 'the 2 virtual ranks of this process share weights'


class Said(logging.Handler):
    """What mmrepro says, in the output of the process that it is in by now."""

    def emit(self, record):
        print(record.getMessage(), file=sys.stderr, flush=True)


@pytest.fixture
def logs(forked):
    """Paths of the output of all trainings; it says what virtual ranks share."""
    handler, logger = Said(), logging.getLogger('mmrepro')
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    yield forked.logs
    logger.setLevel(before)
    logger.removeHandler(handler)


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = tiny('work')
    cfg.custom_hooks, cfg.env_cfg, cfg.log_level = [], dict(), 'INFO'
    cfg.train_dataloader.dataset.size, cfg.train_cfg.max_epochs = 16, 1
    cfg.randomness.virtual_ranks = 2
    cfg.dump('config.py')
    return 'config.py'


def check(logs, *runs):
    """All trainings shared weights; of those with fingerprints, the manifest has the settings."""
    assert logs
    for log in logs:
        assert SHARED in Path(log).read_text(), Path(log).read_text()
    for run in runs:
        facts = read_manifest(run).facts
        assert [facts[name] for name in CHECKS] == [1000, 1000]
        assert facts['randomness.virtual_ranks.memory'] is None


def test_verify_and_replay(config, logs, capsys):
    assert verify.main([config, '--iters', '2', '--vary', 'process', '--jobs', '1']) == 0
    check(logs, 'work_dirs/verify/reference', 'work_dirs/verify/process')
    out = capsys.readouterr().out
    assert 'no checkpoints and no validation, but for what is varied' in out
    assert 'SAME BITS' in out
    assert replay.main(['work_dirs/verify/process', '--work-dir', 'again']) == 0
    check(logs, 'again')
    assert 'except that no checkpoints are written' in capsys.readouterr().err


def test_golden(config, logs, capsys):
    assert golden.main(['record', config, '--iters', '2']) == 0
    check(logs, 'work_dirs/golden/config')
    assert 'config: small; no validation, no checkpoints' in capsys.readouterr().err


def test_localise_says_what_it_changes(config, logs, capsys):
    assert localise.main([config, '--iters', '2']) == 0
    check(logs)
    facts = read_manifest('work_dirs/localise/A/fingerprints').facts
    assert [facts[name] for name in CHECKS] == [0, 0]
    said, = [line for line in capsys.readouterr().err.splitlines() if 'self_checks=False' in line]
    assert "virtual_ranks.memory='separate'" in said


def test_demo(config, logs):
    assert demo.main(['--config', config, '--virtual-ranks', '2', '--processes', '1,1']) == 0
    check(logs)
    assert len({*logs}) == 2, 'a run is not compared with itself'
    assert 'steps were repeated: same bits\n' in Path(logs[-1]).read_text()


@TRANSFORMS.register_module(force=True)
class Entropy(BaseTransform):
    def transform(self, results):
        results['img'] = results['img'] + os.urandom(1)[0]
        return results


def test_a_finding_of_a_self_check_is_a_verdict(config, logs, capsys):
    """One block and no traceback."""
    cfg = Config.fromfile(config)
    cfg.train_dataloader.dataset.pipeline.insert(1, dict(type='Entropy'))
    cfg.dump(config)
    assert verify.main([config, '--vary', 'process', '--iters', '4', '--json', 'found.json']) == 1
    out, err = capsys.readouterr()
    assert 'DIFFERENT' in out and 'Entropy' in out and 'Traceback' not in out + err
    assert out.count('was loaded twice from the same random numbers') == 1
    # two runs train at once, and either of them may be the first to end
    assert re.search('work_dirs/verify/(reference|process)/output.txt', out)
    assert 'was loaded twice' in Path('found.json').read_text()
