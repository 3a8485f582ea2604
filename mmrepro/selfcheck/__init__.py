"""What a run checks of itself: steps, validations."""
