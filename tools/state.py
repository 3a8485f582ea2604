"""Name state in Python attributes that a config loses when it resumes."""
from _door import run

if __name__ == '__main__':
    run(__file__)
