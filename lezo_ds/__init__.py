"""Layer-wise sparse zeroth-order fine-tuning of language models (LeZO, MeZO) on DeepSpeed.

DeepSpeed shards the weights over the ranks, by ZeRO-3 or by tensor parallelism.

The public names are imported when they are first used, so that `import lezo_ds` loads no torch:

initialize: load a sharded model and return its `LezoEngine`, as deepspeed.initialize does. With a
    run_dir, the loop has a journal: it can be resumed and exported.
train: start or resume the run that a configuration describes.
LezoEngine: train_batch, forward, save_checkpoint and load_checkpoint on a sharded model.
Estimator, LayerPolicy, Task: base classes of components of your own, which a configuration names as
    `package.module:Name`.
reward: marks a function (answers, records) -> rewards as the objective of a run.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lezo_ds.data.rewards import reward
    from lezo_ds.data.tasks import Task
    from lezo_ds.engine import LezoEngine
    from lezo_ds.runs.own_loop import initialize
    from lezo_ds.runs.trainer import train
    from lezo_ds.zo.estimators import Estimator
    from lezo_ds.zo.layers import LayerPolicy

__version__ = "0.7.0"
__all__ = ["Estimator", "LayerPolicy", "LezoEngine", "Task", "initialize", "reward", "train"]

# Huge pages for large CPU tensors: small pages cost a fifth of a step. torch reads this variable
# when it makes its first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# The module of each public name.
_MODULES = {
    "Estimator": "lezo_ds.zo.estimators",
    "LayerPolicy": "lezo_ds.zo.layers",
    "LezoEngine": "lezo_ds.engine",
    "Task": "lezo_ds.data.tasks",
    "initialize": "lezo_ds.runs.own_loop",
    "reward": "lezo_ds.data.rewards",
    "train": "lezo_ds.runs.trainer",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'lezo_ds' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
