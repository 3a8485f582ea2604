"""Virtual ranks: a run of V ranks in N <= V processes, with the same bits for every N.

Each virtual rank runs the whole program in a thread. One thread has the baton and runs: that of the
lowest rank that need not wait. It hands the baton over where it waits for other ranks, that is, in
a collective operation. State of the process that differs between ranks is exchanged then.

Other rooms use only the names that are imported here.
"""
from .entry import (
    on_virtual_ranks,
    refuse_cached_ranks,
    settings_on_ranks,
    share_workers,
    wrap_model,
)
from .fsdp2 import is_sharded, whole_tensor
from .gradients import VirtualDataParallel
from .heap import large_blocks_apart
from .sharded import gathered_weights
from .shared_weights import check_shared_weights, share_weights
