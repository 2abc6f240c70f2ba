"""The sharded weights: DeepSpeed ZeRO-3, checkpoint files, updates and digests."""
