"""The heap of glibc in processes whose ranks take turns."""
import ctypes
import platform

import pytest
import torch
from harness import Child

from mmrepro.distributed.virtual import heap
from mmrepro.distributed.virtual.entry import on_virtual_ranks

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='a heap of glibc')


class Mallinfo(ctypes.Structure):
    # of malloc.h; hblks: blocks outside of the heap
    _fields_ = [(name, ctypes.c_int) for name in (
        'arena', 'ordblks', 'smblks', 'hblks', 'hblkhd', 'usmblks', 'fsmblks', 'uordblks',
        'fordblks', 'keepcost')]


def outside():
    """Count the large blocks outside of the heap that one more tensor makes."""
    mallinfo = ctypes.CDLL(None).mallinfo
    mallinfo.restype = Mallinfo
    before = mallinfo().hblks
    block = torch.empty(2 * heap.LARGE, dtype=torch.uint8)
    count = mallinfo().hblks - before
    del block
    return count


def counts(ranks):
    found = []

    def main():
        with heap.large_blocks_apart():
            found.append(outside())
        found.append(outside())

    on_virtual_ranks(ranks, main)
    return found


def test_large_blocks_of_a_repeated_step_are_outside_of_the_heap_that_ranks_share():
    assert Child(counts, 2).result() == [1, 0] * 2
