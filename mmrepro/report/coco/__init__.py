"""How sure the figures of COCO are, from the predictions of detectors on the images of a test."""
