"""Functions recorded as graphs of tensor operations, and made faster."""
