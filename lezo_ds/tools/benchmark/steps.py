"""The steps of a variant, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lezo_ds.engine import LezoEngine
from lezo_ds.tools.benchmark.inputs import Inputs
from lezo_ds.tools.benchmark.reference import InPlaceSteps, plain_steps
from lezo_ds.tools.benchmark.settings import Variant
from lezo_ds.tools.benchmark.sharded import EngineSteps, naive_steps

Steps = InPlaceSteps | EngineSteps


def start_steps(
    variant: Variant, inputs: Inputs, *, plain: Callable[[], nn.Module], engine: Callable[[], LezoEngine]
) -> Steps:
    """Return the steps of a variant, which change the weights of its model.

    Args:
        variant: what is run.
        inputs: the batch of each step, and the settings.
        plain: returns the unsharded model; called if the variant needs it.
        engine: returns the engine on the sharded model; called if the variant needs it.
    """
    if variant.kind == "mezo_reference":
        return plain_steps(variant, plain(), inputs)
    if variant.kind == "naive_zero3":
        return naive_steps(variant, engine(), inputs)
    return EngineSteps(variant, engine(), inputs)
