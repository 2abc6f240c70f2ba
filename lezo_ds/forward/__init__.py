"""Forward passes at perturbed weights, and the adapters that they train."""
