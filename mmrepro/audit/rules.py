"""The rules, one row each. A new rule is a check and a row here, and a config in the tests.

The tests apply the settings of a row to that config and expect the rule to be silent.
"""
from __future__ import annotations

from . import data_rules, environment_rules, operator_rules, setting_rules
from .environment_rules import START_ENV, source_hits
from .findings import CHANGES, HINT, MAY, TWO_LINES, AuditRule

_AUDIT = 'docs/how-to/audit.md'
_CAUSES = 'docs/explanation/causes.md'
_LIMITS = 'docs/explanation/limits.md'
_QUICKSTART = 'docs/tutorials/quickstart.md'
_STREAMS = 'docs/explanation/streams.md'
_RUNNER = {'runner_type': 'mmrepro.ReproRunner'}
_DETERMINISTIC = {'randomness.deterministic': True}

RULES: tuple[AuditRule, ...] = (
    AuditRule('not-attached', CHANGES, setting_rules.not_attached,
         "under MMDetection's own tools/train.py, MMEngine's seeding leaves most causes in place: "
         'seeds of workers, resume, validation, kernels (mmrepro train attaches itself)',
         '', f'{_CAUSES} A1-A8', TWO_LINES),
    AuditRule('lazy-import', CHANGES, setting_rules.lazy_import,
         'mmrepro is named but never imported, so the run is a stock one',
         'or inherit from mmrepro.configs._base_.reproducible', _QUICKSTART, _RUNNER),
    AuditRule('import-may-fail', HINT, setting_rules.import_may_fail,
         'where mmrepro is not installed the run goes on without it, with a warning only',
         '', _QUICKSTART, {'custom_imports.allow_failed_imports': False}),
    AuditRule('import-failed', MAY, setting_rules.import_failed,
         'what the module registers could not be looked at',
         'install it, or put its folder on PYTHONPATH, and audit again', _AUDIT),
    AuditRule('other-runner', CHANGES, setting_rules.runner_type,
         'its strategies shard states and reduce in orders that mmrepro does not control; refused',
         '', f'{_LIMITS} FlexibleRunner', _RUNNER),
    AuditRule('invalid-randomness', CHANGES, setting_rules.invalid,
         'the run is refused at its start', 'correct the key', _STREAMS),
    AuditRule('no-seed', CHANGES, setting_rules.no_seed,
         'every start draws another seed (it is written into log, config and checkpoint)',
         '', f'{_CAUSES} A7', {'randomness.seed': 42}),
    AuditRule('misspelt-key', MAY, setting_rules.misspelt,
         'nothing reads this key: the run goes on with what the base or a default says',
         'correct the name; if it is a variable of your own, rename it or --ignore misspelt-key',
         _AUDIT),
    AuditRule('legacy-keys', HINT, setting_rules.legacy_keys,
         "a key of MMDetection 2.x; stock MMEngine ignores it",
         'move it into randomness = dict(...)', _QUICKSTART),
    # kernels
    AuditRule('not-deterministic', CHANGES, setting_rules.not_deterministic,
         'kernels may add in any order; losses agree to rounding at first, then drift apart',
         '', f'{_CAUSES} A1', _DETERMINISTIC),
    AuditRule('only-warns', MAY, setting_rules.only_warns,
         'an operator without a deterministic form runs anyway, and attention keeps backward '
         'kernels that add in any order', '', f'{_LIMITS} warn', _DETERMINISTIC),
    AuditRule('cudnn-benchmark', CHANGES, setting_rules.cudnn_benchmark,
         'cuDNN times its kernels and takes the fastest, which differs from run to run '
         '(with deterministic=True the setting is not followed)',
         '', f'{_CAUSES} A1',
         {'env_cfg.cudnn_benchmark': False}),
    AuditRule('precision', HINT, setting_rules.precision,
         'repeats on one GPU model, but nothing records the precision of a run or notices that it '
         'changed', 'mmrepro does both', f'{_CAUSES} A1', TWO_LINES),
    AuditRule('torch-operator', CHANGES, operator_rules.native_operators,
         'torch has no form of it on CUDA that repeats; with determinism it refuses to run',
         'mmrepro has forms of nearly all of them', 'docs/explanation/operators.md', TWO_LINES),
    AuditRule('mmcv-operator', CHANGES, operator_rules.mmcv_operators,
         "a compiled kernel of mmcv that adds with atomics, or one that is missing",
         'the two lines (see not-attached): mmrepro provides these operators; where it has no '
         'form, a compiled mmcv runs it, in any order', f'{_CAUSES} operators'),
    AuditRule('mixed-precision', HINT, setting_rules.mixed_precision,
         'repeats on one machine; 16 bits make every other difference visible sooner, and with a '
         'dynamic scale a skipped step follows from the first overflow',
         'only while you look for a difference', 'docs/how-to/my-runs-differ.md',
         {'optim_wrapper.type': 'OptimWrapper'}),
    AuditRule('compile', MAY, setting_rules.compiled,
         'inductor may choose kernels by timing them; mmrepro sets TORCHINDUCTOR_DETERMINISTIC, '
         'which not every release honours', "or no mode='max-autotune'",
         f'{_LIMITS} other versions', {'compile': False}),
    # ranks
    AuditRule('gradient-order', CHANGES, setting_rules.gradient_order,
         'a sum of three or more ranks depends on how DDP lays out its buckets, which changes '
         'after the first step and after a resume',
         'gradients are then summed in the order of ranks', f'{_CAUSES} B9', TWO_LINES),
    AuditRule('unused-parameters', HINT, setting_rules.unused_parameters,
         'buckets then depend on which parameters a batch used',
         '', f'{_CAUSES} B9', TWO_LINES),
    AuditRule('rank-statistics', MAY, environment_rules.rank_statistics,
         'every rank has statistics of its own part of the data and validates with them; the '
         "checkpoint has rank 0's, and a resume gives them to all",
         "mmrepro validates with their mean and saves it; norm_cfg=dict(type='SyncBN') makes them "
         'equal in training', f'{_CAUSES} A10', TWO_LINES),
    AuditRule('accumulation', HINT, setting_rules.accumulation,
         'a run that is killed in the middle of a cycle loses the sums',
         'or checkpoints at multiples of accumulative_counts', f'{_CAUSES} B3', TWO_LINES),
    AuditRule('ranks-differ', MAY, data_rules.ranks_differ,
         'ranks can get different numbers of batches, as in MMDetection',
         'AspectRatioBatchSampler over one dataset', f'{_CAUSES} C11'),
    # data
    AuditRule('known-part', CHANGES, data_rules.known_parts,
         'mmrepro replaces or seeds this part; here it is stock',
         "with worker_seed='mmengine' it stays stock", _CAUSES, TWO_LINES),
    AuditRule('stock-workers', MAY, data_rules.stock_workers,
         "MMEngine seeds workers by their number", '', f'{_CAUSES} A3', TWO_LINES),
    AuditRule('stock-validation', HINT, data_rules.stock_validation,
         'validating at different times changes the run', '', f'{_CAUSES} A5', TWO_LINES),
    AuditRule('stock-resume', CHANGES, setting_rules.stock_resume,
         "MMEngine saves no generators: a resumed run draws the first epoch's numbers again",
         '', f'{_CAUSES} A2', TWO_LINES),
    AuditRule('streams', HINT, setting_rules.streams,
         "samples then depend on the number of workers, or steps on what ran before",
         '', f'{_STREAMS} other modes', {'randomness.worker_seed': 'sample'}),
    AuditRule('resume-not-strict', HINT, setting_rules.not_strict_resume,
         'a resume with different settings or versions only warns',
         '', 'docs/how-to/resume.md', {'randomness.resume_strict': True}),
    AuditRule('iterable', CHANGES, data_rules.without_position,
         'samples without a position cannot be seeded one by one: refused',
         "or a map-style dataset in batches: MMEngine's own streams do not resume exactly",
         f'{_LIMITS} iterable', {'randomness.worker_seed': 'mmengine'}),
    AuditRule('own-sampler', MAY, data_rules.own_sampler,
         'all that it draws is keyed by the epoch; state that it keeps from one pass to the next '
         'is lost at a resume',
         'compute each pass from the epoch alone, as DefaultSampler does', f'{_LIMITS} samplers'),
    AuditRule('albumentations-alone', MAY, environment_rules.albumentations_alone,
         'only a Compose is seeded', "wrap it: dict(type='Albu', transforms=[...])",
         f'{_CAUSES} C16'),
    # environment
    AuditRule('variable', CHANGES, environment_rules.contradicting_variables,
         'contradicts the determinism that the config asks for; refused at the start of a run '
         'with deterministic=True', 'unset it, or set an accepted value', f'{_CAUSES} A1'),
    AuditRule('variable-missing', MAY, environment_rules.missing_variables,
         'cuBLAS sizes its workspace itself and picks kernels that share it between streams',
         'or let mmrepro set it', f'{_CAUSES} A1', env=START_ENV),
    AuditRule('hash-seed', HINT, environment_rules.hash_seed,
         'sets of strings have another order in every process',
         'or let mmrepro keep their order', f'{_CAUSES} C1', env={'PYTHONHASHSEED': '0'}),
    AuditRule('threads', HINT, environment_rules.threads,
         'repeats here; a machine with another number of cores splits sums differently',
         'or any other fixed number, or OMP_NUM_THREADS', f'{_LIMITS} other machines',
         {'randomness.numerics.num_threads': 1}),
    AuditRule('no-device', HINT, environment_rules.no_such_device,
         'no GPU was queried', 'audit again on the machine that trains', _AUDIT),
    AuditRule('not-built', HINT, environment_rules.not_built,
         'the model could not be built without memory, so its operators were not looked at',
         'audit where all its packages are installed', _AUDIT),
    # what the user's own files hold: transforms, datasets, modules, hooks, samplers
    AuditRule('foreign-generator', CHANGES, source_hits('foreign-generator'),
         'no seed reaches it', "draw from numpy.random, random or torch's functions: each sample "
         'and step has its own stream there', f'{_CAUSES} C16'),
    AuditRule('kept-generator', MAY, source_hits('kept-generator'),
         'its state belongs to an object that no checkpoint holds; mmrepro keys those that a '
         'transform or a dataset keeps in an attribute from its constructor on',
         'draw from the global generators, which belong to the sample or step; or build it in each '
         'call from a seed drawn there', f'{_CAUSES} C16'),
    AuditRule('reseeding', MAY, source_hits('reseeding'),
         'everything that draws afterwards draws the same numbers again',
         'remove it; or put the old state back (getstate, setstate)', f'{_CAUSES} C5'),
    AuditRule('clock', HINT, environment_rules.seeds_from_clock,
         'different in every run; harmless in names and logs',
         'keep it out of data, seeds and losses', f'{_CAUSES} harmless'),
    AuditRule('set-order', MAY, source_hits('set-order'),
         'sets of integers are safe, others are not', 'sorted(...), or dict.fromkeys(...)',
         f'{_CAUSES} C1'),
    AuditRule('hash-order', MAY, source_hits('hash-order'),
         'hashes of strings differ from process to process', 'hashlib, or zlib.crc32',
         f'{_CAUSES} C1'),
    AuditRule('unsorted-listing', MAY, source_hits('unsorted-listing'),
         'the order differs between machines and copies of the folder',
         'sorted(...)', f'{_CAUSES} C7'),
    AuditRule('completion-order', MAY, source_hits('completion-order'),
         'the order depends on which is done first', 'map(), which keeps the order',
         f'{_CAUSES} C20'),
    AuditRule('own-threads', MAY, source_hits('own-threads'),
         'the operating system decides which thread comes first, and a generator that one of them '
         'draws from moves under the others',
         'take results in the order in which the work was given out (map of an executor does), and '
         'draw random numbers outside of threads', f'{_CAUSES} C20'),
    AuditRule('switches', CHANGES, source_hits('switches'),
         'changes a switch that determinism relies on, after mmrepro has set it',
         'remove it; randomness.numerics has keys for threads and precision',
         f'{_CAUSES} A1'),
    AuditRule('uninitialised', HINT, source_hits('uninitialised'),
         'fine if it is filled before it is read',
         'zeros; to find a read: torch.utils.deterministic.fill_uninitialized_memory = True in '
         'the method before_train of a hook',
         f'{_CAUSES} harmless'),
    AuditRule('worker-state', MAY, source_hits('worker-state'),
         'it belongs to a worker: depends on their number and on a resume',
         'compute it from the sample, or once in __init__', f'{_CAUSES} B12'),
    AuditRule('kept-state', MAY, environment_rules.kept_state,
         'a checkpoint does not hold it, so a resumed run starts over',
         'register_buffer(...), or mmrepro.checkpoint.adapters.register(Class, "attribute")',
         f'{_CAUSES} B11'),
    AuditRule('unreadable', MAY, environment_rules.unreadable,
         'nothing in it was checked', 'correct the file', _AUDIT),
)
