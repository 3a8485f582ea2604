"""The rules, one row each. A new rule is a check and a row here, and a config in the tests."""
from __future__ import annotations

from typing import Tuple

from . import data_rules, environment_rules, operator_rules, setting_rules
from .findings import CHANGES, HINT, MAY, Rule

__all__ = ['RULES']

_AUDIT = 'docs/how-to/audit.md'
_CAUSES = 'docs/explanation/causes.md'
_LIMITS = 'docs/explanation/limits.md'
_QUICKSTART = 'docs/tutorials/quickstart.md'
_STREAMS = 'docs/explanation/streams.md'
_TWO_LINES = 'the two lines (see not-attached)'

_SETUP = (
    Rule('not-attached', CHANGES, setting_rules.not_attached,
         "under MMDetection's own tools/train.py, MMEngine's seeding leaves most causes in place: "
         'seeds of workers, resume, validation, kernels (mmrepro train attaches itself)',
         "custom_imports = dict(imports=['mmrepro'], "
         'allow_failed_imports=False) and randomness = dict(seed=42, deterministic=True)',
         f'{_CAUSES} A1-A8'),
    Rule('lazy-import', CHANGES, setting_rules.lazy_import,
         'mmrepro is named but never imported, so the run is a stock one',
         "runner_type = 'mmrepro.ReproRunner', or inherit from "
         'mmrepro.configs._base_.reproducible', _QUICKSTART),
    Rule('import-may-fail', HINT, setting_rules.import_may_fail,
         'where mmrepro is not installed the run goes on without it, with a warning only',
         'custom_imports = dict(imports=[...], allow_failed_imports=False)', _QUICKSTART),
    Rule('import-failed', MAY, setting_rules.import_failed,
         'what the module registers could not be looked at',
         'install it, or put its folder on PYTHONPATH, and audit again', _AUDIT),
    Rule('other-runner', CHANGES, setting_rules.runner_type,
         'its strategies shard states and reduce in orders that nobody here controls; refused',
         "runner_type = 'mmrepro.ReproRunner'", f'{_LIMITS} FlexibleRunner'),
    Rule('invalid-randomness', CHANGES, setting_rules.invalid,
         'the run is refused at its start', 'correct the key', f'{_STREAMS}'),
    Rule('no-seed', CHANGES, setting_rules.no_seed,
         'every start draws another seed (it is written into log, config and checkpoint)',
         'randomness = dict(seed=42, ...)', f'{_CAUSES} A7'),
    Rule('misspelt-key', MAY, setting_rules.misspelt,
         'nothing reads this key: the run goes on with what the base or a default says',
         'correct the name; if it is a variable of your own, rename it or --ignore misspelt-key',
         _AUDIT),
    Rule('legacy-keys', HINT, setting_rules.legacy_keys,
         "MMDetection 2.x's place for it; stock MMEngine ignores it there",
         'move it into randomness = dict(...)', _QUICKSTART),
)

_KERNELS = (
    Rule('not-deterministic', CHANGES, setting_rules.not_deterministic,
         'kernels may add in any order; losses agree to rounding at first, then drift apart',
         'randomness = dict(..., deterministic=True)', f'{_CAUSES} A1'),
    Rule('only-warns', MAY, setting_rules.only_warns,
         'an operator without a deterministic form runs anyway, and attention keeps backward '
         'kernels that add in any order', 'randomness = dict(..., deterministic=True)',
         f'{_LIMITS} warn'),
    Rule('cudnn-benchmark', CHANGES, setting_rules.cudnn_benchmark,
         'cuDNN times its kernels and takes the fastest: another one in another run '
         '(with deterministic=True the run is refused)',
         'env_cfg = dict(cudnn_benchmark=False)', f'{_CAUSES} A1'),
    Rule('precision', MAY, setting_rules.precision,
         'another GPU model, other bits and other accuracy',
         f'{_TWO_LINES}, or torch.backends.cudnn.allow_tf32 = False', f'{_CAUSES} A1'),
    Rule('torch-operator', CHANGES, operator_rules.native_operators,
         'torch has no form of it on CUDA that repeats; with determinism it refuses to run',
         f'{_TWO_LINES}: mmrepro has forms of nearly all of them', 'docs/explanation/operators.md'),
    Rule('mmcv-operator', CHANGES, operator_rules.mmcv_operators,
         "a compiled kernel of mmcv that adds with atomics, or one that is missing",
         f'{_TWO_LINES}: mmrepro answers for these operators; where it has no form, a '
         'compiled mmcv runs it, in any order',
         'docs/explanation/operators.md'),
    Rule('mixed-precision', HINT, setting_rules.mixed_precision,
         'repeats on one machine; 16 bits make every other difference visible sooner, and with a '
         'dynamic scale a skipped step follows from the first overflow',
         'nothing, or OptimWrapper while you look for a difference',
         'docs/how-to/my-runs-differ.md'),
    Rule('compile', MAY, setting_rules.compiled,
         'inductor may choose kernels by timing them; mmrepro sets TORCHINDUCTOR_DETERMINISTIC, '
         'which not every release honours', "compile without mode='max-autotune', or not at all",
         f'{_LIMITS} other versions'),
)

_RANKS = (
    Rule('gradient-order', CHANGES, setting_rules.gradient_order,
         'a sum of three or more ranks depends on how DDP lays out its buckets, which changes '
         'after the first step and after a resume',
         'randomness = dict(..., deterministic=True): sums in the order of ranks',
         f'{_CAUSES} B9'),
    Rule('unused-parameters', HINT, setting_rules.unused_parameters,
         'buckets then depend on which parameters a batch used',
         'randomness = dict(..., deterministic=True)', f'{_CAUSES} B9'),
    Rule('rank-statistics', MAY, environment_rules.rank_statistics,
         'every rank has statistics of its own part of the data: the model that is evaluated has '
         "rank 0's, and a resume of stock MMEngine gives them to all",
         "norm_cfg=dict(type='SyncBN'), or SyncBuffersHook in custom_hooks", f'{_CAUSES} A10'),
    Rule('accumulation', HINT, setting_rules.accumulation,
         'a run that is killed in the middle of a cycle loses the sums',
         f'{_TWO_LINES}, or checkpoints at multiples of accumulative_counts', f'{_CAUSES} B3'),
    Rule('ranks-differ', MAY, data_rules.ranks_differ,
         'ranks can get different numbers of batches, as in MMDetection',
         'AspectRatioBatchSampler over one data set', f'{_CAUSES} C11'),
)

_DATA = (
    Rule('known-part', CHANGES, data_rules.known_parts,
         'mmrepro replaces or seeds this part; here it is stock',
         f"{_TWO_LINES}; with worker_seed='mmengine' old habits stay",
         _CAUSES),
    Rule('stock-workers', MAY, data_rules.stock_workers,
         "MMEngine seeds workers by their number", _TWO_LINES, f'{_CAUSES} A3'),
    Rule('stock-validation', HINT, data_rules.stock_validation,
         'validating at other times gives another run', _TWO_LINES, f'{_CAUSES} A5'),
    Rule('stock-resume', CHANGES, setting_rules.stock_resume,
         "MMEngine saves no generators: a resumed run draws the first epoch's numbers again",
         _TWO_LINES, f'{_CAUSES} A2'),
    Rule('streams', HINT, setting_rules.streams,
         "samples then depend on the number of workers, or steps on what ran before",
         "leave worker_seed and step_seed out: 'sample' and True", f'{_STREAMS} other modes'),
    Rule('resume-not-strict', HINT, setting_rules.not_strict_resume,
         'a resume with other settings or versions goes on, and only says so',
         'leave resume_strict out', 'docs/how-to/resume.md'),
    Rule('iterable', CHANGES, data_rules.iterable,
         'samples without a position cannot be seeded one by one: refused',
         "a map-style data set, or randomness = dict(..., worker_seed='worker')",
         f'{_LIMITS} iterable'),
    Rule('own-sampler', MAY, data_rules.own_sampler,
         'it is replayed from its seed argument; what it draws from global generators is not keyed',
         'take a seed and build a generator from seed and epoch, as DefaultSampler does',
         f'{_LIMITS} batch sampler'),
    Rule('albumentations-alone', MAY, environment_rules.albumentations_alone,
         'only a Compose is seeded', "wrap it: dict(type='Albu', transforms=[...])",
         f'{_CAUSES} C16'),
)

_ENVIRONMENT = (
    Rule('variable', CHANGES, environment_rules.contradicting_variables,
         'contradicts the determinism that the config asks for; refused at the start of a run '
         'with deterministic=True', 'unset it, or set an accepted value', f'{_CAUSES} A1'),
    Rule('variable-missing', MAY, environment_rules.missing_variables,
         'cuBLAS sizes its workspace itself and picks kernels that share it between streams',
         'export CUBLAS_WORKSPACE_CONFIG=:4096:8, or let mmrepro set it', f'{_CAUSES} A1'),
    Rule('hash-seed', HINT, environment_rules.hash_seed,
         'sets of strings have another order in every process',
         'export PYTHONHASHSEED=0, or let mmrepro keep their order', f'{_CAUSES} C1'),
    Rule('threads', HINT, environment_rules.threads,
         'repeats here; a machine with another number of cores splits sums differently',
         'randomness = dict(..., num_threads=N), or export OMP_NUM_THREADS=N',
         f'{_LIMITS} other machines'),
    Rule('no-device', HINT, environment_rules.no_such_device,
         'nothing was asked of a GPU', 'audit again on the machine that trains', _AUDIT),
    Rule('not-built', HINT, environment_rules.not_built,
         'the model could not be built without memory, so its operators were not looked at',
         'audit where all its packages are installed', _AUDIT),
)

# what the user's own files hold: transforms, data sets, modules, hooks, samplers
_SOURCES = (
    Rule('foreign-generator', CHANGES, environment_rules.source_hits('foreign-generator'),
         'no seed reaches it', "draw from numpy.random, random or torch's functions: each sample "
         'and step has its own stream there', f'{_CAUSES} C16'),
    Rule('kept-generator', MAY, environment_rules.source_hits('kept-generator'),
         'its state belongs to an object: in a data loader to a worker, at a resume to nobody',
         'draw from the global generators, which belong to the sample or step; or build it anew '
         'in each call from a seed drawn there', f'{_CAUSES} C16'),
    Rule('reseeding', MAY, environment_rules.source_hits('reseeding'),
         'everything that draws afterwards draws the same numbers again',
         'remove it; or put the old state back (getstate, setstate)', f'{_CAUSES} C5'),
    Rule('clock', HINT, environment_rules.seeds_from_clock,
         'other in every run; harmless in names and logs', 'keep it out of data, seeds and losses',
         f'{_CAUSES} harmless'),
    Rule('set-order', MAY, environment_rules.source_hits('set-order'),
         'sets of integers are safe, others are not', 'sorted(...), or dict.fromkeys(...)',
         f'{_CAUSES} C1'),
    Rule('hash-order', MAY, environment_rules.source_hits('hash-order'),
         'hashes of strings differ from process to process', 'hashlib, or zlib.crc32',
         f'{_CAUSES} C1'),
    Rule('unsorted-listing', MAY, environment_rules.source_hits('unsorted-listing'),
         'another machine, or a copy of the folder, lists it in another order',
         'sorted(...)', f'{_CAUSES} C7'),
    Rule('completion-order', MAY, environment_rules.source_hits('completion-order'),
         'the first to be done comes first', 'map(), which keeps the order', f'{_CAUSES} C20'),
    Rule('switches', CHANGES, environment_rules.source_hits('switches'),
         'turns a switch that determinism relies on, after mmrepro has set it',
         'remove it; randomness = dict(...) has keys for threads, precision, cuDNN',
         f'{_CAUSES} A1'),
    Rule('uninitialised', HINT, environment_rules.source_hits('uninitialised'),
         'fine if it is filled before it is read',
         'zeros; to find a read: randomness = dict(..., fill_uninitialized_memory=True)',
         f'{_CAUSES} harmless'),
    Rule('worker-state', MAY, environment_rules.source_hits('worker-state'),
         'the attribute belongs to a worker: depends on their number and on a resume',
         'compute it from the sample, or once in __init__', f'{_CAUSES} B12'),
    Rule('kept-state', MAY, environment_rules.kept_state,
         'a checkpoint does not hold it, so a resumed run starts over',
         'register_buffer(...), or mmrepro.checkpoint.adapters.register(Class, "attribute")',
         f'{_CAUSES} B11'),
    Rule('unreadable', MAY, environment_rules.unreadable,
         'nothing was looked at in there', 'correct the file', _AUDIT),
)

RULES: Tuple[Rule, ...] = (*_SETUP, *_KERNELS, *_RANKS, *_DATA, *_ENVIRONMENT, *_SOURCES)
