"""Does training repeat bit for bit on this device, and what does it cost?

In a checkout this checks single operators as well. See docs/how-to/check-a-gpu.md.
"""
from _door import run

try:
    from dev.operator_check import GROUPS
except ModuleNotFoundError as error:
    if error.name not in ('dev', 'dev.operator_check'):
        raise
    GROUPS = {}  # an installed package has no catalogue of operators

if __name__ == '__main__':
    run('doctor', '--gpu', operators=GROUPS)
