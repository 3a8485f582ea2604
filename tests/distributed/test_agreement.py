"""Ranks that differ stop, all of them, for the same reason; ranks that do not come are named."""
import importlib
import json
import os
import platform
import sys
from pathlib import Path

import pytest
import torch
from facts.test_training_data import run as annotated_run
from facts.test_training_data import write
from ranks import as_rank, on_ranks

from mmrepro import determinism
from mmrepro.distributed.agreement import agree, broadcast_seed, check_agreement, start_fields
from mmrepro.errors import AgreementError


def compare(rank, world, fields):
    check_agreement(fields[rank])
    return torch.distributed.get_rank()


def several(rank, world):
    order = ('a0', 'a1', 'b0', 'a2')
    return [agree(topic[0], topic, lambda values: values[-1]) for topic in order]


def elsewhere(rank, world, at):
    """The ranks in ``at`` have come to another point."""
    if rank in at:
        return agree('a signal to stop', False, any)
    return agree('checkpoint', 'x' * 100, max)


def asking(rank, world, says):
    return agree('a signal to stop', rank == says, any)


def errors(outcomes):
    assert not any(fine for fine, _ in outcomes), outcomes
    assert {type(result[0]) for _, result in outcomes} == {AgreementError}
    return [str(result[0]) for _, result in outcomes]


@pytest.mark.parametrize('world', [2, 4])
def test_equal_fields_pass(pool, world):
    fields = {'seed': 7, 'lr': 0.1, 'name': 'a\nb', 'nothing': None, 'list': [1, 'x'], 'b': True}
    assert pool.run(compare, world, [fields] * world) == list(range(world))


MANY = [{f'f{number:02}': number + rank for number in range(50)} for rank in range(2)]
# fields of rank 0 and rank 1, and what the message says and does not say
DIFFERENCES = {
    **{f'{here!r} and {there!r}': (
        {'x': here}, {'x': there}, f'x: rank 0 has {here!r}, rank 1 has {there!r}', 'line')
       for here, there in [(1, True), (1, '1'), (1, 1.0), (None, ''), (0.1, 0.2)]},
    'a field that a rank lacks': (
        {'a': 1}, {'a': 1, 'b': 2}, "b: rank 0 has '(nothing)', rank 1 has 2", 'a:'),
    'the first line of a config': (
        {'config': 'a = 1\nlr = 0.1\nb = 2\n'}, {'config': 'a = 1\nlr = 0.2\nb = 3\n'},
        "config, line 2: rank 0 has 'lr = 0.1', rank 1 has 'lr = 0.2'", 'b = 3'),
    'a config that ends early': (
        {'config': 'a\nb'}, {'config': 'a'},
        "config, line 2: rank 0 has 'b', rank 1 has '(end)'", 'line 1'),
    'a long list': (*MANY, 'and 30 more', 'f20')}


@pytest.mark.parametrize('case', DIFFERENCES)
def test_a_difference_stops_every_rank_and_is_shown(pool, case):
    here, there, shown, hidden = DIFFERENCES[case]
    message, *others = errors(pool.outcomes(compare, 4, [here, there, here, here]))
    assert set(others) == {message} and shown in message and hidden not in message


@pytest.mark.parametrize(('world', 'at'), [(2, [1]), (2, [0]), (4, [0, 2])])
def test_ranks_at_different_points_are_named(pool, world, at):
    message, *others = errors(pool.outcomes(elsewhere, world, at))
    assert set(others) == {message}
    for rank in range(world):
        assert f'rank {rank} is at: {"a signal to stop" if rank in at else "checkpoint"}' in message


@pytest.mark.parametrize('says', [None, 0, 2])
def test_one_rank_is_enough(pool, says):
    assert pool.run(asking, 3, says) == [says is not None] * 3


def test_start_fields_are_complete_and_comparable(monkeypatch):
    monkeypatch.setattr(torch, '__version__', '0.0+mine')  # of the module that is loaded
    fields = start_fields('text', {'seed': 3, 'deterministic': 'warn'})
    assert fields['randomness.seed'] == 3 and fields['config'] == 'text'
    assert fields['scheme'] == 1 and fields['version.torch'] == '0.0+mine'
    assert {f'version.{name}' for name in ('mmrepro', 'mmengine', 'mmcv', 'mmdet', 'python')} < set(
        fields)
    assert set(determinism.snapshot()) < set(fields)
    check_agreement(fields)  # alone: nothing to compare, but the types are checked


def test_the_operator_provider_is_found_without_importing_mmcv(monkeypatch):
    for name in ('mmcv', 'mmcv._ext'):  # other tests of this process may have imported them
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert start_fields('', {})['operators'] == 'mmcv is not in use'
    assert 'mmcv' not in sys.modules


def test_a_field_that_cannot_be_compared_is_named():
    with pytest.raises(TypeError, match='device='):
        check_agreement({'a': 1, 'device': torch.device('cpu')})


def test_a_world_of_one_agrees_and_draws_from_the_operating_system(monkeypatch):
    assert agree('topic', 3, lambda values: values + [4]) == [3, 4]
    asked = []
    monkeypatch.setattr('mmrepro.distributed.agreement.secrets.randbelow',
                        lambda n: asked.append(n) or 11)
    state = torch.get_rng_state()
    assert broadcast_seed(None) == 11 and asked == [2**32]
    assert broadcast_seed(9) == 9
    assert torch.equal(torch.get_rng_state(), state)


def test_rounds_and_topics_do_not_mix(pool):
    rounds = pool.run(several, 3)
    assert rounds[0] == rounds[1] == rounds[2] == ['a0', 'a1', 'b0', 'a2']


def of_node(rank, world_size, port, cfg, work_dir):
    """Train where the node has a disk of its own: another folder under the same relative path."""
    os.chdir(f'{work_dir}/node{rank}')
    os.environ.update(json.loads(Path('variables.json').read_text()))
    sys.path.insert(0, os.getcwd())
    importlib.import_module('own_module')
    return as_rank(rank, world_size, port, cfg, work_dir)


# what a node has of its own -> content of the file, and what the refusal names
ON_A_NODE = {
    'own_module.py': ('GAIN = 2\n', 'own_module.py: rank 1 on {node} has'),
    'images/3.jpg': ('2', '3.jpg: rank 1 on {node} has'),
    'annotations/train.json': (
        json.dumps(dict(metainfo={}, data_list=[
            dict(img_path=f'{number}.jpg', value=float(number == 3)) for number in range(8)])),
        'train.json: rank 1 on {node} has'),
    'variables.json': ('{"TORCH_BLAS_PREFER_CUBLASLT": "1"}',
                       "rank 1: env.TORCH_BLAS_PREFER_CUBLASLT: rank 0 has None, rank 1 has '1'"),
    'own.json': ('{}', None)}  # which nobody reads


@pytest.mark.parametrize('what', ON_A_NODE)
def test_what_differs_on_a_node_is_refused_by_name_before_the_first_step(what, tmp_path):
    """Names and paths are equal on all nodes."""
    for rank in range(2):
        root = write(tmp_path / f'node{rank}')
        (tmp_path / f'node{rank}' / 'images').mkdir()
        for number in range(8):
            Path(root, 'images', f'{number}.jpg').write_bytes(b'1')
        Path(root, 'own_module.py').write_text('GAIN = 1\n')
        Path(root, 'variables.json').write_text('{}')
    content, said = ON_A_NODE[what]
    Path(root, what).write_text(content)
    cfg = annotated_run(tmp_path / 'work', '.')
    cfg.env_cfg = dict()
    for message in on_ranks(2, cfg, tmp_path, function=of_node):
        assert ('AgreementError' in message) == (said is not None), message
        assert said is None or said.format(node=platform.node()) in message, message
    assert bool(list(tmp_path.rglob('*.pth'))) == (said is None)
