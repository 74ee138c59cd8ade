"""What is measured of a model, on pooled data, over clients, after adapting to each, and under attack."""
