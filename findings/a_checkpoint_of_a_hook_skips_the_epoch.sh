#!/usr/bin/env bash
# A hook that calls MMEngine's `runner.save_checkpoint(folder, name)` in the middle of an epoch, from
# after_train_iter, writes a file whose `meta` says the next epoch and the iteration that is under way:
# the defaults of that method are those of the end of an epoch. A run that resumes from it trains fewer
# steps: it begins the next epoch at once and never sees the rest of the samples, without a word. Here,
# of 12 steps in 3 epochs, 6 are done when the file is written, and the resumed run takes 4 instead of 6.
# With by_epoch=False the numbers are right, but MMEngine then counts the iteration only: it resumes
# at the beginning of the epoch and takes 8 steps instead of 6.
#
# Behaviour seen with mmengine 0.10.7, torch 2.13.0, CPython 3.11
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile mmengine==0.10.7 torch==2.13.0 'setuptools<81'
cat > look.py <<'END'
import logging

import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner


class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x, mode='tensor'):
        return dict(loss=self.layer(x).sum())


class Saves(Hook):
    steps = 0

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.steps += 1
        if runner.iter + 1 == 6 and runner.experiment_name.startswith('first'):
            runner.save_checkpoint('.', 'epoch.pth')
            runner.save_checkpoint('.', 'iteration.pth', by_epoch=False)


def steps(work_dir, **resume):
    samples = [dict(x=torch.tensor([float(i)])) for i in range(8)]
    runner = Runner(
        Model(), work_dir, train_cfg=dict(by_epoch=True, max_epochs=3), log_level='ERROR',
        train_dataloader=torch.utils.data.DataLoader(samples, batch_size=2),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
        default_hooks=dict(checkpoint=None), experiment_name=work_dir, **resume)
    hook = Saves()
    runner.register_hook(hook)
    runner.train()
    return hook.steps


logging.disable(logging.WARNING)
print('the run:', steps('first'), 'steps')
for name in ('epoch', 'iteration'):
    meta = torch.load(f'{name}.pth', weights_only=False)['meta']
    taken = steps(name, resume=True, load_from=f'{name}.pth')
    print(f'{name}.pth: epoch {meta["epoch"]}, iteration {meta["iter"]}; steps after it: {taken}')
END
# torch 2.6 and later load no checkpoint of MMEngine by default
TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 venv/bin/python -W ignore look.py | grep -v '^Loads' | tee seen
diff seen - <<'END'
the run: 12 steps
epoch.pth: epoch 2, iteration 5; steps after it: 4
iteration.pth: epoch 1, iteration 6; steps after it: 8
END
