"""Calls in the source of a transform, module, sampler or hook that make runs differ."""
from __future__ import annotations

from ..fingerprint.generator_states import CLOCK, ENTROPY, PROCESS_ID

# rule; which calls: None: all, False: without an argument (or with None), True: with an argument;
# what is said of the call; full dotted names (import aliases resolved), as in `fnmatch`
CALLS: tuple[tuple[str, bool | None, str, tuple[str, ...]], ...] = (
    # generators that the operating system seeds
    ('foreign-generator', False, 'seeded by the system', (
        'numpy.random.default_rng', 'numpy.random.RandomState', 'numpy.random.PCG64',
        'numpy.random.Philox', 'numpy.random.SeedSequence', 'numpy.random.seed', 'random.Random',
        'random.seed')),
    ('foreign-generator', None, 'seeded by the system', (
        'torch.seed', 'torch.cuda.seed', 'torch.cuda.seed_all')),
    ('foreign-generator', None, 'random numbers of the system', (
        'random.SystemRandom', *ENTROPY, 'secrets.*')),
    # generators kept by user code: their state lives in an object, and objects live in workers
    ('kept-generator', True, 'a generator of its own', (
        'numpy.random.default_rng', 'numpy.random.RandomState', 'random.Random')),
    ('kept-generator', None, 'a generator of its own', ('torch.Generator', )),
    # seeding of the generators that everything else draws from
    ('reseeding', True, 'moves the global generator', ('numpy.random.seed', 'random.seed')),
    ('reseeding', None, 'moves the global generator', (
        'torch.manual_seed', 'torch.random.manual_seed', 'torch.cuda.manual_seed',
        'torch.cuda.manual_seed_all')),
    ('clock', None, 'different in every run', (
        'uuid.uuid1', 'uuid.uuid4', 'threading.get_ident', *CLOCK, *PROCESS_ID)),
    # threads and processes: which of them comes first is up to the operating system
    ('own-threads', None, 'in the order of completion', (
        'concurrent.futures.as_completed', 'asyncio.as_completed', '*.imap_unordered')),
    ('own-threads', None, 'runs beside the others', (
        'threading.Thread', 'threading.Timer', '_thread.start_new_thread', 'queue.Queue',
        'queue.SimpleQueue', 'queue.LifoQueue', 'queue.PriorityQueue', 'multiprocessing.Queue',
        'concurrent.futures.ThreadPoolExecutor', 'multiprocessing.pool.ThreadPool',
        'multiprocessing.dummy.Pool')),
    ('uninitialized', None, 'holds what was there before', (
        'torch.empty', 'torch.empty_like', 'numpy.empty', 'numpy.empty_like', '*.new_empty')),
    ('unsorted-listing', None, 'in the order of the file system', (
        'os.listdir', 'os.scandir', 'os.walk', 'glob.iglob', '*.glob', '*.iterdir', '*.rglob',
        'mmengine.scandir', 'mmengine.utils.scandir', '*.list_dir_or_file')),
    ('hash-order', None, 'depends on PYTHONHASHSEED for strings, else on addresses', ('hash', )),
    ('address', None, 'an address in memory', ('id', )),
)
