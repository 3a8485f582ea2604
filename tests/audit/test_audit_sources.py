"""What the audit reads out of the user's own files."""
import textwrap

import pytest
from audit_sources import FILES
from mmengine.config import Config

from mmrepro.audit import CHANGES, Subject, findings_of

HEAD = '''
import datetime, glob, hashlib, os, queue, random, secrets, threading, time
import mmengine
import numpy as np
import torch
from concurrent.futures import ThreadPoolExecutor, as_completed
from numpy.random import default_rng
from pathlib import Path
from torch import nn
from torch.optim import SGD
from . import state

SEEN = []
COUNT = 0


def function(self, a, b, x, r, i, name, futures, pool, f, generator, seed, sorted=sorted):
    '''
CASES = [(rule, code, True) for rule, (bad, _, _) in FILES.items() for code in bad] + [
    (rule, code, False) for rule, (_, good, _) in FILES.items() for code in good]


def findings(tmp_path, monkeypatch, text, **randomness):
    (tmp_path / 'my_plugin.py').write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.syspath_prepend(str(tmp_path))
    cfg = Config(dict(custom_imports=dict(imports=['mmrepro', 'my_plugin'],
                                          allow_failed_imports=False),
                      randomness=dict(seed=1, deterministic=True, **randomness)))
    return findings_of(Subject(cfg, env={'OMP_NUM_THREADS': '1'}))


@pytest.mark.parametrize('rule, code, expected', CASES)
def test_a_line_of_code(rule, code, expected, tmp_path, monkeypatch):
    text = HEAD + textwrap.dedent(code) + '\n'
    found = [f for f in findings(tmp_path, monkeypatch, text) if f.rule == rule]
    assert bool(found) == expected
    if expected:
        assert found[0].where.rpartition(':')[0].endswith('my_plugin.py')
        assert found[0].severity == FILES[rule][2]
        line = int(found[0].where.rpartition(':')[2])
        assert line > HEAD.count('\n')


def test_a_clock_in_a_seed_changes_bits(tmp_path, monkeypatch):
    found = findings(tmp_path, monkeypatch, 'import time\nseed = int(time.time())\n')
    assert [(f.rule, f.severity) for f in found] == [('clock', CHANGES)]


@pytest.mark.parametrize('code, reaches', [
    ("t = time.time()\n    results['img'] = results['img'] * t", "results['img']"),
    ('self.scale = os.getpid() % 7', 'self.scale'), ('return x + time.time()', 'what step returns'),
    ('n = os.getpid()\n    np.random.seed(n)', 'numpy.random.seed'),
    ('x = x * time.perf_counter()\n    return x', 'what step returns'),
    ('start = time.time()\n    took = time.time() - start\n    print(took)', ''),
    ('self.start_time = time.time()', ''), ("log['data_time'] = time.time() - self.start", ''),
    ("path = f'{os.getpid()}.txt'\n    open(path)", ''), ('started = time.perf_counter()', '')])
def test_a_clock_or_a_process_id_that_reaches_a_value_changes_bits(code, reaches, tmp_path,
                                                                  monkeypatch):
    text = f'import os, time\nimport numpy as np\ndef step(self, x, results, log):\n    {code}\n'
    found = [f for f in findings(tmp_path, monkeypatch, text) if f.rule == 'clock']
    if reaches:
        assert [f.severity for f in found] == [CHANGES] and f'it reaches {reaches}' in found[0].what
    else:
        assert all(f.severity == 'hint' for f in found)


def test_a_line_can_be_excused(tmp_path, monkeypatch):
    text = 'import os\nos.urandom(1)  # mmrepro: ignore{}\n'
    for excuse, count in (('', 0), ('[foreign-generator]', 0), ('[clock, foreign-generator]', 0),
                          ('[clock]', 1)):
        assert len(findings(tmp_path, monkeypatch, text.format(excuse))) == count


def test_a_function_of_another_file_counts_where_a_hook_calls_it(tmp_path, monkeypatch):
    (tmp_path / 'my_helpers.py').write_text(
        'N = 0\ndef bump():\n    global N\n    N += 1\ndef unused():\n    global N\n    N = 0\n')
    for call, lines in (('helper()', ['4']), ('x', [])):
        (tmp_path / 'my_plugin.py').write_text(
            'from .my_helpers import bump as helper\nfrom mmengine.hooks import Hook\n'
            f'class A(Hook):\n    def after_train_iter(self, x):\n        return {call}\n')
        monkeypatch.syspath_prepend(str(tmp_path))
        seen = Subject(Config(dict(custom_imports=dict(imports=['my_helpers', 'my_plugin']))))
        found = [f for f in findings_of(seen) if f.rule == 'kept-state']
        assert [f.where.rpartition(':')[2] for f in found] == lines


@pytest.mark.parametrize('code, rules, what', [
    (b'# coding: latin-1\nimport os\nNAME = "\xe9"\nos.urandom(1)\n', ['foreign-generator'], ''),
    (b'NAME = "\xe9"\n', ['unreadable'], ''), (b'NAME = 1\0\n', ['unreadable'], ''),
    (b'def (:\n', ['unreadable'], 'SyntaxError'),
    (b'class A:\n    @classmethod\n    def run(*args):\n        next(*args), next()\n', [], '')])
def test_a_file_is_read_as_python_reads_it(tmp_path, monkeypatch, code, rules, what):
    found = findings(tmp_path, monkeypatch, code)
    assert [f.rule for f in found] == rules and all(what in f.what for f in found)


def test_a_plugin_of_the_users_that_imports_mmrepro_counts(tmp_path, monkeypatch):
    (tmp_path / 'their_plugin.py').write_text('import mmrepro\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    cfg = Config(dict(custom_imports=dict(imports='their_plugin')))
    assert Subject(cfg).attached
    (tmp_path / 'their_plugin.py').write_text('import mm\n')
    assert not Subject(cfg).attached


def test_the_source_of_a_class_that_the_config_names_is_read():
    from mmengine.registry import HOOKS

    cls = type('HookOfThisTest', (), {'__module__': __name__})
    HOOKS.register_module(module=cls, force=True)
    cfg = Config(dict(custom_hooks=[dict(type='HookOfThisTest')]))
    assert [source.path for source in Subject(cfg).sources] == [__file__]
