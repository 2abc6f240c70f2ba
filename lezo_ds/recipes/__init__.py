"""Many runs: the paper's, as recipes, and grids."""
