"""The state of a run by name."""
import types

import torch

from mmrepro.fingerprint import run_state


class Warm(torch.nn.Linear):
    calls = 0
    noise = torch.Generator()


def test_attributes_that_only_the_class_has_are_seen():
    runner = types.SimpleNamespace(model=torch.nn.Sequential(Warm(1, 1)), _resume=False, hooks=[])
    before = run_state.attributes(runner)
    assert '0.calls=0' in before and any(t.startswith('0.noise=generator ') for t in before)
    runner.model[0].calls += 1
    assert set(before) ^ set(run_state.attributes(runner)) == {'0.calls=0', '0.calls=1'}
