"""Lines of user code that the audit names, and lines that look like them."""
import textwrap

from mmrepro.audit import CHANGES, HINT, MAY


def forward(body):
    """Return a module whose forward method has these lines."""
    return ('class A(nn.Module):\n        def forward(self, x):\n'
            + textwrap.indent(body, ' ' * 12))


def hook(body):
    """Return a hook whose method has these lines."""
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
