"""The heap of glibc in processes whose ranks take turns."""
import ctypes
import platform

import pytest
import torch
from harness import Child

from mmrepro.virtual import heap
from mmrepro.virtual.entry import on_virtual_ranks

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='a heap of glibc')


class Mallinfo(ctypes.Structure):
    # of malloc.h; hblks: blocks outside of the heap
    _fields_ = [(name, ctypes.c_int) for name in (
        'arena', 'ordblks', 'smblks', 'hblks', 'hblkhd', 'usmblks', 'fsmblks', 'uordblks',
        'fordblks', 'keepcost')]


def grows():
    """Whether the heap grows where it has no room for large blocks."""
    mallinfo = ctypes.CDLL(None).mallinfo
    mallinfo.restype = Mallinfo
    before, blocks = mallinfo(), []
    while (mallinfo().arena, mallinfo().hblks) == (before.arena, before.hblks):
        blocks.append(torch.empty(heap.LARGEST // 2, dtype=torch.uint8))
    return mallinfo().hblks == before.hblks


def in_ranks(ranks):
    found = []

    def main():
        with heap.large_blocks_apart():
            found.append(grows())
        found.append(grows())

    on_virtual_ranks(ranks, main)
    return found


def test_a_repeated_step_leaves_the_heap_that_ranks_share_as_it_was():
    assert Child(in_ranks, 2).result() == [False, True] * 2


def with_sharded_weights():
    found = []

    def main():
        heap.keep_large_blocks_apart()
        found.append(grows())
        with heap.large_blocks_apart():  # of a repeated step
            found.append(grows())
        found.append(grows())

    on_virtual_ranks(2, main)
    on_virtual_ranks(2, lambda: found.append(grows()))
    return found


def test_large_blocks_stay_apart_until_ranks_begin_anew():
    assert Child(with_sharded_weights).result() == [False] * 6 + [True] * 2
