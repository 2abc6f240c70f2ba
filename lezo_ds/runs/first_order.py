"""First-order training (the row FT in the papers): AdamW under ZeRO-3 on the same batches and losses.

Every rank runs its share of a step's micro-batches forward and backward. DeepSpeed averages the gradients
over the ranks, shards gradients and optimizer states, and updates the shards. As in MeZO's own fine-tuning
(Malladi et al. 2023, with transformers' Trainer), dropout is on in training and off in evaluations, and
gradients are clipped unless DeepSpeed's JSON says otherwise.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import get_linear_schedule_with_warmup

from lezo_ds import distributed
from lezo_ds.config import AdamWConfig, PeftConfig
from lezo_ds.engine import ModelEngine
from lezo_ds.errors import DivergenceError, UserError
from lezo_ds.forward.batch import LossFunction, MicroBatch, StepBatch, to_device
from lezo_ds.forward.perturbed_forward import PerturbedForward
from lezo_ds.model.sharded_model import ShardedModel, load_sharded_model
from lezo_ds.model.snapshots import snapshot_path
from lezo_ds.noise import noise_backend
from lezo_ds.sharding import zero3
from lezo_ds.zo.keys import dropout_key

MAX_GRADIENT_NORM = 1.0  # the default of transformers' Trainer


class FirstOrderEngine(ModelEngine):
    """A sharded model and its AdamW. `initialize_first_order` makes it."""

    def __init__(
        self,
        deepspeed_engine: Any,  # noqa: ANN401
        perturbed: PerturbedForward,
        sharded: ShardedModel,
        seed: int,
    ) -> None:
        super().__init__(deepspeed_engine, perturbed, sharded)
        self._seed = seed
        self._last_loss: float | None = None

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return float(self._deepspeed.get_lr()[0])

    @property
    def skipped_steps(self) -> int:
        """Number of steps whose fp16 gradients overflowed. DeepSpeed skips them and lowers its loss scale."""
        return int(self._deepspeed.skipped_steps)

    def train_batch(self, batch: StepBatch | Sequence[MicroBatch], loss_function: LossFunction) -> float:
        """Do one step.

        Args:
            batch: all micro-batches of the step, the same on every rank. Rank r runs r, r + world_size, ...
                The dropout masks do not depend on the number of ranks.
            loss_function: (logits, micro-batch) -> summed loss of each example.

        Returns:
            The mean loss over the batch before the update.

        Raises:
            UserError: the micro-batches cannot be shared evenly among the ranks, or the loss has no gradient.
            DivergenceError: the loss is not finite. The weights have not changed.
            DesyncError: the ranks do not work on the same batch. The weights have not changed.
        """
        batch = StepBatch.of(batch)
        share, total_weight = self.share_of_rank(self.global_rank, len(batch)), batch.total_weight
        losses = torch.zeros(len(batch), dtype=torch.float64, device=self.device)
        self._deepspeed.train()
        mine = {index: to_device(batch[index], self.device) for index in share}
        for index in share:
            loss = self._loss(mine[index], index, loss_function)
            losses[index] = loss.detach()
            # DeepSpeed averages the gradients over the ranks, but the loss is a mean over the whole batch.
            self._deepspeed.backward(loss * (self.world_size / total_weight), scale_wrt_gas=False)
            if index != share[-1]:
                self._deepspeed.step()  # counts the micro-batch; only the last call updates the weights

        def share_of(rank: int) -> range:
            return self.share_of_rank(rank, len(batch))

        facts = {
            "step": str(self.global_steps),
            "learning rate": repr(self.learning_rate),
            "loss of the step before": repr(self._last_loss),
        }
        mean = self._last_loss = sum(self.sum_losses(losses, batch, facts, share_of)) / total_weight
        if not math.isfinite(mean):
            raise DivergenceError(
                f"the loss of step {self.global_steps} is not finite; got: {mean}; "
                "fix: lower adamw.learning_rate, or use bf16 or fp32 instead of fp16"
            )
        self._deepspeed.step()
        zero3.finish_updates()
        self._deepspeed.eval()
        self.global_steps += 1
        return mean

    def _loss(self, micro_batch: MicroBatch, index: int, loss_function: LossFunction) -> Tensor:
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), zero3.no_gathered_weights_saved():
            torch.manual_seed(dropout_key(self._seed, self.global_steps, index))
            (logits,) = self._perturbed(micro_batch, None, self._deepspeed)
        loss = loss_function(logits, micro_batch).sum()
        if not loss.requires_grad:
            raise UserError(
                "method adamw needs a loss with a gradient, which train.objective does not have",
                fix="set train.objective=task, or method=lezo",
            )
        return loss

    def _release(self) -> None:
        # After the first training step, DeepSpeed keeps gathered weights for a backward pass. An evaluation
        # has no backward pass that would release them.
        zero3.release_gathered(self._deepspeed)

    def save_training_state(self, root: Path) -> None:
        """Write weights, optimizer, schedule and loss scale to `root/step-NNNNNNNN`. A collective.

        Each rank writes its own shards in DeepSpeed's layout. All files are on disk when this returns.
        """
        name = snapshot_path(root, self.global_steps).name
        self._deepspeed.save_checkpoint(str(root), tag=name, save_latest=False)
        # DeepSpeed does not sync its files. The caller removes the old checkpoint next, and by then the new
        # one must survive a power cut.
        os.sync()
        distributed.barrier()

    def load_training_state(self, root: Path, step: int) -> None:
        """Restore exactly what `save_training_state` wrote after `step` steps. A collective.

        The number of ranks must be the same. DeepSpeed's files are pickled: open only those of trusted runs.
        """
        self._deepspeed.load_checkpoint(str(root), tag=snapshot_path(root, step).name)
        zero3.finish_updates()
        self.global_steps = step


def initialize_first_order(
    model: str,
    config: AdamWConfig,
    num_steps: int,
    ds_config: Mapping[str, Any],
    dtype: str = "fp32",
    seed: int = 0,
    peft: PeftConfig | None = None,
) -> FirstOrderEngine:
    """Load a model sharded over all ranks and return the engine that fine-tunes it by AdamW.

    Each rank reads only its own slices of the weights. No rank ever holds the whole model.

    Args:
        model: hub id, or directory with config.json and safetensors files. A .bin file is converted once.
        config: settings of the optimizer.
        num_steps: number of steps over which the learning rate falls to 0.
        ds_config: DeepSpeed config as a dict, from `lezo_ds.config.deepspeed.load_ds_config`, with
            gradient_accumulation_steps, the number of micro-batches of a step that a rank runs.
        dtype: "fp32", "bf16" or "fp16". Updates of 16-bit weights go to an fp32 copy.
        seed: seed of the run. Dropout depends on (seed, step, micro-batch), an adapter's start on the seed.
        peft: the adapter to train, or None to train all weights.

    Raises:
        UserError: there is no such model, it has no transformer blocks, or its weights or the adapter do not
            fit.
    """
    distributed.init_distributed()
    # DeepSpeed 0.19 calls it at every step, and torch 2.13 warns at every call.
    warnings.filterwarnings(
        "ignore", message=".*reduce_scatter_tensor. is deprecated", category=FutureWarning
    )
    sharded = load_sharded_model(
        model, ds_config=ds_config, dtype=dtype, precision="nearest", seed=seed, peft=peft
    )
    trainable = [parameter for parameter in sharded.module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=config.learning_rate, weight_decay=config.weight_decay)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, num_steps)
    ds_config = {"gradient_clipping": MAX_GRADIENT_NORM, **ds_config}
    engine = zero3.start_training_engine(
        model=sharded.module, optimizer=optimizer, schedule=schedule, ds_config=ds_config
    )
    perturbed = PerturbedForward(sharded.module, {}, noise_backend(distributed.device()))
    return FirstOrderEngine(engine, perturbed, sharded, seed=seed)
