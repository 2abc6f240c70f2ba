"""Variants of a step timed against each other in the same rounds; lezo-ds benchmark runs it."""
