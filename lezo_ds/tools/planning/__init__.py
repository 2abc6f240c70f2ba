"""What a run needs, from a model's config alone: memory, traffic, time; launch/plan.py and --dry-run ask."""
