"""Set-ups of users' own code, one row each: what becomes of it when nobody foresaw it."""
