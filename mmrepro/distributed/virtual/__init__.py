"""Virtual ranks: a run of V ranks in N <= V processes, with the same bits for every N.

Each virtual rank runs the whole program in a thread. One thread has the baton and runs: that of the
lowest rank that need not wait. It hands the baton over where it waits for other ranks, that is, in
a collective operation. State of the process that differs between ranks is exchanged then.
"""
