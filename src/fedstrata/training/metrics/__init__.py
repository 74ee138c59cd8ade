"""Metrics of a model: on pooled data, over clients, after adapting to each client, and under attack."""
