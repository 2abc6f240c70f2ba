"""Models on disk, and the sharded model that is loaded from them.

checkpoint: finds the directory of a model, checks its files, and builds it on the meta device.
sharded_model: shards such a model over the ranks and loads the shards, each rank its own slices.
tokenizer_check: warns of a tokenizer that does not read texts as its tokenizer.json says.
snapshots: writes a sharded model as a directory that transformers or peft open, and finds valid
    ones.
"""
