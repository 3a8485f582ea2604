"""What a version of a library changes: digests of the results of parts, for each version.

``python -m dev.versions`` writes ``mmrepro/facts/measured.json``, which
:mod:`mmrepro.facts.measured` reads.
"""
