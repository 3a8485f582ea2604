"""``mmrepro seeds`` with real trainings in real processes."""
import json
import os

import pytest

from mmrepro import cli

HERE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'support')


@pytest.mark.nightly
def test_seeds_differ_repeat_and_are_not_trained_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('PYTHONPATH', HERE)
    config = os.path.join(HERE, 'toy_config.py')

    def values(folder, *more):
        assert cli.run('seeds', [config, '--work-dir', str(tmp_path / folder), '--no-plots', *more,
                                 '--json']) == 0
        return json.loads(capsys.readouterr().out)['values']['toy_config']

    both = values('first', '--seeds', '0..1')
    assert len(set(both)) == 2 and all(.5 < value < 1 for value in both)
    assert values('first', '--seeds', '0..1', '--report-only') == both
    # interrupted after the first of two validations, then resumed by the same command
    folder = tmp_path / 'second' / 'toy_config' / 'seed_1'
    source = tmp_path / 'first' / 'toy_config' / 'seed_1'
    folder.mkdir(parents=True)
    os.link(source / 'epoch_3.pth', folder / 'epoch_3.pth')
    assert values('second', '--seeds', '1') == both[1:]
    assert not (folder / 'epoch_1.pth').exists() and (folder / 'epoch_6.pth').exists()
