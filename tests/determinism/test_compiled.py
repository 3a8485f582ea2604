"""Compiled models have kernels that depend on the size they get, not on sizes that came before."""
import pytest
import torch
from harness import python
from mmengine.registry import MODELS
from mmengine.runner import Runner
from small_runs import NoisyLine, small_run

from mmrepro import determinism
from mmrepro.determinism import check_compiled
from mmrepro.errors import DeterminismError

SIZES = (4, 5, 6)


class Compiler:
    """A compiler that keeps what it is asked to compile for, and compiles nothing."""

    def __init__(self):
        self.shapes = []

    def __call__(self, module, inputs):
        values = [node.meta['example_value'] for node in module.graph.nodes
                  if node.op == 'placeholder']
        self.shapes += [tuple(one.shape) for one in values if torch.is_tensor(one)]
        return module


def compiled_for(sizes):
    torch._dynamo.reset()
    compiler = Compiler()
    function = torch.compile(lambda x: x * 2, backend=compiler)
    for size in sizes:
        function(torch.ones(size))
    return [tuple(map(str, shape)) for shape in compiler.shapes]


def test_every_size_is_compiled_for_itself():
    stock = compiled_for(SIZES)
    assert len(stock) == 2 and not stock[1][0].isdigit()  # a symbol
    determinism.enable(env={})
    assert compiled_for(SIZES) == [(str(size), ) for size in SIZES]
    determinism.disable()
    assert compiled_for(SIZES) == stock


def test_too_many_sizes_are_an_error():
    import torch._dynamo.config as config
    determinism.enable(env={})
    with config.patch(recompile_limit=2), pytest.raises(Exception, match='recompile_limit'):
        compiled_for(SIZES)


def test_compiled_scans_are_not_split(monkeypatch):
    """On CUDA, inductor splits the scan of 1,000,000 elements into parts that look back."""
    from torch._inductor import ir
    monkeypatch.setattr(ir.Reduction, 'num_splits', staticmethod(lambda **settings: ('hint', 8)))

    def splits():
        return ir.Scan.num_splits(
            device=torch.device('cuda'), dtype=torch.float32, inner_fn=None, axis=0,
            pointwise_ranges=[], scan_ranges=[1_000_000], combine_fn=None, scan_numel=1_000_000)

    assert splits() == ('hint', 8)
    determinism.enable(env={})
    assert splits() == ('hint', 1) and not determinism.drifted()
    determinism.disable()
    assert splits() == ('hint', 8)


def test_the_compiler_may_be_imported_later():
    said = python('-c', (
        'import sys; from mmrepro import determinism; determinism.enable(); '
        'print("torch._dynamo.config" in sys.modules); import torch._dynamo.config as config; '
        'print(config.automatic_dynamic_shapes, determinism.drifted()); determinism.disable(); '
        'print(config.automatic_dynamic_shapes)'))
    assert said.split('\n')[:3] == ['False', 'False ()', 'True']


@MODELS.register_module(force=True)
class CompiledLine(NoisyLine):
    def __init__(self, dynamic=None):
        super().__init__()
        self.line = torch.compile(self.line, backend='eager', dynamic=dynamic)


DETERMINISTIC = dict(seed=3, deterministic=True)


@pytest.mark.parametrize('changes, message', [
    ({'model.type': 'CompiledLine', 'model.dynamic': True}, 'line is compiled: dynamic=True lets'),
    *((dict(compile=dict(dynamic=True, **more)), 'compile.dynamic=True: dynamic=True lets')
      for more in ({}, dict(backend='eager')))])
def test_a_dynamic_model_or_setting_is_refused_by_name(changes, message, tmp_path):
    with pytest.raises(DeterminismError, match=message):
        Runner.from_cfg(small_run(tmp_path, randomness=DETERMINISTIC, **changes)).train()


def test_a_release_that_cannot_say_it_gives_up_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr('mmrepro.determinism.compiled._can_fail', lambda: False)
    cfg = small_run(tmp_path, randomness=DETERMINISTIC, compile=True)
    with pytest.raises(DeterminismError, match='^compile: torch .* uncompiled, without a word'):
        Runner.from_cfg(cfg).train()


@pytest.mark.parametrize('settings', [True, {}, dict(disable=False), dict(backend='eager')])
def test_portable_bits_and_a_compiled_model_exclude_each_other(settings):
    with pytest.raises(DeterminismError, match='^compile: torch.compile makes kernels for the CPU'):
        check_compiled(None, settings, 'portable')


@pytest.mark.parametrize('settings', [None, False, dict(disable=True, dynamic=True)])
def test_a_model_that_is_not_compiled_is_not_refused(settings):
    check_compiled(None, settings, 'portable')
