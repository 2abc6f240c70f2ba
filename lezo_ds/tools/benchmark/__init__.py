"""Variants of a step timed against each other in the same rounds; launch/benchmark.py runs it."""
