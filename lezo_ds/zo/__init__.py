"""The algorithm: keys, layer sampling, estimators, update rules. Pure Python."""
