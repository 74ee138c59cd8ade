"""Experiments: configuration files, comparisons, tuning, and the papers' figures."""
