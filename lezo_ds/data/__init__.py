"""Data: from text to batches, and from logits to losses and scores."""
