"""The effective facts of a run: settings, versions and hardware, collected and compared."""
