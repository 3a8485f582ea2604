"""The ``randomness`` dict: what is allowed, and what the errors say."""
import copy

import pytest

from mmrepro.config import RandomnessConfig, upgrade_legacy_keys
from mmrepro.errors import RandomnessError


def test_defaults():
    assert RandomnessConfig.parse({}).as_dict() == dict(
        seed=None, diff_rank_seed=False, deterministic=False, worker_seed='sample',
        step_seed=True, operators=None, cudnn_enabled=None, cudnn_benchmark=None,
        float32_precision=None, fill_uninitialized_memory=False, num_threads=None,
        resume_strict=True, streams={}, check_steps=1000, check_samples=1000,
        nonrepeatable_datasets=(), virtual_ranks=None, virtual_ranks_memory=None,
        independent_predictions=False,
        cpu=None)
    assert RandomnessConfig.parse(None) == RandomnessConfig()


@pytest.mark.parametrize('randomness, message', [
    (dict(sead=1), r"unknown key 'sead' \(value 1\); did you mean 'seed'"),
    (dict(determinstic=True), "did you mean 'deterministic'"),
    (dict(zzz=1), 'Known keys: seed, diff_rank_seed'),
    (dict(seed=True), r'randomness.seed=True has type bool; allowed is None or an int from 0'),
    (dict(seed=-1), 'randomness.seed=-1 is out of range'),
    (dict(seed=2**32), 'allowed is None or an int from 0 to 4294967295'),
    (dict(seed=1.0), 'type float'),
    (dict(seed='42'), "randomness.seed='42' has type str"),
    (dict(deterministic='yes'), "randomness.deterministic='yes' is not allowed; allowed: False, "),
    (dict(deterministic=1), 'randomness.deterministic=1 is not allowed'),
    (dict(worker_seed='worker_id'), "allowed: 'sample', 'worker', 'mmengine'"),
    (dict(step_seed=None), 'randomness.step_seed=None is not allowed'),
    (dict(float32_precision='tf32'), "allowed: None, 'highest', 'high', 'medium'"),
    (dict(deterministic=True, cudnn_benchmark=True), 'exclude each other'),
    (dict(num_threads=0), 'randomness.num_threads=0 is out of range'),
    (dict(check_samples=-1), 'check_samples=-1 is out of range; allowed is an int from 0'),
    (dict(check_samples=None), 'check_samples=None has type NoneType'),
    (dict(nonrepeatable_datasets='MyStream'), "datasets='MyStream' is not allowed; allowed is a"),
    (dict(num_threads=True), 'randomness.num_threads=True has type bool'),
    ([('seed', 1)], 'has type list; allowed is a dict'),
    (dict(streams=7), r'randomness.streams=7 has type int; allowed is a dict such as dict\(init=7'),
    (dict(streams=dict(smaple=7)),
     r"randomness.streams has an unknown stream 'smaple' \(value 7\); did you mean 'sample'\?"),
    (dict(streams=dict(zzz=7)), 'unknown stream .*Known streams: init, sampler, sample, hook'),
    (dict(streams=dict(init=None)), 'streams.init=None has type NoneType; allowed is an int from'),
    (dict(streams=dict(init=-1)), 'randomness.streams.init=-1 is out of range'),
    (dict(streams=dict(step=1), step_seed=False),
     'randomness.streams.step=1 has no effect with randomness.step_seed=False; remove one'),
    (dict(streams=dict(sample=1), worker_seed='worker'), "no effect with .*worker_seed='worker'"),
    (dict(streams=dict(init=1), worker_seed='mmengine', step_seed=False), 'has no effect'),
])
def test_bad_values_are_refused_by_name(randomness, message):
    with pytest.raises(RandomnessError, match=message):
        RandomnessConfig.parse(randomness)


def test_it_is_frozen():
    with pytest.raises(AttributeError):
        RandomnessConfig().seed = 3


def test_the_table_says_what_is_promised_and_what_not():
    table = RandomnessConfig.parse(dict(seed=3, deterministic='warn')).table()
    assert 'seed' in table and "'warn'" in table
    assert 'no: warn keeps non-deterministic kernels' in table
    assert 'never' in table


def test_keys_of_mmdetection_2_move_with_a_warning():
    cfg = dict(seed=3, deterministic=True, diff_seed=True, model=1)
    with pytest.warns(DeprecationWarning, match=r'randomness = dict\(seed=3, deterministic=True, '
                      r'diff_rank_seed=True\)'):
        upgrade_legacy_keys(cfg)
    assert cfg == dict(
        model=1, randomness=dict(seed=3, deterministic=True, diff_rank_seed=True))


def test_both_forms_may_agree_but_not_disagree():
    with pytest.warns(DeprecationWarning):
        cfg = dict(seed=3, randomness=dict(seed=3))
        upgrade_legacy_keys(cfg)
    assert cfg == dict(randomness=dict(seed=3))
    with pytest.raises(RandomnessError, match=r'seed=3 at the top level .* randomness.seed=4'):
        upgrade_legacy_keys(dict(seed=3, randomness=dict(seed=4)))


def test_a_config_in_the_new_form_is_left_alone():
    cfg = dict(randomness=dict(seed=3))
    before = copy.deepcopy(cfg)
    upgrade_legacy_keys(cfg)
    assert cfg == before


def test_streams_may_have_roots_of_their_own():
    parsed = RandomnessConfig.parse(dict(seed=42, streams=dict(init=7)))
    assert parsed.root == 42 and parsed.root.streams == dict(init=7)
    assert RandomnessConfig.parse(parsed.as_dict()) == parsed
    assert parsed.with_seed(3).root.streams == dict(init=7)
    assert hash(parsed) is not None
