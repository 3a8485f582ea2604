"""Reports on runs: two of them compared, many seeds counted."""
