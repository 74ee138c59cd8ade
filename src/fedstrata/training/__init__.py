"""Training: the loop, metrics, checkpoints and run directories."""
