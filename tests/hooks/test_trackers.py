"""Trackers of MMEngine's visualizer get what identifies a run, and change no bit of it."""
import json
import logging
import os

import pytest
from harness import Child
from mmengine.runner import Runner
from mmengine.visualization import LocalVisBackend
from small_runs import config, weights_of

from mmrepro.digests import state_digest
from mmrepro.hooks import trackers


def trained(folder, *backends, read=lambda runner: None):
    """Train in a process of its own; return the weights and what ``read`` finds at the end."""
    def job():
        os.chdir(folder)
        for name, value in dict(WANDB_MODE='offline', WANDB_SILENT='true',
                                MLFLOW_ALLOW_FILE_STORE='true').items():
            os.environ[name] = value
        cfg = config(folder, randomness=dict(seed=3, deterministic=True),
                     custom_hooks=[dict(type='FingerprintHook')])
        cfg.visualizer = dict(type='Visualizer', vis_backends=list(backends))
        runner = Runner.from_cfg(cfg)
        found = []
        close = runner.visualizer.close
        # before the packages end their runs
        runner.visualizer.close = lambda: (found.append(read(runner)), close())
        runner.train()
        digest = state_digest(runner.model.state_dict())
        return weights_of(runner), digest, (found or [read(runner)])[0]

    folder.mkdir()
    return Child(job).result()


def backend(kind, folder, **more):
    return dict(type=kind, save_dir=str(folder / 'tracked'), **more)


def test_tensorboard_gets_seed_facts_digests_checks_and_the_manifest(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    plain, digest, _ = trained(tmp_path / 'plain')
    folder = tmp_path / 'run'
    weights, same, _ = trained(folder, backend('TensorboardVisBackend', folder))
    assert weights == plain and same == digest  # bit for bit
    events = EventAccumulator(str(folder / 'tracked'))
    events.Reload()

    def text(name):
        event = events.Tensors(f'mmrepro/{name}/text_summary')[-1]
        return event.tensor_proto.string_val[0].decode()

    assert text('randomness.seed') == '3' and text('randomness.deterministic') == 'True'
    assert text('weights/last') == text('weights/iter_8') == digest[:16] != text('weights/iter_4')
    assert int(text('repeated/steps')) > 0 and int(text('repeated/samples')) > 0
    manifest = json.loads((folder / 'mmrepro' / 'manifest.json').read_text())
    assert json.loads(text('manifest.json')) == manifest and manifest['self_checks']
    names = {tag.split('/')[1] for tag in events.Tags()['tensors'] if tag.startswith('mmrepro/')}
    assert 'version.torch' in names and not any(name.startswith('config.') for name in names)


def test_mlflow_gets_params_tags_and_the_manifest(tmp_path):
    mlflow = pytest.importorskip('mlflow')
    folder = tmp_path / 'run'

    def read(runner):
        run = mlflow.get_run(mlflow.active_run().info.run_id)
        return run.data.params, run.data.tags, run.info.artifact_uri

    _, digest, (params, tags, artifacts) = trained(
        folder, backend('MLflowVisBackend', folder), read=read)
    assert params['mmrepro/randomness.seed'] == '3'
    assert tags['mmrepro/weights/last'] == digest[:16] and 'mmrepro/repeated/steps' in tags
    with open(os.path.join(artifacts.replace('file://', ''), 'manifest.json'), 'rb') as file:
        assert file.read() == (folder / 'mmrepro' / 'manifest.json').read_bytes()


def test_wandb_gets_config_summary_and_the_manifest(tmp_path):
    wandb = pytest.importorskip('wandb')
    folder = tmp_path / 'run'
    _, digest, found = trained(folder, backend('WandbVisBackend', folder), read=lambda runner: (
        wandb.config['mmrepro/randomness.seed'], wandb.run.summary['mmrepro/weights/last']))
    assert found == ('3', digest[:16])
    kept, = (folder / 'tracked').rglob('files/**/manifest.json')
    assert kept.read_bytes() == (folder / 'mmrepro' / 'manifest.json').read_bytes()


def test_aim_gets_values_by_name_and_the_manifest(tmp_path):
    pytest.importorskip('aim')
    folder = tmp_path / 'run'

    def read(runner):
        run = runner.visualizer.get_backend('AimVisBackend').experiment
        return [run.get(f'mmrepro/{name}') for name in (
            'randomness.seed', 'weights/last', 'manifest.json')]

    _, digest, (seed, last, manifest) = trained(
        folder, backend('AimVisBackend', folder, init_kwargs=dict(repo=str(folder))), read=read)
    assert (seed, last) == ('3', digest[:16])
    assert manifest == (folder / 'mmrepro' / 'manifest.json').read_text()


class BrokenTracker(LocalVisBackend):
    """It draws, and its server is gone."""

    def __init__(self, save_dir):
        super().__init__(save_dir)

    @property
    def experiment(self):
        import torch
        torch.rand(1)
        raise ConnectionError('no server at tracker.invalid')


def test_a_tracker_that_fails_is_named_and_changes_nothing(tmp_path, monkeypatch):
    from mmengine.registry import VISBACKENDS
    VISBACKENDS.register_module(module=BrokenTracker, force=True)
    monkeypatch.setitem(trackers.TRACKERS, 'BrokenTracker', trackers.TRACKERS['AimVisBackend'])
    monkeypatch.setattr(logging.Logger, 'warning', lambda self, text, *args: said.append(text))
    said = []
    plain, *_ = trained(tmp_path / 'plain')
    broken, _, found = trained(tmp_path / 'run', backend('BrokenTracker', tmp_path / 'run'),
                               read=lambda runner: [text for text in said if 'Tracker' in text])
    assert broken == plain
    assert ('BrokenTracker did not take the params of mmrepro: ConnectionError: no server at '
            'tracker.invalid') in found
    # at the start, two checkpoints and the end
    assert [text.split(' of mmrepro')[0].split()[-1] for text in found] == [
        'file', 'params', 'tags', 'tags', 'file', 'tags']


def test_backends_that_are_no_trackers_are_left_alone(tmp_path):
    _, _, found = trained(tmp_path / 'run', backend('LocalVisBackend', tmp_path / 'run'))
    assert found is None and not list((tmp_path / 'run' / 'tracked').glob('mmrepro*'))
