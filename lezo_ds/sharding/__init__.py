"""The weights, a share on every rank: DeepSpeed ZeRO-3, files, updates, digests."""
