"""Reports reach the backends that a config's visualiser names, and no others."""
from __future__ import annotations

import pytest
from fake_runs import write_run
from mmengine.config import Config
from mmengine.registry import VISBACKENDS
from mmengine.visualization import BaseVisBackend

from mmrepro import cli
from mmrepro.report import compare as comparing
from mmrepro.report.plot_style import figure, png
from mmrepro.report.publish import backends_of, publish
from mmrepro.report.report import Figure, Report

SENT = []


@VISBACKENDS.register_module(force=True)
class BackendOfThisTest(BaseVisBackend):
    """Remembers what it was sent, as TensorBoard would."""

    def _init_env(self):
        pass

    @property
    def experiment(self):
        return self

    def add_scalar(self, name, value, step=0, **kwargs):
        SENT.append((name, value, step))

    def add_image(self, name, image, step=0, **kwargs):
        assert image.dtype == 'uint8' and image.ndim == 3 and image.shape[2] == 3
        SENT.append((name, image.shape, step))

    def close(self):
        SENT.append('closed')


CONFIG = """
vis_backends = [dict(type='LocalVisBackend'), dict(type='BackendOfThisTest')]
visualizer = dict(type='DetLocalVisualizer', vis_backends=vis_backends)
"""


@pytest.fixture(autouse=True)
def nothing_sent():
    SENT.clear()


def test_the_local_backend_is_left_out(tmp_path):
    cfg = Config.fromstring(CONFIG, '.py')
    assert [backend['type'] for backend in backends_of(cfg)] == ['BackendOfThisTest']
    assert backends_of(Config(dict(vis_backends=[dict(type='mmengine.LocalVisBackend')]))) == []
    assert publish(Config({}), str(tmp_path), 'x', Report('', '')) == [] and not SENT
    assert list(tmp_path.iterdir()) == []


def test_scalars_and_pictures_arrive(tmp_path):
    with figure(figsize=(1, 1)) as (fig, _):
        picture = png(fig)
    names = publish(Config.fromstring(CONFIG, '.py'), str(tmp_path), 'mmrepro/x',
                    Report('', '', scalars=[('a', 1., 0), ('a', 2., 1)],
                           figures={'plot': Figure('', lambda: picture)}))
    assert names == ['BackendOfThisTest']
    assert SENT == [('a', 1., 0), ('a', 2., 1), ('mmrepro/x/plot', (110, 110, 3), 0), 'closed']


def test_compare_publishes_its_verdict(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(comparing, 'PLOTS', {})
    a, b = write_run(tmp_path / 'a'), write_run(tmp_path / 'b', since=5, noise=1e-6)
    config = tmp_path / 'config.py'
    config.write_text(CONFIG)
    assert cli.main(['compare', a, b, '--publish', str(config)]) == 1
    assert ('mmrepro/compare/first_difference', 5., 0) in SENT
    assert ('mmrepro/compare/loss_difference', 0., 5) in SENT
    SENT.clear()
    assert cli.main(['compare', a, a, '--publish', str(config)]) == 0
    assert SENT[0] == ('mmrepro/compare/equal', 1., 0)
    assert not any('first_difference' in name for name, *_ in SENT)
    config.write_text('a = 1\n')
    assert cli.main(['compare', a, b, '--publish', str(config)]) == 2
    assert 'TensorboardVisBackend' in capsys.readouterr().err
