"""Count calls, in this process, of what reads checkpoints and collects state."""
from collections import Counter

from mmrepro.checkpoint import files, rank_state, safe_loading


class Counted:
    """``calls``: how often checkpoint files were checked and loaded, and how often the state of a
    rank was collected. For a forked process: nothing is undone."""

    def __init__(self):
        self.calls = Counter()
        self._count(files, 'check_file', 'check')
        self._count(safe_loading, '_load_of_torch', 'load',
                    lambda file, *rest, **options: isinstance(file, str))
        self._count(rank_state, 'local_state', 'state')

    def _count(self, owner, name, key, counts=lambda *args, **kwargs: True):
        stock = getattr(owner, name)

        def counted(*args, **kwargs):
            if counts(*args, **kwargs):
                self.calls[key] += 1
            return stock(*args, **kwargs)

        setattr(owner, name, counted)
