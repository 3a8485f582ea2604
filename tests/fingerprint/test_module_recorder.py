"""The calls of modules in fingerprints."""
import weakref

import pytest
import torch

from mmrepro.fingerprint.module_recorder import ModuleRecorder


class Held:
    pass


class Holding(torch.autograd.Function):
    """A part of the graph that holds an object."""

    @staticmethod
    def forward(ctx, x, held):
        ctx.held = held
        return x.clone()


class Ends(torch.nn.Module):
    def forward(self, x):
        raise ValueError('an error')


def test_a_call_that_an_error_ends_is_forgotten_at_the_next_start():
    model = Ends()
    recorder = ModuleRecorder(model)
    recorder.start()
    held = Held()
    x = Holding.apply(torch.ones(1, requires_grad=True), held)
    with pytest.raises(ValueError, match='an error') as error:
        model(x)
    recorder.stop()
    recorder.start()
    graph = weakref.ref(held)
    del x, held, error
    assert graph() is None
