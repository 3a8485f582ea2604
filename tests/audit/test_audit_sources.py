"""What the audit reads out of the user's own files."""
from __future__ import annotations

import textwrap

import pytest
from mmengine.config import Config

from mmrepro.audit import CHANGES, HINT, MAY, Subject, audit
from mmrepro.audit.sources import Source

# rule -> (what triggers it, what looks like it and does not, severity)
FILES = {
    'foreign-generator': (
        ['np.random.default_rng()', 'default_rng(None)', 'random.SystemRandom().random()',
         'os.urandom(4)', 'random.seed()', 'secrets.token_bytes(4)', 'torch.seed()',
         'np.random.RandomState(seed=None)'],
        ['np.random.rand(3)', 'random.random()', 'torch.rand(3)', 'os.path.join("a")',
         'self.default_rng()'], CHANGES),
    'kept-generator': (
        ['np.random.default_rng(3)', 'random.Random(0)', 'torch.Generator()'],
        ['np.random.default_rng()'], MAY),
    'reseeding': (
        ['np.random.seed(5)', 'random.seed(i)', 'torch.manual_seed(1)'],
        ['generator.manual_seed(1)', 'seed(5)'], MAY),
    'clock': (
        ['time.time()', 'datetime.datetime.now()'], ['time.sleep(1)', 'self.time()'], HINT),
    'set-order': (
        ['for x in set(names): pass', 'list({a, b})', '[x for x in set(a) | set(b)]',
         'names = set(a)\n    return list(names)', '",".join({a, b})', 'set(a).pop()',
         'random.choice(tuple(set(a)))', 'first, = iter(set(a))', '[*set(a)]'],
        ['sorted(set(a))', 'len(set(a))', 'x in set(a)', 'for x in {1, 2}: pass',
         'for x in sorted({a, b}): pass', 'any(x for x in set(a))', 'list(set(range(3)))',
         'for x in dict.fromkeys(a): pass'], MAY),
    'hash-order': (['hash(name)'], ['hashlib.sha256(b"")', 'self.hash(name)'], MAY),
    'unsorted-listing': (
        ['os.listdir(a)', 'for x in glob.glob(a): pass', 'list(Path(a).iterdir())',
         'names = os.listdir(a)\n    return names', 'list(Path(a).rglob("*.png"))',
         'mmengine.scandir(a)'],
        ['sorted(os.listdir(a))', 'len(os.listdir(a))', 'x in os.listdir(a)',
         'names = os.listdir(a)\n    names.sort()',
         'names = os.listdir(a)\n    names = sorted(names)',
         'sorted(x for x in os.listdir(a) if x)'], MAY),
    'completion-order': (
        ['for f in as_completed(futures): pass', 'pool.imap_unordered(f, a)'],
        ['pool.map(f, a)', 'pool.imap(f, a)'], MAY),
    'switches': (
        ['torch.backends.cudnn.benchmark = True', 'torch.use_deterministic_algorithms(False)',
         'torch.set_num_threads(4)', 'torch.backends.cudnn.deterministic = False'],
        ['torch.backends.cudnn.benchmark = False', 'torch.use_deterministic_algorithms(True)',
         'torch.backends.cudnn.deterministic = True'], CHANGES),
    'uninitialised': (
        ['torch.empty(3)', 'np.empty(3)', 'x.new_empty(3)'],
        ['torch.empty(3).normal_()', 'nn.Parameter(torch.empty(3))', 'torch.zeros(3)'], HINT),
    'worker-state': (
        ['class A(BaseTransform):\n        def transform(self, r):\n            self.n += 1',
         'class A(BaseTransform):\n        def transform(self, r):\n            '
         'self.cache.append(r)',
         '@TRANSFORMS.register_module()\n    class A:\n        def __call__(self, r):\n'
         '            self.seen[r] = 1',
         'class A(BaseDataset):\n        def __getitem__(self, i):\n            '
         'self.last = self.last + i'],
        ['class A(BaseTransform):\n        def __init__(self):\n            self.n = 0',
         'class A(BaseTransform):\n        def transform(self, r):\n            n = self.n + 1',
         'class A:\n        def transform(self, r):\n            self.n += 1'], MAY),
    'kept-state': (
        ['class A(nn.Module):\n        def forward(self, x):\n            self.n += 1',
         'class A(BaseDetector):\n        def loss(self, x):\n            self.h.append(x)',
         'class A(Hook):\n        def after_train_iter(self, r):\n            self.n += 1'],
        ["class A(nn.Module):\n        def __init__(self):\n            "
         "self.register_buffer('n', x)\n        def forward(self, x):\n            self.n += 1",
         'class DropBlock(nn.Module):\n        def forward(self, x):\n            self.iter_cnt '
         '+= 1',
         'class A(nn.Module):\n        def train(self, x):\n            self.n += 1'], MAY),
}
HEAD = '''
import datetime, glob, hashlib, os, random, secrets, time
import mmengine
import numpy as np
import torch
from concurrent.futures import as_completed
from numpy.random import default_rng
from pathlib import Path
from torch import nn


def function(self, a, b, x, r, i, name, futures, pool, f, generator, seed, sorted=sorted):
    '''
CASES = [(rule, code, True) for rule, (bad, _, _) in FILES.items() for code in bad] + [
    (rule, code, False) for rule, (_, good, _) in FILES.items() for code in good]


def findings(tmp_path, monkeypatch, text):
    (tmp_path / 'my_plugin.py').write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    cfg = Config(dict(custom_imports=dict(imports=['mmrepro', 'my_plugin'],
                                          allow_failed_imports=False),
                      randomness=dict(seed=1, deterministic=True)))
    return audit(Subject(cfg, env={'OMP_NUM_THREADS': '1'}))


@pytest.mark.parametrize('rule, code, expected', CASES)
def test_a_line_of_code(rule, code, expected, tmp_path, monkeypatch):
    text = HEAD + textwrap.dedent(code).replace('\n', '\n') + '\n'
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


def test_a_line_can_be_excused(tmp_path, monkeypatch):
    text = 'import os\nos.urandom(1)  # mmrepro: ignore{}\n'
    for excuse, count in (('', 0), ('[foreign-generator]', 0), ('[clock, foreign-generator]', 0),
                          ('[clock]', 1)):
        assert len(findings(tmp_path, monkeypatch, text.format(excuse))) == count


def test_a_file_that_is_not_python_is_named(tmp_path, monkeypatch):
    found = findings(tmp_path, monkeypatch, 'def (:\n')
    assert [f.rule for f in found] == ['unreadable'] and 'SyntaxError' in found[0].what


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


def test_aliases_are_resolved():
    import ast
    source = Source('', '', ast.parse('import numpy.random as r\nfrom os import path as p\n'
                                      'import torch.nn.functional'))
    names = [source.full_name(ast.parse(text, mode='eval').body)
             for text in ('r.seed', 'p.join', 'torch.nn.functional.pad', 'f().x')]
    assert names == ['numpy.random.seed', 'os.path.join', 'torch.nn.functional.pad', '?.x']
