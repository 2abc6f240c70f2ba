"""Many runs: the paper's, as recipes; grids; and tables of their results."""
