"""Kill a training at random moments, resume it, and compare it with the uninterrupted run."""
