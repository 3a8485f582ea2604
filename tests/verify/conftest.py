from recorded_runs import original  # noqa: F401  a fixture
