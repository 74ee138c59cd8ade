"""Slow NumPy references, written from the papers: oracles for the library's tests."""
