"""A run with ``deterministic=True`` is checked by doing: steps and validations, a witness."""
