"""The variants on a sharded model: a naive MeZO, and our step."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lezo_ds.engine import LezoEngine
from lezo_ds.forward.batch import MicroBatch
from lezo_ds.sharding import zero3
from lezo_ds.tools.benchmark.inputs import Inputs
from lezo_ds.tools.benchmark.reference import InPlaceSteps, fed_tokens
from lezo_ds.tools.benchmark.settings import Variant
from lezo_ds.zo.records import StepRecord
from lezo_ds.zo.updates import step_updates


def naive_steps(variant: Variant, engine: LezoEngine, inputs: Inputs) -> InPlaceSteps:
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
        inputs,
        tensors=tensors,
        num_blocks=engine.layout.num_blocks,
        forward=forward,
        published=False,
    )


class EngineSteps:
    """The engine's own steps, which are "ours".

    Args:
        variant: a variant of our step.
        engine: on the weights to change.
        inputs: the batch of each step, and the settings.

    Attributes:
        model: what `evaluate` scores.
        num_probes: forward passes of the whole batch in a step, each at one probe.
    """

    def __init__(self, variant: Variant, engine: LezoEngine, inputs: Inputs) -> None:
        self.model = engine.with_config(inputs.zo_config(variant))
        self.num_probes = self.model.plan_format.num_probes
        self._inputs = inputs
        self._records: list[StepRecord] = []

    @property
    def weight_bytes(self) -> int:
        """What this rank holds of the model between steps."""
        weights = self.model.weights
        shards = sum(p.count * p.parameter.element_size() for p in weights.parameters)
        return shards + sum(low.numel() * low.element_size() for low in weights.low_bits.values())

    def step(self) -> float:
        """Do one step and return the mean of its projected gradients; NaN if it was skipped. A collective."""
        record = self.model.train_batch(self._inputs.batches(self.model.global_steps), self._inputs.loss)
        self._records.append(record)
        gradients = record.projected_grads
        return sum(gradients) / len(gradients) if record.applied else float("nan")

    def fed_tokens(self, step: int) -> int:
        """Return the tokens, padding included, in a forward pass of a step's whole batch at one probe."""
        return fed_tokens(self._inputs.batches(step))

    def replay(self, num_steps: int) -> None:
        """Apply the records of the last `num_steps` steps again."""
        stop = len(self._records)
        self.model.weights.apply(step_updates(self._records, stop - num_steps, stop))
