"""Every rule of the audit has a config that triggers it; the shipped configs trigger none."""
import copy
import dataclasses
import glob
import os
import re

import pytest
import torch
from loaders import settings
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import DATASETS
from test_audit_sources import FILES
from torch.utils.data import DataLoader, IterableDataset

from mmrepro import determinism
from mmrepro.audit import CHANGES, HINT, MAY, RULES, Subject, checks, findings_of, load
from mmrepro.config import RandomnessConfig, refuse_misspelt, upgrade_legacy_keys
from mmrepro.data import adopt_loader
from mmrepro.data.sampling_orders import STOCK_FAULTS
from mmrepro.errors import ConfigError, RandomnessError
from mmrepro.patches import CAUSES
from mmrepro.run.runner import ReproRunner

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SHIPPED = sorted(os.path.relpath(path, ROOT) for pattern in ('*.py', 'demo/*_demo.py')
                 for path in glob.glob(os.path.join(ROOT, 'configs', pattern)))


# what a machine has that starts runs with tools/train.py
ENV = {'OMP_NUM_THREADS': '1', 'CUBLAS_WORKSPACE_CONFIG': ':4096:8', 'PYTHONHASHSEED': '0'}
RANKS = {**ENV, 'WORLD_SIZE': '4'}


def clean(**changes):
    """Return a config without findings, changed."""
    cfg = dict(
        default_scope='mmdet',
        custom_imports=dict(imports=['mmrepro'], allow_failed_imports=False),
        randomness=dict(seed=1, deterministic=True),
        train_dataloader=dict(num_workers=2, sampler=dict(type='DefaultSampler', shuffle=True),
                              dataset=dict(type='CocoDataset', pipeline=[])),
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1)))
    cfg.update(changes)
    return {key: value for key, value in cfg.items() if value is not None}


def stock(**changes):
    return clean(custom_imports=None, **changes)


def subject(cfg, device='cpu', env=ENV, **kwargs):
    return Subject(Config(cfg), device, env, **kwargs)


def pipeline(*transforms):
    return dict(num_workers=2, dataset=dict(type='CocoDataset', pipeline=list(transforms)))


@DATASETS.register_module(force=True)
class Records(IterableDataset):
    """It has no positions; MMEngine's LoggerHook asks it for its length."""

    def __len__(self):
        return 8

    def __iter__(self):
        return (dict(x=torch.full((4, ), float(i))) for i in range(8))


def optimizer(**kwargs):
    return dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1), **kwargs)


def conv(norm):
    return dict(type='mmdet.FPN', in_channels=[2, 4], out_channels=4, num_outs=2,
                norm_cfg=dict(type=norm, requires_grad=True))


def accumulating(model, **changes):
    return stock(optim_wrapper=optimizer(accumulative_counts=4), model=model, **changes)


YOLOX_HEAD = dict(type='YOLOXHead', num_classes=2, in_channels=8)
R_50 = dict(type='ResNet', depth=50, norm_cfg=dict(type='BN', requires_grad=True))

# rule -> (config, further arguments of `subject`, severity, where)
TRIGGERS = {
    'not-attached': (stock(), {}, CHANGES, 'custom_imports'),
    'lazy-import': (clean(), dict(lazy=True), CHANGES, 'custom_imports'),
    'import-may-fail': (clean(custom_imports=dict(imports=['mmrepro'])), {}, HINT,
                        'custom_imports.allow_failed_imports'),
    'import-failed': (clean(), dict(failed_import='nothing: ModuleNotFoundError'), MAY,
                      'custom_imports'),
    'other-runner': (clean(runner_type='FlexibleRunner'), {}, CHANGES, 'runner_type'),
    'invalid-randomness': (clean(randomness=dict(sead=1)), {}, CHANGES, 'randomness'),
    'no-seed': (clean(randomness=dict(deterministic=True)), {}, CHANGES, 'randomness.seed'),
    'misspelt-key': (clean(randomness=None, randomnes=dict(seed=7)), {}, CHANGES, 'randomnes'),
    'legacy-keys': (clean(randomness=dict(deterministic=True), seed=3), {}, HINT, 'seed'),
    'not-deterministic': (clean(randomness=dict(seed=1)), dict(device='cuda'), CHANGES,
                          'randomness.deterministic'),
    'only-warns': (clean(randomness=dict(seed=1, deterministic='warn')), {}, MAY,
                   'randomness.deterministic'),
    'cudnn-benchmark': (clean(env_cfg=dict(cudnn_benchmark=True), randomness=dict(seed=1)),
                        dict(device='cuda'), CHANGES, 'env_cfg.cudnn_benchmark'),
    'precision': (stock(), dict(device='cuda'), HINT,
                  'randomness.numerics.float32_precision'),
    'mixed-precision': (clean(optim_wrapper=dict(type='AmpOptimWrapper')), {}, HINT,
                        'optim_wrapper.type'),
    'compile': (clean(compile=dict(mode='max-autotune')), {}, MAY, 'compile.mode'),
    'gradient-order': (stock(), dict(env=RANKS), CHANGES, 'WORLD_SIZE'),
    'rank-statistics': (stock(model=conv('BN')), dict(env=RANKS), MAY,
                        'model.norm_cfg'),
    'accumulation': (stock(optim_wrapper=optimizer(accumulative_counts=4)), {}, HINT,
                     'optim_wrapper.accumulative_counts'),
    'accumulated-batch': (accumulating(YOLOX_HEAD), {}, HINT, 'model'),
    'ranks-differ': (clean(train_dataloader=dict(
        batch_sampler=dict(type='MultiDataAspectRatioBatchSampler'))), dict(env=RANKS), MAY,
        'train_dataloader.batch_sampler'),
    'known-part': (stock(train_dataloader=pipeline(dict(type='Mosaic'),
                                                   dict(type='CachedMosaic'))), {}, CHANGES,
                   'train_dataloader.dataset.pipeline[1]'),
    'stock-workers': (stock(), {}, MAY, 'train_dataloader.num_workers'),
    'stock-validation': (stock(val_dataloader=dict(batch_size=1)), {}, HINT,
                         'train_cfg.val_interval'),
    'stock-resume': (stock(resume=True), {}, CHANGES, 'resume'),
    'streams': (clean(randomness=dict(seed=1, deterministic=True, worker_seed='worker')), {},
                HINT, 'randomness.worker_seed'),
    'iterable': (clean(train_dataloader=dict(dataset=dict(type='Records'))), {}, CHANGES,
                 'train_dataloader.dataset'),
    'resume-not-strict': (clean(randomness=dict(seed=1, deterministic=True,
                                                resume_strict=False)), {}, HINT,
                          'randomness.resume_strict'),
    'variable': (clean(), dict(env={**ENV, 'NCCL_ALGO': 'Tree'}, device='cuda'), CHANGES,
                 'NCCL_ALGO'),
    'variable-missing': (stock(), dict(env={}, device='cuda'), MAY, 'CUBLAS_WORKSPACE_CONFIG'),
    'hash-seed': (stock(), dict(env={}), HINT, 'PYTHONHASHSEED'),
    'threads': (clean(), dict(env={}), HINT, 'OMP_NUM_THREADS'),
}


@pytest.fixture(autouse=True)
def with_cuda(monkeypatch):
    # not torch's own: MMEngine's logger asks it for the number of the device
    monkeypatch.setattr(checks, 'has_cuda', lambda: True)


def found(subject, rule):
    return [finding for finding in findings_of(subject) if finding.rule == rule]


@pytest.mark.parametrize('rule', TRIGGERS)
def test_a_config_triggers_the_rule(rule):
    cfg, arguments, severity, where = TRIGGERS[rule]
    findings = found(subject(cfg, **arguments), rule)
    assert findings and findings[0].severity == severity
    assert where in findings[0].where


@pytest.mark.parametrize('rule', [rule for rule in RULES if rule.settings or rule.env],
                         ids=lambda rule: rule.name)
def test_a_rule_is_silent_when_its_advice_is_followed(rule):
    cfg, arguments, _, _ = TRIGGERS[rule.name]
    seen = subject(cfg, **arguments)
    advised = Config(copy.deepcopy(cfg))
    advised.merge_from_dict(copy.deepcopy(dict(rule.settings)))
    after = dataclasses.replace(seen, cfg=advised, env={**seen.env, **rule.env})
    assert found(seen, rule.name) and not found(after, rule.name)
    assert not after.randomness_error
    refuse_misspelt(advised)
    randomness = after.randomness
    # as a run does; what contradicts its settings is refused
    with determinism.deterministic(
            randomness.deterministic, env=dict(after.env),
            num_threads=randomness.numerics.num_threads,
            float32_precision=randomness.numerics.float32_precision,
            cudnn_benchmark=(advised.get('env_cfg') or {}).get('cudnn_benchmark')):
        pass


@pytest.mark.parametrize('worker_seed', ['sample', 'worker', 'mmengine'])
def test_the_audit_and_the_loader_agree_on_iterable_datasets(worker_seed, tmp_path):
    randomness = dict(seed=3, worker_seed=worker_seed)
    cfg = settings(lambda: DataLoader(Records(), batch_size=4, collate_fn=pseudo_collate),
                   tmp_path, 'iterations', validation=False)
    cfg.update(randomness=randomness, train_cfg=dict(by_epoch=False, max_iters=2))
    named = found(subject(clean(randomness=randomness,
                                train_dataloader=dict(dataset=dict(type='Records')))), 'iterable')
    if named:
        assert 'Records is an iterable dataset' in named[0].what
        with pytest.raises(RandomnessError, match=re.escape(named[0].what)):
            ReproRunner(**cfg).train()
    else:
        ReproRunner(**cfg).train()
    assert bool(named) == (worker_seed != 'mmengine')


def test_a_loader_without_batches_is_named():
    cfg = clean(val_dataloader=dict(batch_size=None, dataset=dict(type='CocoDataset')))
    (finding, ) = found(subject(cfg), 'iterable')
    assert finding.where == 'val_dataloader.batch_size' and 'batch_size=None' in finding.what
    with pytest.raises(RandomnessError, match=re.escape(finding.what)):
        adopt_loader(DataLoader([1, 2], batch_size=None), RandomnessConfig(seed=0), 'val', 0)


def test_legacy_keys_move_where_the_advice_says():
    cfg = Config(TRIGGERS['legacy-keys'][0])
    with pytest.warns(DeprecationWarning):
        upgrade_legacy_keys(cfg)
    assert findings_of(Subject(cfg, 'cpu', ENV)) == []


# rule, config, further arguments of `subject`, and where it is found; nowhere: as it should be
SIMILAR = [
    ('known-part', stock(model=dict(type='X', train_cfg=dict(sampler=dict(
        type='InstanceBalancedPosSampler')))), {}, ['model.train_cfg.sampler']),
    ('known-part', stock(train_dataloader=pipeline(dict(type='mmyolo.Mosaic', use_cached=True))),
     {}, ['train_dataloader.dataset.pipeline[0]']),
    ('known-part', stock(train_dataloader=pipeline(
        dict(type='mmyolo.Mosaic', use_cached=False))), {}, []),
    ('known-part', stock(train_dataloader=dict(dataset=dict(type='mmdet.RefCocoDataset'))), {},
     ['train_dataloader.dataset']),
    ('known-part', stock(train_dataloader=dict(dataset=dict(
        type='mmdet.RefCocoDataset', text_mode='select_first'))), {}, []),
    # a resume gives ranks and cycles their state back
    ('rank-statistics', clean(model=conv('BN')), dict(env=RANKS), []),
    ('accumulation', clean(optim_wrapper=optimizer(accumulative_counts=4)), dict(env=RANKS), []),
    # its statistics, and the count of positives
    ('accumulated-batch', accumulating(YOLOX_HEAD), {}, ['model', 'model']),
    ('accumulated-batch', accumulating(dict(backbone=dict(R_50, norm_eval=False))), {},
     ['model.backbone']),
    ('accumulated-batch', accumulating(dict(backbone=R_50)), {}, []),  # in evaluation mode
    ('accumulated-batch', stock(model=YOLOX_HEAD), {}, []),
    *(('misspelt-key', clean(**{key: 7}), {}, []) for key in (
        'val_evaluator_abs', 'preprocessor', 'conv_cfg', 'train_pipeline', 'backend_args',
        'vis_backends', 'seed', 'randomness_note', 'dataset_type', 'img_scale', 'base_lr')),
]


@pytest.mark.parametrize('rule, cfg, arguments, where', SIMILAR)
def test_a_rule_names_the_part_and_is_silent_where_nothing_is_wrong(rule, cfg, arguments, where):
    assert [finding.where for finding in found(subject(cfg, **arguments), rule)] == where


@pytest.mark.parametrize('path', [None, *SHIPPED])
def test_no_false_alarm_on_a_clean_or_shipped_config(path):
    seen = load(os.path.join(ROOT, path), env=ENV) if path else subject(clean())
    assert findings_of(seen) == []
    assert findings_of(dataclasses.replace(seen, device='cuda')) == []


def test_every_rule_is_tested():
    elsewhere = {'no-device', 'unreadable'}
    assert {rule.name for rule in RULES} == {*TRIGGERS, *FILES, *elsewhere}
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_every_type_with_a_known_fault_exists():
    # MMYOLO is not among the locked packages
    names = {name for cause in CAUSES for name in cause.types
             if not cause.targets[0].startswith('mmyolo.')} | {*STOCK_FAULTS}
    seen = subject(clean(model=[dict(type=name) for name in sorted(names)]))
    assert names <= {part.name for part in seen.parts if seen.class_of(part)}


def test_links_lead_to_files_and_causes():
    for rule in RULES:
        path, *rest = rule.link.split()
        text = open(os.path.join(ROOT, path)).read()
        for cause in re.findall(r'\b[ABC]\d+\b', ' '.join(rest)):
            assert re.search(rf'^- (\*\*\w+\*\*, )*\*\*{cause}\*\*', text, re.M), rule.name


def test_a_missing_device_is_said(monkeypatch):
    monkeypatch.setattr(checks, 'has_cuda', lambda: False)
    assert found(subject(clean(), 'cuda'), 'no-device')
    assert not found(subject(clean(), 'cpu'), 'no-device')


@pytest.mark.parametrize('key, near, severity', [
    ('radomness', 'randomness', CHANGES), ('custom_import', 'custom_imports', CHANGES),
    ('envcfg', 'env_cfg', CHANGES), ('load_form', 'load_from', CHANGES),
    ('param_schedulers', 'param_scheduler', MAY)])
def test_a_misspelt_key_is_named_with_the_one_that_is_meant(key, near, severity):
    (finding, ) = found(subject(clean(**{key: 7})), 'misspelt-key')
    assert (finding.where, finding.severity) == (key, severity)
    assert finding.what == f'7; did you mean {near}?'
    if near == 'randomness':
        with pytest.raises(RandomnessError, match=f'{key!r}'):
            refuse_misspelt({key: 7})


def test_every_argument_of_the_runner_is_a_known_key():
    import inspect

    from mmengine.runner import Runner

    from mmrepro.runs.config_files import TOP_LEVEL
    assert {*inspect.signature(Runner.__init__).parameters} - {'self', 'cfg'} <= {*TOP_LEVEL}


def test_our_train_attaches_itself():
    for seen in (subject(stock()), subject(clean(), lazy=True)):
        assert not seen.attached and CHANGES in {one.severity for one in findings_of(seen)}
        assert findings_of(seen.under_our_train()) == []
    unseeded = subject(stock(randomness=None)).under_our_train()
    assert [finding.rule for finding in findings_of(unseeded)] == ['no-seed', 'not-deterministic']


def test_the_two_lines_fix_what_they_promise():
    cfg = stock(train_dataloader=pipeline(dict(type='CachedMosaic')), resume=True)
    seen = subject(cfg, 'cuda')
    assert len(findings_of(seen)) > 5
    assert findings_of(seen.with_two_lines()) == []


def test_a_rule_can_be_left_out():
    seen = subject(clean(optim_wrapper=dict(type='AmpOptimWrapper')))
    assert findings_of(seen, ignore=['mixed-precision']) == []
    with pytest.raises(ConfigError, match='no-such-rule.*mixed-precision'):
        findings_of(seen, ignore=['no-such-rule'])


def families():
    import mmdet
    root = os.path.join(os.path.dirname(mmdet.__file__), '.mim', 'configs')
    for name in sorted(os.listdir(root)):
        paths = glob.glob(os.path.join(root, name, '*.py'))
        if paths and name not in ('_base_', 'common'):
            # the shortest name is the plainest model; a few bytes are a variant of another file
            yield name, min(paths, key=lambda path: (os.path.getsize(path) < 300, len(path), path))


@pytest.mark.nightly
def test_a_config_of_every_family():
    wrong = []
    for name, path in families():
        try:
            seen = load(path, 'cuda')
        except ConfigError:
            assert name == 'sort'  # its base is not in the package
            continue
        assert 'not-attached' in [finding.rule for finding in findings_of(seen)]
        left = {finding.rule for finding in findings_of(seen.with_two_lines())
                if finding.severity == CHANGES}
        if left:
            wrong.append((name, left))
    assert not wrong
