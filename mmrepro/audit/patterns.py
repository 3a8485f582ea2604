"""What in the source of a transform, module, sampler or hook makes runs differ: one row a call.

``seeded`` says which calls a row is about: None all of them, False those without an argument (or
with None), True those with one.
"""
from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Tuple

__all__ = ['CALLS', 'LISTINGS', 'SETTINGS', 'SETTING_CALLS', 'Call']


class Call(NamedTuple):
    """A call by its full dotted name (import aliases resolved)."""
    name: str
    rule: str
    seeded: Optional[bool]
    what: str


CALLS: Tuple[Call, ...] = (
    # generators that the operating system seeds: no seed of anybody's reaches them
    Call('numpy.random.default_rng', 'foreign-generator', False, 'seeded by the system'),
    Call('numpy.random.RandomState', 'foreign-generator', False, 'seeded by the system'),
    Call('numpy.random.PCG64', 'foreign-generator', False, 'seeded by the system'),
    Call('numpy.random.Philox', 'foreign-generator', False, 'seeded by the system'),
    Call('numpy.random.SeedSequence', 'foreign-generator', False, 'seeded by the system'),
    Call('numpy.random.seed', 'foreign-generator', False, 'seeded by the system'),
    Call('random.Random', 'foreign-generator', False, 'seeded by the system'),
    Call('random.SystemRandom', 'foreign-generator', None, 'random numbers of the system'),
    Call('random.seed', 'foreign-generator', False, 'seeded by the system'),
    Call('os.urandom', 'foreign-generator', None, 'random numbers of the system'),
    Call('secrets.*', 'foreign-generator', None, 'random numbers of the system'),
    Call('torch.seed', 'foreign-generator', None, 'seeded by the system'),
    Call('torch.cuda.seed', 'foreign-generator', None, 'seeded by the system'),
    Call('torch.cuda.seed_all', 'foreign-generator', None, 'seeded by the system'),
    # generators of one's own: their state lives in an object, and objects live in workers
    Call('numpy.random.default_rng', 'kept-generator', True, 'a generator of its own'),
    Call('numpy.random.RandomState', 'kept-generator', True, 'a generator of its own'),
    Call('random.Random', 'kept-generator', True, 'a generator of its own'),
    Call('torch.Generator', 'kept-generator', None, 'a generator of its own'),
    # seeding of the generators that everything else draws from
    Call('numpy.random.seed', 'reseeding', True, "moves everybody's generator"),
    Call('random.seed', 'reseeding', True, "moves everybody's generator"),
    Call('torch.manual_seed', 'reseeding', None, "moves everybody's generator"),
    Call('torch.random.manual_seed', 'reseeding', None, "moves everybody's generator"),
    Call('torch.cuda.manual_seed', 'reseeding', None, "moves everybody's generator"),
    Call('torch.cuda.manual_seed_all', 'reseeding', None, "moves everybody's generator"),
    # other every time
    Call('uuid.uuid1', 'clock', None, 'other in every run'),
    Call('uuid.uuid4', 'clock', None, 'other in every run'),
    Call('time.time', 'clock', None, 'other in every run'),
    Call('time.time_ns', 'clock', None, 'other in every run'),
    Call('datetime.datetime.now', 'clock', None, 'other in every run'),
    Call('datetime.datetime.utcnow', 'clock', None, 'other in every run'),
    Call('datetime.datetime.today', 'clock', None, 'other in every run'),
    # results in the order in which threads or processes are done
    Call('concurrent.futures.as_completed', 'completion-order', None,
         'in the order of completion'),
    Call('asyncio.as_completed', 'completion-order', None, 'in the order of completion'),
    Call('*.imap_unordered', 'completion-order', None, 'in the order of completion'),
    # memory that holds what was there before
    Call('torch.empty', 'uninitialised', None, 'holds what was there before'),
    Call('torch.empty_like', 'uninitialised', None, 'holds what was there before'),
    Call('numpy.empty', 'uninitialised', None, 'holds what was there before'),
    Call('numpy.empty_like', 'uninitialised', None, 'holds what was there before'),
    Call('*.new_empty', 'uninitialised', None, 'holds what was there before'),
    Call('hash', 'hash-order', None, 'depends on PYTHONHASHSEED for strings, else on addresses'),
)

# in the order of the file system, unless sorted
LISTINGS: Tuple[str, ...] = (
    'os.listdir', 'os.scandir', 'os.walk', 'glob.glob', 'glob.iglob', '*.iterdir', '*.rglob',
    '*.glob', 'mmengine.scandir', 'mmengine.utils.scandir', 'mmengine.fileio.list_dir_or_file',
    'mmengine.list_dir_or_file', '*.list_dir_or_file')

# switches of torch -> value that undoes determinism; None: any
SETTINGS: Dict[str, Optional[bool]] = {
    'torch.backends.cudnn.benchmark': True,
    'torch.backends.cudnn.deterministic': False,
    'torch.backends.cudnn.allow_tf32': True,
    'torch.backends.cuda.matmul.allow_tf32': True,
    'torch.backends.cudnn.enabled': None,
}

# functions that change such switches -> argument that undoes determinism; None: any
SETTING_CALLS: Dict[str, Optional[bool]] = {
    'torch.use_deterministic_algorithms': False,
    'torch.set_deterministic_debug_mode': None,
    'torch.set_float32_matmul_precision': None,
    'torch.set_num_threads': None,
}
