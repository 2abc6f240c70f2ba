"""The model on the ranks: its layers, its shards, its forward pass for both signs, its files."""
