"""What trains a sharded model, a batch at a time."""
