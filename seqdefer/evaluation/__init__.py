"""The main job: labelled splits, methods swept over test data, deferral curves, results."""
