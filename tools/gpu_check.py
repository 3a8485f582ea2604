"""Does training repeat bit for bit on this device, and what does it cost?

See docs/how-to/check-a-gpu.md.
"""
from _door import run

if __name__ == '__main__':
    run(__file__)
