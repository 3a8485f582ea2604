"""Stock configs of the libraries around MMEngine, trained on small data: do their runs repeat?

    python -m dev.libraries [--rows NAME ...] [--keep]

``rows`` is the table, ``data`` writes what the rows train on, ``suite`` is run in the environment
of a row.
"""
