"""What the audit reads out of the user's own files: lines that it names, and lines like them."""
import textwrap

import pytest
from mmengine.config import Config

from mmrepro.audit import CHANGES, HINT, MAY, Subject, findings_of
from mmrepro.audit.sources import SourceFile


def forward(body):
    return ('class A(nn.Module):\n        def forward(self, x):\n'
            + textwrap.indent(body, ' ' * 12))


def hook(body):
    return forward(body).replace('nn.Module', 'Hook').replace('forward', 'after_train_iter')


# rule -> (what triggers it, what looks like it and does not, severity)
FILES = {
    'foreign-generator': (
        ['np.random.default_rng()', 'default_rng(None)', 'random.SystemRandom().random()',
         'os.urandom(4)', 'random.seed()', 'secrets.token_bytes(4)', 'torch.seed()',
         'np.random.RandomState(seed=None)'],
        ['np.random.rand(3)', 'random.random()', 'torch.rand(3)', 'os.path.join("a")',
         'self.default_rng()'], CHANGES),
    'kept-generator': (
        ['np.random.default_rng(3)', 'random.Random(0)', 'torch.Generator()',
         'class A(Hook):\n        def __init__(self):\n            self.rng = random.Random(0)',
         'class A(SGD):\n        rng = torch.Generator()', 'class A(Hook):\n        n = 0\n'
         '    RNG = np.random.RandomState(0)'],
        ['np.random.default_rng()', 'class A(BaseTransform):\n        def __init__(self):\n'
         '            self.rng = np.random.RandomState(0)', 'class A(nn.Module):\n'
         '        def forward(self, x):\n            return x + random.Random(0).random()'], MAY),
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
    'own-threads': (
        ['threading.Thread(target=f)', 'queue.Queue()', 'ThreadPoolExecutor(2)',
         'for f in as_completed(futures): pass', 'pool.imap_unordered(f, a)'],
        ['pool.map(f, a)', 'pool.imap(f, a)', 'self.Thread()', 'threading.Lock()'], MAY),
    'uninitialized': (
        ['torch.empty(3)', 'np.empty(3)', 'x.new_empty(3)'],
        ['torch.empty(3).normal_()', 'nn.Parameter(torch.empty(3))', 'torch.zeros(3)'], HINT),
    'address': (
        ['self.scale = id(self) % 7', 'np.random.seed(id(x))', 'sorted(a, key=id)',
         'if id(a) < id(b): pass', 'k = id(self)\n    x.add_(k)', 'return x * id(x)'],
        ['seen = {id(a)}', 'names[id(a)] = b', 'if id(a) in names: pass', 'x.id(a)',
         'self.by_id = {id(p): p for p in a}', 'print(id(a))', 'if id(a) == id(b): pass'], MAY),
    'environment': (
        [forward(line) for line in (
            "return x * float(os.environ['GAIN'])", "return x if os.getenv('FAST') else -x",
            "x = x * float(os.environ.get('GAIN', 1))\nreturn x", "return 'FAST' in os.environ",
            'settings = dict(os.environ)\nreturn x')]
        + ["self.gain = float(os.environ.get('GAIN', 1))", "if os.getenv('FAST'): pass",
           'class A(Hook):\n        def before_train(s, r):\n            if os.getenv("A"): r()'],
        [forward(line) for line in (
            "os.environ['GAIN'] = '1'", "os.environ.setdefault('GAIN', '1')",
            "return int(os.environ['LOCAL_RANK'])", "return os.getenv('CUDA_VISIBLE_DEVICES')",
            'return os.cpu_count()')]
        + ["self.log_dir = os.environ['HOME']", "print(os.environ['HOME'])"], MAY),
    # what no self-check repeats: hooks, optimizers, batch samplers
    'kept-state': (
        ['class A(Hook):\n        def after_train_iter(s, r):\n            s.n += 1',
         'class A(Hook):\n        def after_train_iter(self, r):\n            if r < self.best:\n'
         '                self.best = r',
         'class A(SGD):\n        def step(self):\n            self.calls.append(1)',
         '@OPTIMIZERS.register_module()\n    class A(Base):\n        def step(self):\n'
         '            self.n = self.n + 1',
         'class A(BatchSampler):\n        def __iter__(self):\n            self.passes += 1']
        # also in variables of modules and classes
        + [hook(line) for line in (
            'SEEN.append(x)', 'SEEN[x] = 1', 'global COUNT\nCOUNT += 1',
            'global COUNT, B\nCOUNT, B = x, x', 'self.__class__.n += 1', 'type(self).n = x',
            'A.n = x', 'state.count = x', "globals()['COUNT'] = x",
            'x = x + next(SEEN)', "setattr(state, 'count', x)")]
        + [forward('SEEN.append(x)'), forward('global COUNT\nCOUNT += 1')]
        + ['class A(SGD):\n        cache = {}\n        def step(s, i):\n            s.cache[i] = 1',
           'class A(Hook):\n        @classmethod\n        def update(cls, x):\n'
           '            cls.n += x',
           'class A(Hook):\n        def after_train_iter(s, r, cache=[]):\n'
           '            cache.append(r)'],
        [hook(line) for line in (
            'n = self.n + 1', 'SEEN = []\nSEEN.append(x)', 'x[0] = 1', 'return COUNT + 1',
            'torch.backends.cudnn.enabled = x', 'x.add(SEEN)',
            'def inner():\n    n = []\n    n.append(x)\ninner()', 'x = next(iter(SEEN))',
            "setattr(x, 'count', 1)")]
        + [forward('self.n += 1')]
        + ['class A(Sampler):\n        def __iter__(self):\n            self.passes += 1',
         'class A(Hook):\n        n = []\n        def __init__(self):\n            self.n = []\n'
         '            SEEN.append(self)',
         'def f(r):\n        SEEN.append(r)',
         'class A(Hook):\n        def before_train(self, r):\n            self.n += 1',
         'class A(Hook):\n        def after_test_iter(self, r):\n            self.n += 1',
         'class A(Hook):\n        def after_train_iter(self, r):\n            self.now = r',
         'class A(SGD):\n        def step(self):\n            self.state[0] = 1',
         'class EarlyStoppingHook(Hook):\n        def after_val_epoch(self, r):\n'
         '            self.wait_count += 1',
         'class A(Hook):\n        def after_train_iter(self, r):\n            self.n += 1\n'
         '        def after_load_checkpoint(self, r, checkpoint):\n'
         "            self.n = checkpoint['n']"], MAY),
}
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
    assert SourceFile.read(str(tmp_path / 'my_plugin.py')).excused == [2]


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
