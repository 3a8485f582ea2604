"""What only developers of mmrepro run; not part of the wheel."""
