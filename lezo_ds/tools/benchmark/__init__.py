"""Measurements of a step, of its parts, and of how it grows; launch/benchmark.py runs them."""
