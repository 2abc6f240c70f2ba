"""Memory, traffic and time of a run, computed from its configuration before any weights are loaded."""
