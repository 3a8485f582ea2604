#!/usr/bin/env bash
# Install a wheel in an empty environment, and use it outside of a checkout as its pages say.
#
#   bash tools/try_wheel.sh dist/mmrepro-*.whl [PYTHON]
#
# torch for Linux comes with CUDA and takes several GB. The small CPU build:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu bash tools/try_wheel.sh ...
# TORCH is what to install as torch (default: torch).
set -euo pipefail
wheel="$(realpath "$1")"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH
"${2:-python3}" -m venv "$folder/venv"
cd "$folder"
export PATH="$folder/venv/bin:$PATH" OMP_NUM_THREADS=1
say() { printf '\n== %s\n' "$*"; }

say "$(python --version): install"
pip install --quiet --disable-pip-version-check "${TORCH:-torch}"
pip install --quiet --disable-pip-version-check 'mmcv-lite<2.2' pytest "${wheel}[demo]"
python -c 'import torch, numpy; print("torch", torch.__version__, "numpy", numpy.__version__)'

say "doctor"
mmrepro doctor
say "demo"
mmrepro demo

say "a config of one's own: audit, train, resume, compare"
configs="$(python -c 'from mmrepro.demo.dataset import shipped; print(shipped("configs/demo"))')"
cat > mine.py <<EOF
_base_ = '$configs/rtmdet_tiny_demo.py'
train_dataloader = dict(batch_size=2, dataset=dict(indices=4))
train_cfg = dict(max_epochs=2)
default_hooks = dict(checkpoint=dict(interval=1, by_epoch=False))
EOF
mmrepro audit mine.py
mmrepro train mine.py --work-dir one --fingerprint
mmrepro train mine.py --work-dir two --fingerprint
rm two/iter_[34].pth
echo "$PWD/two/iter_2.pth" > two/last_checkpoint
mmrepro train mine.py --work-dir two --fingerprint --resume
mmrepro compare one two

say "a golden of a test"
cat > test_mine.py <<'EOF'
import torch
from mmrepro import set_random_seed


def test_a_training_step(same_bits):
    set_random_seed(42, deterministic=True)
    model = torch.nn.Linear(3, 2)
    loss = model(torch.rand(4, 3)).square().mean()
    loss.backward()
    same_bits(dict(loss=loss, gradients=[p.grad for p in model.parameters()]))
EOF
python -m pytest -q test_mine.py --mmrepro-update
python -m pytest -q test_mine.py
say "all of it worked"
