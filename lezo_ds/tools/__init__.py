"""Tools around runs: plans, benchmarks, reports, sweeps, the demonstration. Nothing imports them."""
