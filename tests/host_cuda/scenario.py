"""Whole trainings on the device of this folder, in one process that forks a child per run.

    python tests/host_cuda/scenario.py MODEL DATA_ROOT WORK_DIR [--amp SCALE]

Writes WORK_DIR/results.json: a digest of batches, losses and end state per run, and how often some
kernels of the device ran. ``loose`` runs have ``deterministic=False``.
"""
import argparse
import copy
import json
import sys
from pathlib import Path

import pretend
import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / 'support'))
import faults.tiny  # noqa: E402
import one_thread  # noqa: E402, F401
from demo_runs import narrow, shallow_detr, small  # noqa: E402
from harness import run_all, train  # noqa: E402
from mmengine.registry import MODELS  # noqa: E402

# Where a run is resumed: inside an epoch.
POINT = 2
# The device's own kernels that a deterministic run may not reach.
UNORDERED = sorted(name for name, how in pretend.BEHAVIOUR.items() if how & pretend.REFUSED)


@MODELS.register_module()
class HeavyLoss(faults.tiny.Tiny):
    """The loss has the weight that detectors give to parts of theirs."""

    def forward(self, inputs, label, mode='tensor'):
        outputs = super().forward(inputs, label, mode)
        return dict(loss=20 * outputs['loss']) if mode == 'loss' else outputs


def _config(model, args):
    """Return the config of a detector, or of a small network in many steps."""
    if model != 'tiny':
        cfg = small(model, args.data_root)
        if 'encoder' in cfg.model:  # every layer is like the first
            shallow_detr(cfg)
            cfg.model.encoder.num_layers, cfg.model.decoder.num_layers = 1, 2
        if 'backbone' in cfg.model:
            narrow(cfg)
        return cfg
    cfg = faults.tiny.tiny(args.work_dir)
    cfg.model.type = 'HeavyLoss'
    cfg.val_dataloader = None
    return cfg


def _run(cfg, work_dir):
    """Train on the device, and add to the results which of its kernels ran."""
    runners = []

    def look(runner):
        assert next(runner.model.parameters()).is_cuda, 'the model is not on the device'
        runners.append(runner)
    found = train(cfg, work_dir, prepare=look)
    scaler = getattr(runners[0].optim_wrapper, 'loss_scaler', None)
    found['scale'] = scaler and scaler.get_scale()
    found['kernels'] = {name: pretend.calls(name) for name in UNORDERED if pretend.calls(name)}
    found['dropouts'] = pretend.calls('native_dropout')
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('model')
    parser.add_argument('data_root')
    parser.add_argument('work_dir', type=Path)
    parser.add_argument('--amp', type=float, metavar='SCALE',
                        help='half precision, from this scale of the loss: from 65536, the default '
                        'of torch, the first steps are skipped because gradients are infinite')
    args = parser.parse_args()

    cfg = _config(args.model, args)
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    length, count = ('max_epochs', 2) if 'max_epochs' in cfg.train_cfg else ('max_iters', 6)
    cfg.train_cfg[length] = 4 if args.model == 'tiny' else count
    if args.amp:
        cfg.optim_wrapper.merge(dict(type='AmpOptimWrapper', loss_scale=dict(init_scale=args.amp)))
    saving = copy.deepcopy(cfg)
    saving.default_hooks.checkpoint = dict(type='CheckpointHook', interval=1, by_epoch=False,
                                           max_keep_ckpts=-1)
    resumed = copy.deepcopy(cfg)
    resumed.resume, resumed.load_from = True, str(args.work_dir / 'saving' / f'iter_{POINT}.pth')
    resumed.train_dataloader.merge(dict(num_workers=2, persistent_workers=True))
    if args.amp:
        # and steps that are repeated, with a loss scale, change no bit either
        resumed.randomness.self_checks = dict(steps=1)
    loose = copy.deepcopy(cfg)
    loose.randomness.deterministic = False
    loose.train_cfg[length] //= 2  # that bits differ shows soon

    def job(changed, name):
        return _run, (changed, args.work_dir / name), {}
    results = run_all({'saving': job(saving, 'saving')})
    results.update(run_all({'resumed': job(resumed, 'resumed')}))
    if args.model == 'tiny':
        results.update(run_all({'loose': job(loose, 'loose'), 'loose again': job(loose, 'again')}))
    (args.work_dir / 'results.json').write_text(json.dumps(results))


if __name__ == '__main__':
    torch.set_num_threads(1)
    main()
