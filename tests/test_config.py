"""The ``randomness`` dict: what is allowed, and what the errors say."""
import dataclasses
import re

import pytest

from mmrepro import config
from mmrepro.config import RandomnessConfig, SelfChecks, upgrade_legacy_keys
from mmrepro.errors import RandomnessError
from mmrepro.seeds import RootSeed


def test_nothing_means_the_defaults_and_no_check_is_none_of_each():
    """The values themselves are compared with their page by tests/docs/test_links.py."""
    assert RandomnessConfig.parse(None) == RandomnessConfig.parse({}) == RandomnessConfig()
    assert RandomnessConfig(self_checks=False).self_checks == SelfChecks(
        samples=0, steps=0, witness=False, validation=False)


def test_the_docstring_has_every_key_in_the_order_of_the_fields():
    keys = [field.name for field in dataclasses.fields(RandomnessConfig)]
    assert re.findall(r'^        (\w+): ', RandomnessConfig.__doc__, re.MULTILINE) == keys


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
    (dict(numerics=dict(float32_precision='tf32')), "allowed: None, 'highest', 'high', 'medium'"),
    (dict(numerics=dict(num_threads=0)), 'randomness.numerics.num_threads=0 is out of range'),
    (dict(numerics=dict(num_threads=True)), 'randomness.numerics.num_threads=True has type bool'),
    (dict(numerics=dict(treads=2)), "numerics has an unknown key 'treads' .*mean 'num_threads'"),
    (dict(numerics='avx2'), r'numerics=.avx2. has type str; allowed is a dict such as dict\(num_'),
    (dict(self_checks=dict(samples=-1)), 'samples=-1 is out of range; allowed is an int from 0'),
    *((dict(self_checks=dict(steps=steps)), r'self_checks.steps=.*allowed is an int from 0')
      for steps in (-1, True, 1.5, '10', None)),
    (dict(self_checks=dict(samples=None)), 'self_checks.samples=None has type NoneType'),
    *((dict(self_checks=dict(witness=value)), 'witness=.* allowed: None, False, .warn., True')
      for value in (1, 0, 'yes', 10)),
    *((dict(self_checks=dict(validation=value)), 'validation=.* allowed: False, .warn., True')
      for value in (1, None, 'error')),
    (dict(self_checks=True), 'self_checks=True has type bool; .* or False for no check'),
    (dict(self_checks=dict(nonrepeatable_datasets='MyStream')),
     "datasets='MyStream' is not allowed; allowed is a"),
    (dict(virtual_ranks=0), 'randomness.virtual_ranks=0 is out of range'),
    (dict(virtual_ranks=True), r'virtual_ranks=True has type bool; .* or a dict such as dict'),
    (dict(virtual_ranks=dict(ranks=8, memory='low')), "memory='low' is not allowed"),
    ([('seed', 1)], 'has type list; allowed is a dict'),
    (dict(streams=7), r'randomness.streams=7 has type int; allowed is a dict such as dict\(init=7'),
    (dict(streams=dict(smaple=7)),
     r"randomness.streams has an unknown stream 'smaple' \(value 7\); did you mean 'sample'\?"),
    (dict(streams=dict(zzz=7)), 'unknown stream .*Known streams: init, sampler, sample, hook'),
    (dict(streams=dict(init=None)), 'streams.init=None has type NoneType; allowed is an int from'),
    (dict(streams=dict(init=-1)), 'randomness.streams.init=-1 is out of range'),
    (dict(streams=dict(sample=1), worker_seed='worker'), "no effect with .*worker_seed='worker'"),
    (dict(streams=dict(init=1), worker_seed='mmengine'), 'has no effect'),
    (dict(independent_predictions=True, worker_seed='mmengine'),
     'independent_predictions=True changes'),
])
def test_bad_values_are_refused_by_name(randomness, message):
    with pytest.raises(RandomnessError, match=message):
        RandomnessConfig.parse(randomness)


@pytest.mark.parametrize('randomness, variable, threads', [
    ({}, None, None), (dict(virtual_ranks=2), None, 1), (dict(virtual_ranks=2), '4', None),
    (dict(virtual_ranks=2, numerics=dict(num_threads=3)), None, 3)])
def test_virtual_ranks_have_as_many_threads_as_processes_of_torchrun(
        randomness, variable, threads, monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', variable or '')
    if variable is None:
        monkeypatch.delenv('OMP_NUM_THREADS')
    assert RandomnessConfig.parse(randomness).flags['num_threads'] == threads


def test_the_table_says_what_is_promised_and_what_not():
    table = RandomnessConfig.parse(dict(seed=3, deterministic='warn')).table()
    assert 'seed' in table and "'warn'" in table
    assert 'no: warn keeps non-deterministic kernels' in table
    assert 'never' in table


@pytest.mark.parametrize('randomness, words', [
    (dict(deterministic=True), 'the last line of a training'),
    (dict(deterministic=True, self_checks=dict(witness='warn')), 'the last line of a training'),
    (dict(deterministic=True, self_checks=dict(witness=False)), 'not tried .*witness=False'),
    (dict(deterministic=True, self_checks=False), 'not tried .*witness=False'),
    (dict(deterministic='warn'), 'not tried without deterministic=True'),
    (dict(deterministic=True, worker_seed='worker'), 'from the end of an epoch only')])
def test_the_start_says_whether_a_resume_is_tried_and_promises_none(randomness, words):
    promises = dict(RandomnessConfig.parse(randomness).promises())
    assert re.match(words, promises['a resumed run is the uninterrupted one'])


def test_both_forms_may_agree_but_not_disagree():
    with pytest.warns(DeprecationWarning):
        cfg = dict(seed=3, randomness=dict(seed=3))
        upgrade_legacy_keys(cfg)
    assert cfg == dict(randomness=dict(seed=3))
    upgrade_legacy_keys(cfg)  # the new form is left alone
    assert cfg == dict(randomness=dict(seed=3))
    with pytest.raises(RandomnessError, match=r'seed=3 at the top level .* randomness.seed=4'):
        upgrade_legacy_keys(dict(seed=3, randomness=dict(seed=4)))


def test_streams_may_have_roots_of_their_own():
    parsed = RandomnessConfig.parse(dict(seed=42, streams=dict(init=7)))
    assert parsed.root == RootSeed(42, dict(init=7))
    assert RandomnessConfig.parse(parsed.as_dict()) == parsed
    assert parsed.with_seed(3).root.streams == dict(init=7)
    assert hash(parsed) is not None


def test_the_seed_0_of_a_config_is_not_replaced_without_a_word():
    config.set_for_process(dict(seed=5, deterministic=True))
    try:
        with pytest.warns(UserWarning, match='randomness.seed=0 of the config is replaced by 5'):
            assert config.for_process(dict(seed=0, deterministic=False))['seed'] == 5
    finally:
        config.set_for_process(None)
