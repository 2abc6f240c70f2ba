"""The variants on a sharded model: a naive MeZO, and our step. No other module here knows the engine."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from lezo_ds import distributed
from lezo_ds.config import ZoConfig
from lezo_ds.ds_config import load_ds_config
from lezo_ds.engine.lezo_engine import LezoEngine, initialize
from lezo_ds.model.batch import MicroBatch
from lezo_ds.noise import noise_backend
from lezo_ds.sharding import zero3
from lezo_ds.tools.benchmark.inputs import loss_function, split_batch, write_empty_model
from lezo_ds.tools.benchmark.reference import LEARNING_RATE, PERTURBATION_SCALE, InPlaceSteps
from lezo_ds.tools.benchmark.settings import Setting, Variant
from lezo_ds.tools.benchmark.stages import StagedMethod
from lezo_ds.tools.opt_shapes import opt_config
from lezo_ds.tools.workloads import Workload
from lezo_ds.zo.records import StepRecord
from lezo_ds.zo.updates.sgd import Sgd

_WEIGHT_SEED = 20240
_STANDARD_DEVIATION = 0.02


def start_engine(setting: Setting) -> LezoEngine:
    """Return our engine on a sharded model with random weights. A collective."""
    ds_config = load_ds_config(setting.ds_config, setting.dtype, distributed.world_size(), 1)
    with tempfile.TemporaryDirectory() as directory:
        write_empty_model(opt_config(setting.shape, setting.layers), setting.dtype, Path(directory))
        engine = initialize(
            model=directory,
            config=_zo_config(Variant.parse("ours"), setting),
            ds_config=ds_config,
            dtype=setting.dtype,
            partition_size=setting.partition_size,
        )
    _fill_with_random_weights(engine)
    return engine


def _fill_with_random_weights(engine: LezoEngine) -> None:
    """Give the model weights as OPT initializes them, the same for all shardings."""
    noise = noise_backend(engine.device)
    for parameter in engine.weights.parameters:
        element = (parameter.named.parameter_id, parameter.start, parameter.count)
        values = noise.normal(_WEIGHT_SEED, *element, engine.device).mul_(_STANDARD_DEVIATION)
        engine.weights.fill(parameter, values.add_(1.0 if parameter.name.endswith("norm.weight") else 0.0))
    zero3.finish_updates()


def _zo_config(variant: Variant, setting: Setting) -> ZoConfig:
    return ZoConfig(
        learning_rate=LEARNING_RATE,
        perturbation_scale=PERTURBATION_SCALE,
        sparsity=variant.sparsity,
        probes_per_pass=variant.probes_per_pass,
        directions=variant.directions,
        update_precision=setting.update_precision,
    )


def naive_steps(variant: Variant, engine: LezoEngine, workload: Workload) -> InPlaceSteps:
    """Return "naive_zero3": MeZO as one would first write it, with two forwards, changing shards in place."""
    tensors = []
    for parameter in engine.weights.parameters:
        with parameter.shard() as shard:  # the view stays valid, except for weights on NVMe
            if parameter.count:
                tensors.append((shard, parameter.named.block))

    def forward(batch: MicroBatch) -> Tensor:
        zero3.finish_updates()  # DeepSpeed gathers on another stream, and the shards have just been perturbed
        return engine.forward(replace(batch, selection=None))

    return InPlaceSteps(
        variant,
        workload,
        tensors=tensors,
        num_blocks=engine.layout.num_blocks,
        forward=forward,
        published=False,
        staged_methods=_staged_methods(engine),
    )


class EngineSteps:
    """The engine's own steps, which are "ours".

    Args:
        variant: a variant of our step.
        engine: from `start_engine`.
        setting: says the batch.

    Attributes:
        staged_methods: for `stage_seconds`.
    """

    def __init__(self, variant: Variant, engine: LezoEngine, setting: Setting) -> None:
        self.staged_methods = _staged_methods(engine)
        self._engine = engine.with_config(_zo_config(variant, setting))
        self._batch = split_batch(setting.workload, setting.micro_batches or distributed.world_size())
        self._loss = loss_function(setting.workload)
        self._records: list[StepRecord] = []

    @property
    def weight_bytes(self) -> int:
        """What this rank holds of the model between steps."""
        weights = self._engine.weights
        shards = sum(p.count * p.parameter.element_size() for p in weights.parameters)
        return shards + sum(low.numel() * low.element_size() for low in weights.low_bits.values())

    def step(self) -> float:
        """Do one step and return the mean of its projected gradients; NaN if it was skipped. A collective."""
        record = self._engine.train_batch(self._batch, self._loss)
        self._records.append(record)
        gradients = record.projected_grads
        return sum(gradients) / len(gradients) if record.applied else float("nan")

    def replay(self, num_steps: int) -> None:
        """Apply the records of the last `num_steps` steps again."""
        stop = len(self._records)
        self._engine.weights.apply(Sgd().step_updates(self._records, stop - num_steps, stop))


def _staged_methods(engine: LezoEngine) -> list[StagedMethod]:
    noise = noise_backend(engine.device)
    owner, gathering = zero3.GATHERING
    return [
        (engine.module, "forward", "forward"),
        (engine.weights, "apply", "update"),
        *((noise, name, "perturb") for name in dir(noise) if name.startswith("perturb")),
        *((owner, name, "gather") for name in gathering),
    ]
