"""Several ranks on the CPU over gloo, each a forked child of this warm process."""
from contextlib import contextmanager

from children import join_ranks
from demo_runs import changed
from harness import Child, train

from mmrepro.runs.launcher import free_port


@contextmanager
def joined(rank, world_size, port, cfg):
    """Make a runner of ``cfg`` that is built in this block this rank."""
    join_ranks(rank, world_size, port)
    cfg.launcher = 'pytorch' if world_size > 1 else 'none'
    cfg.env_cfg.dist_cfg = dict(backend='gloo', timeout=300)
    import torch.distributed
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def as_rank(rank, world_size, port, cfg, work_dir, look=lambda runner: {}):
    kept = []
    with joined(rank, world_size, port, cfg):
        return dict(train(cfg, work_dir, prepare=kept.append), **look(*kept))


def on_ranks(world_size, cfg, work_dir, of_rank=lambda rank, cfg: None, function=as_rank):
    """Return the results, or the texts of the errors, of all ranks."""
    port = free_port()
    children = []
    for rank in range(world_size):
        own = changed(cfg, lambda cfg, rank=rank: of_rank(rank, cfg))
        children.append(Child(function, rank, world_size, port, own, str(work_dir)))
    results = []
    for child in children:
        try:
            results.append(child.result())
        except RuntimeError as error:
            results.append(str(error))
    return results
