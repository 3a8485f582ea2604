"""The text of a config is formatted once for all checkpoints of a run."""
import mmengine.config.config as stock
from mmengine.config import Config

from mmrepro.checkpoint.format_cache import MAX_TEXTS, cache_formatted_texts


def test_a_text_is_formatted_once_per_style(monkeypatch):
    calls = []

    def format_code(text, **style):
        calls.append(text)
        return f'{text}{len(style)}', True

    monkeypatch.setattr(stock, 'FormatCode', format_code)
    cache_formatted_texts()
    cache_formatted_texts()
    cfg = Config(dict(a=1))
    assert cfg.pretty_text == cfg.pretty_text and len(calls) == 1
    cfg.a = 2
    assert 'a=2' in cfg.pretty_text and len(calls) == 2
    assert stock.FormatCode('a', style_config=1) != stock.FormatCode('a', style_config=1, b=2)
    for number in range(10):
        stock.FormatCode(str(number))
    assert len(stock.FormatCode._mmrepro_texts) == MAX_TEXTS


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
