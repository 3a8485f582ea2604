"""Virtual ranks: a run of V ranks in N <= V processes, with the same bits for every N.

Each virtual rank runs the whole program in a thread of its own. One thread runs at a time, the one
of the lowest rank that need not wait; it hands over where it waits for others, that is, in a
collective operation. What belongs to a process and would differ between ranks is exchanged then.
"""
