"""Set-ups that users write: what each does to the bits of a run, and what mmrepro says of it."""
