"""A run with ``deterministic=True`` is checked by doing: samples and steps twice, a witness."""
