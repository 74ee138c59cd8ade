"""From the scores of a model to risks and decisions: calibration and thresholds, from counts that clients tell."""
