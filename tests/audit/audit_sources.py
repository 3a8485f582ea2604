"""Lines of user code that the audit names, and lines that look like them."""
from mmrepro.audit import CHANGES, HINT, MAY

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
    'own-threads': (
        ['threading.Thread(target=f)', 'queue.Queue()', 'ThreadPoolExecutor(2)'],
        ['pool.map(f, a)', 'self.Thread()', 'threading.Lock()'], MAY),
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
         'self.last = self.last + i',
         'class A(BaseTransform):\n        def transform(self, r):\n            SEEN.append(r)',
         'class A(BaseTransform):\n        def transform(self, r):\n            SEEN[r] = 1',
         'class A(BaseTransform):\n        def transform(self, r):\n            global COUNT\n'
         '            COUNT += 1'],
        ['class A(BaseTransform):\n        def __init__(self):\n            self.n = 0',
         'class A(BaseTransform):\n        def transform(self, r):\n            n = self.n + 1',
         'class A:\n        def transform(self, r):\n            self.n += 1',
         'class A(BaseTransform):\n        def transform(self, r):\n            SEEN = []\n'
         '            SEEN.append(r)',
         'class A(BaseTransform):\n        def transform(self, SEEN):\n            SEEN[0] = 1',
         'class A(BaseTransform):\n        def transform(self, r):\n            return COUNT + 1',
         'def f(r):\n        SEEN.append(r)'], MAY),
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
