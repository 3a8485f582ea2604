"""Objects of any kind: what they reach, their digests, tensors in nested data, generators."""
