"""Batches have the same bits on every x86-64 CPU with AVX2; variables emulate other hosts."""
import functools
import json
import re

import pytest
from children import printed_result

from dev.hosts.__main__ import RESULTS, ROOT, differing, start, table, write_data
from dev.hosts.emulated import CONTROLS, hosts
from mmrepro.facts.collect import cpu_features


@pytest.fixture(scope='module')
def avx2():
    if 'avx2' not in str(cpu_features()).split():
        pytest.skip('the promise is for x86-64 CPUs with AVX2, and this CPU has none')


@pytest.fixture(scope='module')
def data(avx2, tmp_path_factory):
    root = str(tmp_path_factory.mktemp('photographs'))
    return root, write_data(root)


@pytest.fixture(scope='module')
def found(data):
    """Return a function of a host, which computes its outcome once."""
    return functools.cache(lambda host, *only: printed_result(
        start(data[0], hosts()[host].variables, only=only)))


@pytest.mark.parametrize('host', [
    'all libraries at AVX2',
    pytest.param('torch, MKL and oneDNN without AVX2', marks=pytest.mark.nightly)])
@pytest.mark.nightly
def test_hosts_with_avx2_load_the_same_batches(found, host):
    assert hosts()[host].promised
    assert differing(found(host)['digests'], found('this CPU')['digests']) == []
    assert len(found(host)['digests']) >= 10


@pytest.mark.nightly
@pytest.mark.parametrize('host, pipeline', list(zip(CONTROLS, ('YOLOX', 'CenterNet'))))
def test_other_hosts_do_not(found, host, pipeline):
    """Otherwise the variables would have done nothing, and the test above would show nothing."""
    assert differing(found(host, pipeline)['digests'], found('this CPU')['digests']) == [pipeline]


def test_batches_are_those_of_the_machine_that_recorded_them(found, data):
    """A real comparison between CPUs, where this one is another."""
    recorded, here = json.loads(RESULTS.read_text()), found('this CPU')
    if here['versions'] != recorded['versions']:
        pytest.skip(f'recorded with {recorded["versions"]}; here is {here["versions"]}')
    machines = f'{recorded["cpu"]} ({recorded["features"]}) and {here["cpu"]} ({here["features"]})'
    assert data[1] == recorded['data'], f'{machines} wrote different images'
    assert differing(here['digests'], recorded['digests']) == [], f'{machines} differ'


def test_the_record_is_of_the_locked_versions():
    versions = json.loads(RESULTS.read_text())['versions']
    locked = dict(re.findall(r'^([\w-]+)==([\w.]+)', (ROOT / 'requirements/lock.txt').read_text(),
                             re.MULTILINE))
    for name, package in dict(numpy='numpy', cv2='opencv-python', mmcv='mmcv-lite', mmdet='mmdet',
                              mmengine='mmengine').items():
        assert locked[package].startswith(versions[name]), f'{package}: run python -m dev.hosts'


def test_what_was_promised_holds_on_every_host_of_the_record():
    recorded = json.loads(RESULTS.read_text())
    assert [one['host'] for one in recorded['hosts'] if one['promised'] and one['differs']] == []
    for host in CONTROLS:
        assert f'| {host} | - | none' not in table(recorded)
