#!/usr/bin/env bash
# torch on a CPU: torch.manual_seed(0) gives the same rand, randn, randint, randperm and bernoulli in
# all releases, and initial weights of layers are the same. Three other draws are not: between 2.6 and
# 2.8, dropout and exponential_ began to take another number of values from the generator and to make
# others of them (two in five values of a mask with p=0.3 change), and multinomial follows. Between
# 2.10 and 2.13, nn.init.trunc_normal_ did the same, with which transformers begin.
#
# Behaviour seen with torch 2.6.0, 2.8.0, 2.10.0 and 2.13.0, numpy 1.26.4 (3 GB to fetch for each)
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
cat > look.py <<'END'
import hashlib

import torch

DRAWS = {
    'rand': lambda: torch.rand(999), 'randn': lambda: torch.randn(999),
    'randperm': lambda: torch.randperm(999), 'bernoulli': lambda: torch.full((999, ), .3).bernoulli(),
    'nn.Conv2d': lambda: torch.nn.Conv2d(8, 16, 3).weight,
    'dropout': lambda: torch.nn.functional.dropout(torch.ones(999), .3),
    'exponential_': lambda: torch.empty(999).exponential_(),
    'multinomial': lambda: torch.multinomial(torch.linspace(1, 2, 50), 20),
    'trunc_normal_': lambda: torch.nn.init.trunc_normal_(torch.empty(999), std=.02)}
for name, draw in DRAWS.items():
    torch.manual_seed(0)
    found = [draw().detach(), torch.rand(3)]  # and where the generator stands
    digest = hashlib.sha256(b''.join(one.numpy().tobytes() for one in found))
    print(name, digest.hexdigest()[:8])
END
for version in 2.6.0 2.8.0 2.10.0 2.13.0; do
    venv/bin/pip install --quiet --no-compile --no-cache-dir --only-binary :all: --target packages \
        numpy==1.26.4 "torch==$version"
    PYTHONPATH=packages venv/bin/python look.py > "$version"
    rm -r packages
done
paste -d ' ' 2.6.0 2.8.0 2.10.0 2.13.0 | while read -r name a _ b _ c _ d; do
    changed=
    [ "$a" = "$b" ] || changed+=' 2.8.0'
    [ "$b" = "$c" ] || changed+=' 2.10.0'
    [ "$c" = "$d" ] || changed+=' 2.13.0'
    echo "$name:${changed:- the same in all}"
done | tee seen
diff seen - <<'END'
rand: the same in all
randn: the same in all
randperm: the same in all
bernoulli: the same in all
nn.Conv2d: the same in all
dropout: 2.8.0
exponential_: 2.8.0
multinomial: 2.8.0
trunc_normal_: 2.13.0
END
