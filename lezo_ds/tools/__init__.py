"""Tools around runs: memory and time plans, reports, sweeps and recipes. Nothing imports them."""
