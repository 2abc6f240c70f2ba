"""From text to batches, from logits to losses and scores."""
