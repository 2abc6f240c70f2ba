"""First-order training (the row FT in the papers): AdamW under ZeRO-3 on the same batches and losses.

As in MeZO's own fine-tuning (Malladi et al. 2023, with transformers' Trainer), dropout is on in training and
off in evaluations, and gradients are clipped unless DeepSpeed's JSON says otherwise.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import get_linear_schedule_with_warmup

from lezo_ds import distributed
from lezo_ds.checkpoints.sharded_model import ShardedModel, load_sharded_model
from lezo_ds.checkpoints.snapshots import read_manifest, remove_snapshots, snapshot_path
from lezo_ds.config import RunConfig
from lezo_ds.engine import ModelEngine
from lezo_ds.errors import DivergenceError, UserError
from lezo_ds.forward.batch import LossFunction, MicroBatch, StepBatch, to_device
from lezo_ds.forward.perturbed_forward import PerturbedForward
from lezo_ds.forward.probes import Perturbation
from lezo_ds.journal import EvaluationRecord
from lezo_ds.runs.records import (
    TrainingState,
    assert_same_base,
    best_evaluation,
    make_header,
    owner_of,
)
from lezo_ds.runs.run import Run
from lezo_ds.sharding import zero3
from lezo_ds.zo.keys import dropout_key

MAX_GRADIENT_NORM = 1.0  # the default of transformers' Trainer


class FirstOrderEngine(ModelEngine):
    """A sharded model and its AdamW, from `initialize_first_order`."""

    _last_loss: float | None = None

    def __init__(
        self, engine: Any, perturbed: PerturbedForward, sharded: ShardedModel, seed: int
    ) -> None:
        super().__init__(engine, perturbed, sharded)
        self._seed = seed

    @property
    def learning_rate(self) -> float:
        return float(self._deepspeed.get_lr()[0])

    @property
    def skipped_steps(self) -> int:
        """Number of steps whose fp16 gradients overflowed. DeepSpeed skips them and lowers its loss scale."""
        return int(self._deepspeed.skipped_steps)

    def train_batch(
        self, batch: StepBatch | Sequence[MicroBatch], loss_function: LossFunction
    ) -> float:
        """Do one step and return the mean loss over the batch before the update.

        The batch is the same on every rank. If this raises, the weights have not changed.
        """
        batch = StepBatch.of(batch)
        share, total_weight = self.share_of_rank(self.global_rank, len(batch)), batch.total_weight
        losses = torch.zeros(len(batch), dtype=torch.float64, device=self.device)
        self._deepspeed.train()
        for index in share:
            loss = self._loss(to_device(batch[index], self.device), index, loss_function)
            losses[index] = loss.detach()
            # DeepSpeed averages the gradients over the ranks, but the loss is a mean over the whole batch.
            self._deepspeed.backward(loss * (self.world_size / total_weight), scale_wrt_gas=False)
            if index != share[-1]:
                self._deepspeed.step()  # counts the micro-batch; only the last call updates the weights
        facts = {
            "step": str(self.global_steps),
            "learning rate": repr(self.learning_rate),
            "loss of the step before": repr(self._last_loss),
        }
        sums = self.sum_losses(
            losses, batch, facts, lambda rank: self.share_of_rank(rank, len(batch))
        )
        mean = self._last_loss = sum(sums) / total_weight
        if not math.isfinite(mean):
            fix = "lower adamw.learning_rate, or use bf16 or fp32 instead of fp16"
            raise DivergenceError(
                f"the loss of step {self.global_steps} is not finite: {mean}; fix: {fix}"
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
            text = "method adamw needs a loss with a gradient, which train.objective does not have"
            raise UserError(text, fix="set train.objective=task, or method=lezo")
        return loss

    def run(self, micro_batch: MicroBatch, perturbation: Perturbation | None) -> tuple[Tensor, ...]:
        outputs = super().run(micro_batch, perturbation)
        # After the first training step, DeepSpeed keeps gathered weights for a backward pass. An evaluation
        # has no backward pass that would release them.
        self._deepspeed.optimizer.parameter_offload.partition_all_parameters()
        return outputs

    def save_training_state(self, root: Path) -> None:
        """Write weights, optimizer, schedule and loss scale to `root/step-NNNNNNNN`. A collective."""
        name = snapshot_path(root, self.global_steps).name
        self._deepspeed.save_checkpoint(str(root), tag=name, save_latest=False)
        # DeepSpeed does not sync its files, but the caller removes the old checkpoint next.
        os.sync()
        distributed.barrier()

    def load_training_state(self, root: Path, step: int) -> None:
        """Restore what `save_training_state` wrote, on as many ranks. Trusted: these files are pickled."""
        self._deepspeed.load_checkpoint(str(root), tag=snapshot_path(root, step).name)
        zero3.finish_updates()
        self.global_steps = step


def initialize_first_order(config: RunConfig, ds_config: Mapping[str, Any]) -> FirstOrderEngine:
    """Load a run's model, sharded over all ranks, and return the engine that fine-tunes it by AdamW."""
    model, train = config.model, config.train
    assert train.steps is not None
    distributed.init_distributed()
    # DeepSpeed 0.19 calls it at every step, and torch 2.13 warns at every call.
    warnings.filterwarnings("ignore", ".*reduce_scatter_tensor. is deprecated", FutureWarning)
    num_passes = train.batch_size // train.micro_batch_size // distributed.world_size()
    batch = {"train_batch_size": train.batch_size, "gradient_accumulation_steps": num_passes}
    ds_config = {"gradient_clipping": MAX_GRADIENT_NORM, **ds_config, **batch}
    sharded = load_sharded_model(
        model.path,
        ds_config=ds_config,
        dtype=model.dtype,
        precision="nearest",
        seed=config.seed,
        peft=config.peft,
    )
    trainable = [parameter for parameter in sharded.module.parameters() if parameter.requires_grad]
    adamw = config.adamw
    optimizer = torch.optim.AdamW(
        trainable, lr=adamw.learning_rate, weight_decay=adamw.weight_decay
    )
    schedule = get_linear_schedule_with_warmup(optimizer, 0, train.steps)
    engine = zero3.start_training_engine(
        model=sharded.module, optimizer=optimizer, schedule=schedule, ds_config=ds_config
    )
    perturbed = PerturbedForward(sharded.module, {})
    return FirstOrderEngine(engine, perturbed, sharded, config.seed)


class FirstOrderRun(Run):
    """A run of AdamW. DeepSpeed's checkpoint, which training_state.json names, is its training state."""

    engine: FirstOrderEngine  # type: ignore[assignment]
    _has_journal = False
    _state: TrainingState

    def _open(self) -> None:
        self._state = distributed.on_rank_zero(self._open_state)
        self.evaluations = list(self._state.evaluations)
        if self._state.step > 0:
            self.engine.load_training_state(self.directory.checkpoints, self._state.step)

    def _open_state(self) -> TrainingState:
        path, base = self.directory.training_state, self.engine.base
        if path.exists():
            recorded = TrainingState.read(path)
            assert_same_base(recorded.header, base)
            done = tuple(record for record in recorded.evaluations if record.step <= recorded.step)
            state = replace(recorded, world_size=self.engine.world_size, evaluations=done)
            self._resume(state.step, owner_of(state.header))
        else:
            header = make_header(self.config, self.data, base.fingerprint, base.table_hash)
            state = TrainingState(header, self.engine.world_size)
            self.directory.set_aside(self.directory.outputs(), "an earlier run left")
        remove_snapshots(self.directory.checkpoints, [state.step])
        remove_snapshots(self.directory.snapshots, range(state.step + 1))
        return state

    def _protected(self) -> tuple[int, ...]:
        best = best_evaluation(self.evaluations)
        return () if best is None else (best.step,)

    def _num_skipped(self) -> int:
        return self.engine.skipped_steps

    def _train_step(self) -> dict[str, Any]:
        batch = self.data.step_batch(self.config, self.engine.global_steps)
        learning_rate, skipped = self.engine.learning_rate, self.engine.skipped_steps
        loss = self.engine.train_batch(batch, self.data.loss)
        applied = self.engine.skipped_steps == skipped
        return {"loss": loss, "learning_rate": learning_rate, "applied": applied}

    def _record_evaluation(self, record: EvaluationRecord) -> None:
        """Record the evaluation. If it is the best so far, keep the weights too."""
        self.evaluations.append(record)
        is_best = record.split == "dev" and best_evaluation(self.evaluations) is record
        if is_best and not self._is_base(record.step):
            self._write_snapshot()
        self._write_state(evaluations=tuple(self.evaluations))

    def _save(self) -> None:
        if self._state.step == self.engine.global_steps:
            return
        # training_state.json is written last. A crash before that resumes from the old checkpoint, which is
        # removed only when the file names the new one.
        self._write_snapshot()
        self.engine.save_training_state(self.directory.checkpoints)
        self._write_state(step=self.engine.global_steps)
        if self.writes:
            remove_snapshots(self.directory.checkpoints, [self._state.step])

    def _write_state(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        path, content = self.directory.training_state, asdict(self._state)
        distributed.on_rank_zero(lambda: self.directory.write_json(path, content))

    def _write_snapshot(self) -> None:
        target = snapshot_path(self.directory.snapshots, self.engine.global_steps)
        if not distributed.on_rank_zero(lambda: read_manifest(target) is not None):
            checksum = owner_of(self._state.header).checksum(self.engine.global_steps)
            self.engine.write_model(target, journal=checksum)

    def _restore(self, step: int | None) -> None:
        step = step or 0
        snapshot = snapshot_path(self.directory.snapshots, step)
        self.engine.load_model(None if self._is_base(step) else snapshot, step)

    def _is_base(self, step: int) -> bool:
        """Return whether step 0 needs no snapshot. A prefix may start differently on another machine."""
        return step == 0 and self.config.peft.kind != "prefix"
