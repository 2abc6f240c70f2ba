"""Tools around runs: memory plans, benchmarks, reports, sweeps and recipes. Nothing imports them."""
