"""What a run leaves behind so that two runs can be compared: fingerprints and a manifest."""
