"""The model and the examples of a recipe."""

from __future__ import annotations

from functools import partial

from torch import nn
from transformers import AutoModelForCausalLM

from lezo_ds import distributed
from lezo_ds.config import ZEROTH_ORDER, RunConfig, ZoConfig, check_world
from lezo_ds.data.batches import candidate_batch
from lezo_ds.data.evaluation import Model, evaluate
from lezo_ds.data.task_data import load_task_data
from lezo_ds.engine import LezoEngine
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import MicroBatch
from lezo_ds.model.checkpoint import build_checked
from lezo_ds.runs.trainer import make_engine
from lezo_ds.sharding.checkpoint_files import DTYPES, resolve_model, with_safetensors
from lezo_ds.tools.benchmark.inputs import Inputs, equal_parts


class RecipeInputs(Inputs):
    """A recipe's model and its batches: real sentences of unequal lengths.

    Our trainer lays out micro-batches by length, lets examples share rows, and runs one row for all one-token
    candidates of an example. MeZO's code runs the same examples in the order drawn, without any of this.

    Args:
        config: the recipe. Variants but "recipe" take only the scale, the precision and the learning rate of
            its steps.

    Raises:
        UserError: data or model are missing; the recipe's method, adapter or objective is one that MeZO's
            code does not have here; or the batch does not split into as many parts as there are ranks.
    """

    def __init__(self, config: RunConfig) -> None:
        _check_recipe(config)
        check_world(config, distributed.world_size())
        self.config, self.seed = config, config.seed
        self.data = load_task_data(config)
        self.loss = self.data.loss
        equal_parts(range(config.train.batch_size), distributed.world_size())
        model, layout = build_checked(resolve_model(config.model.path), config.model.dtype)
        lengths = [example.num_tokens for example in self.data.train.encoded]
        self.columns = {
            "model": config.model.path,
            "data": config.data.path or "hub",
            "layers": layout.num_blocks,
            "parameters": sum(values.numel() for values in model.parameters()),
            "dtype": config.model.dtype,
            "update_precision": config.zo.update_precision,
            "ds_config": config.deepspeed,
            "partition_size": config.partition_size,
            "task": self.data.task.name,
            "length": round(sum(lengths) / len(lengths)),
            "batch": config.train.batch_size,
            "micro_batches": config.train.batch_size // config.train.micro_batch_size,
        }

    @property
    def zo(self) -> ZoConfig:
        """The recipe's settings of a step."""
        return self.config.zo

    def batches(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches that the trainer runs at a step."""
        return self.data.batch(self.config, step)

    def published_batches(self, step: int) -> list[MicroBatch]:
        """Return the share of each rank, in the order drawn, in the layout of MeZO's code."""
        examples = [self.data.train.encoded[row] for row in self.data.step_rows(self.config, step)]
        build = self.data.objective.build_batch
        assert build is not None, "an objective that reads logits"
        if build is candidate_batch:
            build = partial(candidate_batch, deduplicate=False)
        parts = equal_parts(examples, distributed.world_size())
        return [build(part, self.data.tokenizer.pad_id) for part in parts]

    def plain_model(self) -> nn.Module:
        """Return the recipe's model, unsharded."""
        directory = with_safetensors(resolve_model(self.config.model.path))
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            directory, dtype=DTYPES[self.config.model.dtype], trust_remote_code=False
        )
        return model.to(distributed.device()).eval().requires_grad_(False)

    def start_engine(self) -> LezoEngine:
        """Return the engine that the trainer starts. A collective."""
        return make_engine(self.config)

    def validation_loss(self, model: Model) -> float:
        """Return the loss of the dev split as the trainer computes it. A collective."""
        return evaluate(model, self.data, self.data.dev, self.config.train.eval_batch_size).loss


def _check_recipe(config: RunConfig) -> None:
    supported = "method lezo or mezo, peft.kind=none, and train.objective=task"
    chosen = {
        f"method={config.method}": config.method in ZEROTH_ORDER,
        f"peft.kind={config.peft.kind}": config.peft.kind == "none",
        f"train.objective={config.train.objective}": config.train.objective == "task",
    }
    for choice, is_supported in chosen.items():
        if not is_supported:
            raise UserError(
                "the benchmark cannot compare this recipe with MeZO's code",
                got=choice,
                expected=supported,
                fix=f"set {choice.partition('=')[0]} to one of these, after the recipe",
            )
