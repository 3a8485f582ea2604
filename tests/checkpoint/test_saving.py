"""One object owns a save: the state of a rank is collected once. What MMEngine writes is kept."""
import mmengine.config.config as stock
import pytest
import torch
from mmengine.runner import Runner
from small_runs import finish, small_run


def test_a_run_publishes_its_last_checkpoint(tmp_path):
    cfg = small_run(tmp_path)
    cfg.default_hooks.checkpoint.update(published_keys=['meta', 'state_dict'], save_last=True)
    expected = finish(cfg)
    (published, ) = tmp_path.glob('iter_8-*.pth')
    content = torch.load(published, weights_only=False)
    assert set(content) == {'meta', 'state_dict'}
    assert content['state_dict']['line.weight'].numpy().tobytes() == expected['line.weight']


def test_weights_can_be_saved_before_the_optimizer_is_built(tmp_path):
    runner = Runner.from_cfg(small_run(tmp_path))
    runner.save_checkpoint(str(tmp_path), 'early.pth', save_optimizer=False,
                           save_param_scheduler=False)
    content = torch.load(tmp_path / 'early.pth', weights_only=False)
    assert torch.equal(content['state_dict']['line.weight'], runner.model.line.weight)
    with pytest.raises(TypeError, match='OptimWrapper'):
        runner.save_checkpoint(str(tmp_path), 'early.pth')


def test_the_text_of_the_config_is_formatted_once_for_all_checkpoints(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(stock, 'FormatCode',
                        lambda text, **style: (calls.append(text), (text, True))[1])
    finish(small_run(tmp_path))
    assert len(list(tmp_path.glob('iter_*.pth'))) == 8
    assert len(calls) == len(set(calls)) <= 2
