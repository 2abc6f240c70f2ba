"""What runs and benchmarks came to: the paper's tables, its figures, and one page of everything."""
