#!/usr/bin/env bash
# torch on a CPU: from the same seed, a tensor in channels_last has other random numbers than a contiguous
# one of the same shape. Uniform numbers, dropout masks too, come in the order of the memory: the same
# numbers at other places. Normal numbers are others altogether: a contiguous tensor of 16 values or more
# has a method of its own. So a model that is converted with model.to(memory_format=torch.channels_last),
# which promises the same results faster, drops other features from the same seed (its weights are equal
# and without dropout so is its output, to rounding), and weights that are initialized after the
# conversion are others than those initialized before it.
#
# Behaviour seen with torch 2.13.0, numpy 2.4.6: how many of the values are equal at their places
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > look.py <<'END'
import torch
from torch import nn

FORMATS = torch.contiguous_format, torch.channels_last


def compare(name, draw):
    drawn = []
    for memory_format in FORMATS:
        torch.manual_seed(0)
        drawn.append(draw(memory_format).detach())
    one, other = drawn
    equal = (one == other).double().mean()
    permuted = torch.equal(one.flatten().sort().values, other.flatten().sort().values)
    print(f'{name}: {equal:.0%} are equal; a permutation: {permuted}')


features = torch.ones(2, 64, 16, 16)
weights = torch.empty(64, 32, 3, 3)
for name, draw in (
        ('dropout', lambda to: nn.functional.dropout(features.to(memory_format=to), .5)),
        ('rand_like', lambda to: torch.rand_like(features.to(memory_format=to))),
        ('randn_like', lambda to: torch.randn_like(features.to(memory_format=to))),
        ('kaiming_uniform_', lambda to: nn.init.kaiming_uniform_(weights.to(memory_format=to))),
        ('kaiming_normal_', lambda to: nn.init.kaiming_normal_(weights.to(memory_format=to)))):
    compare(name, draw)

image = torch.rand(1, 3, 32, 32)
model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Dropout(.5), nn.Conv2d(64, 8, 1))
for mode in (False, True):
    outputs = []
    for memory_format in FORMATS:
        torch.manual_seed(0)
        outputs.append(model.train(mode).to(memory_format=memory_format)(image))
    print(f'a model that is converted, train({mode}): equal to rounding:',
          torch.allclose(*outputs, atol=1e-5))
END
venv/bin/python -W ignore look.py | tee seen
diff seen - <<'END'
dropout: 50% are equal; a permutation: True
rand_like: 0% are equal; a permutation: True
randn_like: 0% are equal; a permutation: False
kaiming_uniform_: 1% are equal; a permutation: True
kaiming_normal_: 0% are equal; a permutation: False
a model that is converted, train(False): equal to rounding: True
a model that is converted, train(True): equal to rounding: False
END
