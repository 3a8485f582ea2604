"""The text of a config is formatted once for all checkpoints of a run."""
import mmengine.config.config as stock


def test_a_run_asks_for_its_text_often_and_waits_once(tmp_path, monkeypatch):
    from mmengine.runner import Runner
    from small_runs import config
    calls = []
    monkeypatch.setattr(stock, 'FormatCode',
                        lambda text, **style: (calls.append(text), (text, True))[1])
    cfg = config(tmp_path)
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', interval=1, by_epoch=False)
    Runner.from_cfg(cfg).train()
    assert len(list(tmp_path.glob('iter_*.pth'))) == 8
    assert len(calls) == len(set(calls)) <= 2
