"""Training: the loop, what is measured, and what is kept of a run."""
