"""What a run effectively is: settings, versions and hardware, collected and compared."""
