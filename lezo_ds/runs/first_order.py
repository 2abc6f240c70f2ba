"""First-order training (the papers' row FT): AdamW under ZeRO-3 on the same batches and losses.

As in MeZO's own fine-tuning (Malladi et al. 2023, with transformers' Trainer), dropout is on in
training and off in evaluations, and gradients are clipped unless DeepSpeed's JSON says otherwise.

No replay gives these weights back. A run resumes from DeepSpeed's checkpoint, on the same number of
ranks:

    training_state.json         header, evaluations, and the step of the checkpoint
    checkpoints/step-00000300/  written by all ranks: weights, AdamW's moments, schedule, loss scale
    snapshots/step-00000200/    the best weights so far, for the end of the run and for export
    snapshots/step-00000300/    the newest ones
"""

from __future__ import annotations

import math
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
from lezo_ds.checkpoints.snapshots import SnapshotOwner, remove_snapshots, snapshot_path
from lezo_ds.config import RunConfig
from lezo_ds.engine import ModelEngine
from lezo_ds.errors import DivergenceError, UserError
from lezo_ds.files import failures_named, sync
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
from lezo_ds.runs.run import Run, StepMetrics
from lezo_ds.sharding import zero3
from lezo_ds.zo.keys import dropout_key
from lezo_ds.zo.passes import passes_of_step

MAX_GRADIENT_NORM = 1.0
"""Norm to which gradients are clipped: the default of transformers' Trainer."""


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
        """Learning rate of the next step."""
        return float(self._deepspeed.get_lr()[0])

    @property
    def skipped_steps(self) -> int:
        """Number of steps whose fp16 gradients overflowed.

        DeepSpeed skips these steps and lowers its loss scale.
        """
        return int(self._deepspeed.skipped_steps)

    def train_batch(
        self, batch: StepBatch | Sequence[MicroBatch], loss_function: LossFunction
    ) -> float:
        """Do one step and return the mean loss over the batch before the update. A collective.

        The batch is the same on every rank. If this raises, the weights have not changed.

        Raises:
            DivergenceError: the loss is not finite. DesyncError: the ranks do not work on the same
            step or batch, or had other losses before. UserError: the loss has no gradient, or the
            ranks cannot share the micro-batches evenly.
        """
        batch = StepBatch.of(batch)
        passes = self.passes_of_rank(self.global_rank, passes_of_step(len(batch), 1, 1))
        own_indices = [each.micro_batch for each in passes]
        losses = torch.zeros(len(batch), dtype=torch.float64, device=self.device)
        self._deepspeed.train()
        for index in own_indices:
            loss = self._loss(to_device(batch[index], self.device), index, loss_function)
            losses[index] = loss.detach()
            # DeepSpeed averages the gradients over the ranks, but the loss is a mean over the whole
            # batch.
            scale = self.world_size / batch.total_weight
            self._deepspeed.backward(loss * scale, scale_wrt_gas=False)
            if index != own_indices[-1]:
                self._deepspeed.step()  # counts the micro-batch; the last call updates the weights
        # The losses are compared before the last call, so that a step that raises changes no
        # weight.
        claims = {
            "step": str(self.global_steps),
            "learning rate": repr(self.learning_rate),
            "loss of the step before": repr(self._last_loss),
        }
        sums = self.sum_losses(losses, batch, claims)
        mean_loss = sum(sums) / batch.total_weight
        self._last_loss = mean_loss
        if not math.isfinite(mean_loss):
            raise DivergenceError(
                f"the loss of step {self.global_steps} is not finite: {mean_loss}; "
                "fix: lower adamw.learning_rate, or use bf16 or fp32 instead of fp16"
            )
        self._deepspeed.step()
        zero3.finish_updates()
        self._deepspeed.eval()
        self.global_steps += 1
        return mean_loss

    def _loss(self, micro_batch: MicroBatch, index: int, loss_function: LossFunction) -> Tensor:
        """Return the summed loss of micro-batch `index` of the batch, with its gradient."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), zero3.no_gathered_weights_saved():
            # Dropout depends on the place in the batch, not on the rank.
            torch.manual_seed(dropout_key(self._seed, self.global_steps, index))
            (logits,) = self._perturbed(micro_batch, None, self._deepspeed)
        loss = loss_function(logits, micro_batch).sum()
        if not loss.requires_grad:
            problem = (
                "method adamw needs a loss with a gradient, which train.objective does not have"
            )
            raise UserError(problem, fix="set train.objective=task, or method=lezo")
        return loss

    def run(self, micro_batch: MicroBatch, perturbation: Perturbation | None) -> tuple[Tensor, ...]:
        outputs = super().run(micro_batch, perturbation)
        # After the first training step, DeepSpeed keeps gathered weights for a backward pass. An
        # evaluation has no backward pass that would release them.
        self._deepspeed.optimizer.parameter_offload.partition_all_parameters()
        return outputs

    def save_training_state(self, root: Path) -> None:
        """Write weights, optimizer, schedule and loss scale to `root/step-NNNNNNNN`. A collective.

        The files are on the disk when this returns.
        """
        target = snapshot_path(root, self.global_steps)
        # This ends with a barrier, so the files of all ranks are complete (docs/deepspeed.md).
        self._deepspeed.save_checkpoint(str(root), tag=target.name, save_latest=False)
        # DeepSpeed does not sync its files, but the caller removes the old checkpoint next. What
        # the ranks of a node have written is in the page cache of that node, so one of them syncs
        # it.
        if distributed.local_rank() == 0:
            with failures_named(target):
                for path in (*target.rglob("*"), target, root, root.parent):
                    sync(path)
        distributed.barrier()

    def load_training_state(self, root: Path, step: int) -> None:
        """Restore what `save_training_state` wrote, on as many ranks. A collective.

        These files are pickled, so they are trusted.

        Raises:
            UserError: a file of this rank is missing or damaged. Other ranks may wait for this one,
                which ends the process.
        """
        source = snapshot_path(root, step)
        try:
            # The path is None if DeepSpeed finds no files (docs/deepspeed.md). Then no weight has
            # changed.
            path, _ = self._deepspeed.load_checkpoint(str(root), tag=source.name)
            if path is None:
                raise FileNotFoundError("DeepSpeed finds no files")
        except Exception as error:  # for a damaged file, torch and DeepSpeed raise of many kinds
            if isinstance(error, RuntimeError) and distributed.lost_rank(error) is not None:
                raise
            raise UserError(
                f"the checkpoint {source} cannot be loaded: {type(error).__name__}: {error}",
                fix="restore it from a copy, or use another run_dir",
            ) from error
        zero3.finish_updates()
        self.global_steps = step


def initialize_first_order(config: RunConfig, ds_config: Mapping[str, Any]) -> FirstOrderEngine:
    """Load a run's model, sharded over all ranks, and return the engine that fine-tunes it."""
    model = config.model
    train = config.train
    assert train.steps is not None, "a configuration without steps is refused"
    distributed.init_distributed()
    # DeepSpeed 0.19 calls it at every step, and torch 2.13 warns at every call.
    warnings.filterwarnings("ignore", ".*reduce_scatter_tensor. is deprecated", FutureWarning)
    num_passes = train.batch_size // train.micro_batch_size // distributed.world_size()
    ds_config = {
        "gradient_clipping": MAX_GRADIENT_NORM,
        **ds_config,
        "train_batch_size": train.batch_size,
        "gradient_accumulation_steps": num_passes,
    }
    sharded = load_sharded_model(
        model.path,
        ds_config=ds_config,
        dtype=model.dtype,
        precision=None,
        seed=config.seed,
        peft=config.peft,
    )
    trainable = [parameter for parameter in sharded.module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trainable, lr=config.adamw.learning_rate, weight_decay=config.adamw.weight_decay
    )
    schedule = get_linear_schedule_with_warmup(optimizer, 0, train.steps)
    engine = zero3.start_training_engine(
        model=sharded.module, optimizer=optimizer, schedule=schedule, ds_config=ds_config
    )
    perturbed = PerturbedForward(sharded.module, {})
    return FirstOrderEngine(engine, perturbed, sharded, config.seed)


class FirstOrderRun(Run):
    """AdamW in a run, which resumes from the checkpoint that training_state.json names.

    The order of writes makes any crash harmless: snapshot, checkpoint, training_state.json, and
    only then is the older checkpoint removed.
    """

    engine: FirstOrderEngine
    needs_snapshot_to_stop = True
    _state: TrainingState  # what training_state.json has; `open` sets it

    def open(self) -> None:
        self._state = distributed.on_rank_zero(self._open_state)
        self.evaluations = list(self._state.evaluations)
        if self._state.step > 0:
            self.engine.load_training_state(self.directory.checkpoints, self._state.step)

    def _open_state(self) -> TrainingState:
        """Read training_state.json on rank 0, or start one, and remove what came after its step."""
        path = self.directory.training_state
        base = self.engine.base
        if path.exists():
            state = TrainingState.read(path)
            assert_same_base(state.header, base)
            # Later ones belong to steps that will be done again.
            evaluations = [record for record in state.evaluations if record.step <= state.step]
            self._state = replace(
                state, world_size=self.engine.world_size, evaluations=tuple(evaluations)
            )
            self.prepare_resumption(state.step)
        else:
            header = make_header(self.config, self.data, base.fingerprint, base.table_hash)
            self._state = TrainingState(header, self.engine.world_size)
            self.directory.set_aside(self.directory.outputs())
        remove_snapshots(self.directory.checkpoints, [self._state.step])
        remove_snapshots(self.directory.snapshots, range(self._state.step + 1))
        return self._state

    def step(self) -> StepMetrics:
        batch = self.batches.at(self.engine.global_steps)
        learning_rate = self.engine.learning_rate
        num_skipped = self.engine.skipped_steps
        loss = self.engine.train_batch(batch, self.data.loss)
        is_applied = self.engine.skipped_steps == num_skipped
        return {"loss": loss, "learning_rate": learning_rate, "applied": is_applied}

    def record(self, evaluation: EvaluationRecord) -> None:
        """Record the evaluation. If it is the best so far, keep the weights too."""
        self.evaluations.append(evaluation)
        is_best = evaluation.split == "dev" and best_evaluation(self.evaluations) is evaluation
        if is_best and not self._is_base(evaluation.step):
            super().save()
        self._write_state(evaluations=tuple(self.evaluations))

    def save(self) -> None:
        if self._state.step == self.engine.global_steps:
            return
        # training_state.json is written last. A crash before that resumes from the old checkpoint,
        # which is removed only when the file names the new one.
        super().save()
        self.engine.save_training_state(self.directory.checkpoints)
        self._write_state(step=self.engine.global_steps)
        if distributed.rank() == 0:
            remove_snapshots(self.directory.checkpoints, [self._state.step])

    def _write_state(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        path = self.directory.training_state
        content = asdict(self._state)
        distributed.on_rank_zero(lambda: self.directory.write_json(path, content))

    def owner(self) -> SnapshotOwner:
        return owner_of(self._state.header)

    def restore(self, step: int) -> None:
        """Load the snapshot of a step. The optimizer stays where it is: no step follows."""
        snapshot = None
        if not self._is_base(step):
            snapshot = snapshot_path(self.directory.snapshots, step)
        self.engine.load_model(snapshot, step)

    def _is_base(self, step: int) -> bool:
        """Return whether step 0 needs no snapshot: a prefix may start differently elsewhere."""
        return step == 0 and self.config.peft.kind != "prefix"

    def protected_steps(self, *, is_finished: bool) -> tuple[int, ...]:
        best = best_evaluation(self.evaluations)
        if best is None or is_finished:  # the user asked for no snapshots at the end
            return ()
        return (best.step,)

    def num_skipped_steps(self) -> int:
        return self.engine.skipped_steps
