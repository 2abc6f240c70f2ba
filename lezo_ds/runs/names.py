"""What a run is called, from the keys of its recipe alone: in `report` and in a model's card."""

from __future__ import annotations

from lezo_ds.config import RunConfig

_ESTIMATORS = {
    "fzoo": "FZOO",
    "grzo": "GRZO",
    "evolution-strategies": "evolution strategies",
}


def method_name(config: RunConfig) -> str:
    """Return the name of a run's method, such as "LeZO" or "FZOO, rank 1, lora"."""
    zo = config.zo
    if zo.learning_rate is None:
        number = config.data.num_demonstrations
        return f"{number} demonstrations" if number else "zero-shot"
    name = _ESTIMATORS.get(zo.estimator, zo.estimator)
    if zo.estimator == "spsa":
        name = "LeZO" if zo.sparsity else "MeZO"
    words = [name]
    if zo.noise_rank:
        words.append(f"rank {zo.noise_rank}")
    if config.peft.kind != "none":
        words.append(config.peft.kind)
    return ", ".join(words)
