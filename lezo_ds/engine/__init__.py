"""The engine: a sharded model in DeepSpeed, and its zeroth-order optimizer.

    ModelEngine (model.py)         a sharded model: forward passes, votes and agreement of ranks,
      |                            snapshots
      ReplayEngine (replay.py)     does recorded steps again, and checks the weights
        LezoEngine (training.py)   decides steps, and does them; `lezo_ds.initialize` returns it

All ranks call the same methods in the same order: most of them exchange messages ("a collective").
"""

from lezo_ds.engine.model import ModelEngine, Parts, check_losses, load_parts
from lezo_ds.engine.replay import ReplayEngine
from lezo_ds.engine.training import MAX_SKIPPED_STEPS, LezoEngine
