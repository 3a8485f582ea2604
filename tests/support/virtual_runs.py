"""A config on V virtual ranks in N forked processes of this warm one: the bits of every rank."""
from children import join_ranks, silence_output
from demo_runs import changed
from harness import Child, digest
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.runner import Runner
from ranks import free_port

from mmrepro.config import with_virtual_ranks
from mmrepro.distributed.unwrap import unwrap
from mmrepro.runs.startup import on_ranks
from mmrepro.virtual.fsdp2 import whole_tensor


def whole(value):
    """Gather the tensors in nested data that are divided among the ranks."""
    if isinstance(value, dict):
        return {key: whole(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [whole(part) for part in value]
    return whole_tensor(value)


class _Recorder(Hook):
    priority = 100

    def __init__(self, lines):
        self.lines = lines

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.data = digest(data_batch)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        model = unwrap(runner.model)
        self.lines.append(dict(
            iteration=runner.iter, data=self.data, losses=digest(dict(outputs)),
            gradients=digest(whole({name: one.grad for name, one in model.named_parameters()})),
            weights=digest(whole(dict(model.named_parameters()))),
            buffers=digest(dict(model.named_buffers())),
            optimizer=digest(whole(runner.optim_wrapper.state_dict())),
            averages=digest(whole([hook.ema_model.state_dict() for hook in runner.hooks
                                   if hasattr(hook, 'ema_model')]))))

    def after_val_epoch(self, runner, metrics=None):
        self.lines.append(dict(iteration=runner.iter, metrics=digest(metrics)))


def _process(process, processes, port, cfg):
    silence_output()
    if processes > 1:
        join_ranks(process, processes, port)
        cfg.launcher = 'pytorch'
    found = {}

    def main():
        lines = found[get_rank()] = []
        runner = Runner.from_cfg(cfg)
        runner.register_hook(_Recorder(lines), priority=100)
        runner.train()

    on_ranks(cfg, main)
    return found


def run(cfg, ranks, processes, work_dir, resume=None):
    """Return what every rank saw, a list of dicts each.

    ``ranks`` None: no virtual ones. ``resume``: path of a checkpoint.
    """
    def change(cfg):
        if ranks is not None:
            cfg.randomness = with_virtual_ranks(cfg.randomness, ranks)
        cfg.work_dir = str(work_dir)
        if resume is not None:
            cfg.resume, cfg.load_from = True, str(resume)

    port, cfg, found = free_port(), changed(cfg, change), {}
    children = [Child(_process, process, processes, port, cfg) for process in range(processes)]
    try:
        for child in children:
            found.update(child.result())
    finally:
        for child in children:  # one that waits for a process which has failed
            child.process.kill()
    return [found[rank] for rank in sorted(found)]
