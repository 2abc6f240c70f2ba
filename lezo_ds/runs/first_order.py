"""First-order training (the papers' row FT): transformers' Trainer on the batches of a run.

As in MeZO's own fine-tuning (Malladi et al. 2023), dropout is on in training and off in
evaluations, and gradients are clipped unless DeepSpeed's JSON says otherwise.

No replay gives these weights back. A run resumes from the Trainer's checkpoint, on the same number
of ranks:

    training_state.json          header, evaluations, and the step of the checkpoint
    checkpoints/checkpoint-300/  of all ranks: weights, AdamW's moments, schedule, loss scale
    snapshots/step-00000200/     the best weights so far, for the end of the run and for export
    snapshots/step-00000300/     the newest ones
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from torch import Tensor
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lezo_ds import distributed
from lezo_ds.checkpoints.sharded_model import ShardedModel, load_sharded_model
from lezo_ds.checkpoints.snapshots import SnapshotOwner, remove_snapshots, snapshot_path
from lezo_ds.config import RunConfig
from lezo_ds.engine import ModelEngine
from lezo_ds.errors import DivergenceError, UserError
from lezo_ds.files import failures_named, remove_directory, sync
from lezo_ds.forward.batch import LossFunction, MicroBatch, StepBatch, to_device
from lezo_ds.forward.perturbed_forward import PerturbedForward
from lezo_ds.forward.probes import Perturbation
from lezo_ds.journal import EvaluationRecord
from lezo_ds.runs.records import TrainingState, best_evaluation, owner_of
from lezo_ds.runs.run import Run
from lezo_ds.sharding import zero3
from lezo_ds.zo.keys import dropout_key
from lezo_ds.zo.passes import passes_of_step

MAX_GRADIENT_NORM = 1.0
"""Norm to which gradients are clipped: the default of transformers' Trainer."""


class FirstOrderEngine(ModelEngine):
    """A sharded model that a `FirstOrderTrainer` trains. It runs once it `has_started`."""

    has_started = False

    def __init__(self, sharded: ShardedModel) -> None:
        super().__init__((None, PerturbedForward(sharded.module, ()), sharded))

    def start(self, deepspeed_engine: Any) -> None:
        """Use the engine that the Trainer has made."""
        self._deepspeed = deepspeed_engine
        self.has_started = True
        zero3.finish_updates()

    @property
    def skipped_steps(self) -> int:
        """Number of steps whose fp16 gradients overflowed.

        DeepSpeed skips these steps and lowers its loss scale.
        """
        return int(self._deepspeed.skipped_steps)

    def run(self, micro_batch: MicroBatch, perturbation: Perturbation | None) -> tuple[Tensor, ...]:
        self._deepspeed.eval()
        outputs = super().run(micro_batch, perturbation)
        # After the first training step, DeepSpeed keeps gathered weights for a backward pass. An
        # evaluation has no backward pass that would release them.
        self._deepspeed.optimizer.parameter_offload.partition_all_parameters()
        return outputs

    def loss(self, micro_batch: MicroBatch, key: int, loss_function: LossFunction) -> Tensor:
        """Return the summed loss of a micro-batch with its gradient. `key` decides the dropout."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), zero3.no_gathered_weights_saved():
            torch.manual_seed(key)
            (logits,) = self._perturbed(micro_batch, None, self._deepspeed)
        loss = loss_function(logits, micro_batch).sum()
        if not loss.requires_grad:
            problem = (
                "method adamw needs a loss with a gradient, which train.objective does not have"
            )
            raise UserError(problem, fix="set train.objective=task, or method=lezo")
        return loss


class FirstOrderTrainer(Trainer):  # type: ignore[misc]
    """The Trainer on laid-out batches, which are the same on every rank.

    Attributes:
        mean_loss: over the batch of the newest step, before its update.
        rate: learning rate of the newest step.
    """

    loss_is_scaled_for_ga = True  # `compute_loss` returns shares of the mean over the batch
    mean_loss: float | None = None
    rate = 0.0

    def __init__(
        self,
        config: RunConfig,
        engine: FirstOrderEngine,
        batches: Callable[[int], StepBatch],
        loss_function: LossFunction,
        callback: TrainerCallback,
        directory: Path,
    ) -> None:
        self._engine = engine
        self._seed = config.seed
        self._batches = batches
        self._loss_function = loss_function
        self._losses = torch.zeros(0)
        ds_config = engine.sharded.ds_config
        AcceleratorState._reset_state(reset_partial_state=True)  # that of an earlier run
        # TrainingArguments names no backend with DeepSpeed, and without one or a GPU, each rank
        # would count itself as the only one (transformers 5.23, accelerate 1.15). Any name will do:
        # the process group is there.
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo").device = engine.device
        arguments = TrainingArguments(
            output_dir=str(directory),
            accelerator_config={"use_configured_state": True},
            use_cpu=engine.device.type == "cpu",
            deepspeed=dict(ds_config),
            bf16=config.model.dtype == "bf16",
            fp16=config.model.dtype == "fp16",
            per_device_train_batch_size=ds_config["train_micro_batch_size_per_gpu"],
            gradient_accumulation_steps=ds_config["gradient_accumulation_steps"],
            max_grad_norm=ds_config["gradient_clipping"],
            max_steps=config.train.steps,
            optim="adamw_torch",
            learning_rate=config.adamw.learning_rate,
            weight_decay=config.adamw.weight_decay,
            lr_scheduler_type="linear",  # to 0, without a warm-up
            ignore_data_skip=True,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        super().__init__(engine.module, arguments, callbacks=[callback])

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """Return the names of all parameters: adamw.weight_decay is for all."""
        return [name for name, _ in model.named_parameters()]

    def get_train_dataloader(self) -> Iterator[tuple[StepBatch, int]]:
        """Yield this rank's micro-batches of the steps: a batch, and the place in it."""
        engine = self._engine
        while True:
            batch = self._batches(self.state.global_step)
            self._losses = torch.zeros(len(batch), dtype=torch.float64, device=engine.device)
            passes = passes_of_step(len(batch), 1, 1)
            for each in engine.passes_of_rank(engine.global_rank, passes):
                yield batch, each.micro_batch

    def compute_loss(self, model: Any, inputs: tuple[StepBatch, int], **_: Any) -> Tensor:
        """Return this micro-batch's share of the mean loss over the batch. A collective.

        Raises:
            DivergenceError: the loss is not finite. DesyncError: the ranks do not work on the same
            step or batch, or had other losses before. UserError: the loss has no gradient.
        """
        batch, index = inputs
        engine = self._engine
        # Dropout depends on the place in the batch, not on the rank.
        key = dropout_key(self._seed, self.state.global_step, index)
        loss = engine.loss(to_device(batch[index], engine.device), key, self._loss_function)
        self._losses[index] = loss.detach()
        # The last backward pass updates the weights, so the losses are compared before it.
        if self.accelerator.sync_gradients:
            self._agree(batch)
        # DeepSpeed averages the gradients over the ranks, but the loss is a mean over the batch.
        return loss * (engine.world_size / batch.total_weight)

    def _agree(self, batch: StepBatch) -> None:
        step = self.state.global_step
        self.rate = float(self.lr_scheduler.get_last_lr()[0])
        claims = {
            "step": str(step),
            "learning rate": repr(self.rate),
            "loss of the step before": repr(self.mean_loss),
        }
        sums = self._engine.sum_losses(self._losses, batch, claims)
        self.mean_loss = sum(sums) / batch.total_weight
        if not math.isfinite(self.mean_loss):
            raise DivergenceError(
                f"the loss of step {step} is not finite: {self.mean_loss}; "
                "fix: lower adamw.learning_rate, or use bf16 or fp32 instead of fp16"
            )

    def save_checkpoint(self) -> None:
        """Write what training resumes from. Its files are on the disk when this returns."""
        self._save_checkpoint(self.model_wrapped, trial=None)
        root = Path(self.args.output_dir)
        # DeepSpeed and the Trainer sync no file, but the caller removes the old checkpoint next.
        # What the ranks of a node have written is in the page cache of that node, so one of them
        # syncs it. DeepSpeed ends with a barrier, and only rank 0 writes the rest.
        if distributed.local_rank() == 0:
            with failures_named(root):
                for path in (*root.rglob("*"), root, root.parent):
                    sync(path)
        distributed.barrier()

    def _save_rng_state(self, output_dir: str) -> None:
        """Write nothing: dropout has seeds of its own."""

    def save_model(self, *_: Any, **__: Any) -> None:
        """Write nothing: the checkpoint has the weights."""


def initialize_first_order(config: RunConfig, ds_config: Mapping[str, Any]) -> FirstOrderEngine:
    """Load a run's model, sharded over all ranks, for a `FirstOrderTrainer`."""
    model = config.model
    train = config.train
    distributed.init_distributed()
    # DeepSpeed 0.19 calls it at every step, and torch 2.13 warns at every call.
    warnings.filterwarnings("ignore", ".*reduce_scatter_tensor. is deprecated", FutureWarning)
    num_passes = train.batch_size // train.micro_batch_size // distributed.world_size()
    ds_config = {
        "gradient_clipping": MAX_GRADIENT_NORM,
        **ds_config,
        "train_batch_size": train.batch_size,
        "gradient_accumulation_steps": num_passes,
        # With offload, DeepSpeed would insist on its own CPU optimizer, which has to be compiled.
        "zero_force_ds_cpu_optimizer": False,
    }
    sharded = load_sharded_model(
        model.path,
        ds_config=ds_config,
        dtype=model.dtype,
        precision=None,
        seed=config.seed,
        peft=config.peft,
    )
    trained = {each.dtype for each in sharded.module.parameters() if each.requires_grad}
    if len(trained) > 1:  # DeepSpeed would fail in an assertion
        raise UserError(
            f"method adamw needs weights of one precision, and {type(sharded.module).__name__} "
            f"has {len(trained)}",
            fix="set model.dtype=fp32, or peft.kind=lora, or method=lezo",
        )
    return FirstOrderEngine(sharded)


class _Over(Exception):  # noqa: N818  # this is not an error
    """No step follows. It leaves the Trainer's loop."""


class FirstOrderRun(Run, TrainerCallback):  # type: ignore[misc]
    """A run of AdamW, which the Trainer calls back between its steps.

    It resumes from the checkpoint that training_state.json names.

    The order of writes makes any crash harmless: snapshot, checkpoint, training_state.json, and
    only then is the older checkpoint removed.
    """

    engine: FirstOrderEngine
    needs_snapshot_to_stop = True
    trainer: FirstOrderTrainer
    _bar: tqdm[Any]
    _state: TrainingState  # what training_state.json has; `open` sets it

    def open(self) -> None:
        self._state = distributed.on_rank_zero(self._open_state)
        self.evaluations = list(self._state.evaluations)
        self.engine.global_steps = self._state.step

    def _open_state(self) -> TrainingState:
        """Read training_state.json on rank 0, or start one, and remove what came after its step."""
        path = self.directory.training_state
        if path.exists():
            state = TrainingState.read(path)
            # Later ones belong to steps that will be done again.
            evaluations = [record for record in state.evaluations if record.step <= state.step]
            self._state = replace(
                state, world_size=self.engine.world_size, evaluations=tuple(evaluations)
            )
            self.prepare_resumption(state.header, state.step)
        else:
            self._state = TrainingState(self.prepare_start(), self.engine.world_size)
        self._remove_other_checkpoints()
        remove_snapshots(self.directory.snapshots, range(self._state.step + 1))
        return self._state

    def begin(self) -> None:
        """Do nothing: the base model is scored when the Trainer has made DeepSpeed's engine."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Score the base model, and do what is due before the first step."""
        self.engine.start(self.trainer.model_wrapped)
        super().begin()
        self.cross_check()
        self._go_on()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Count a step, and do what is due after it."""
        zero3.finish_updates()
        self.engine.global_steps += 1
        trainer = self.trainer
        self.count_step(
            {
                "loss": trainer.mean_loss,
                "learning_rate": trainer.rate,
                "applied": not trainer.accelerator.optimizer_step_was_skipped,
            },
            self._bar,
        )
        self._go_on()

    def _go_on(self) -> None:
        if self.do_what_is_due():
            raise _Over

    def train(self, bar: tqdm[Any]) -> None:
        """Let the Trainer load the checkpoint, if there is one, and do what is left of the steps.

        Raises:
            UserError: a file of this rank is missing or damaged. Other ranks may wait for this one,
                which ends the process. These files are pickled, so they are trusted.
        """
        self._bar = bar
        self.trainer = FirstOrderTrainer(
            self.config,
            self.engine,
            self.batches.at,
            self.data.loss,
            self,
            self.directory.checkpoints,
        )
        checkpoint = self._checkpoint() if self._state.step > 0 else None
        try:
            self.trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        except _Over:
            return
        except Exception as error:  # for a damaged file, torch and DeepSpeed raise of many kinds
            is_loading = checkpoint is not None and not self.engine.has_started
            if not is_loading or distributed.lost_rank(error) is not None:
                raise
            raise UserError(
                f"the checkpoint {checkpoint} cannot be loaded: {type(error).__name__}: {error}",
                fix="restore it from a copy, or use another run_dir",
            ) from error

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
        self.trainer.save_checkpoint()
        self._write_state(step=self.engine.global_steps)
        distributed.on_rank_zero(self._remove_other_checkpoints)

    def _checkpoint(self) -> Path:
        return self.directory.checkpoints / f"{PREFIX_CHECKPOINT_DIR}-{self._state.step}"

    def _remove_other_checkpoints(self) -> None:
        for path in self.directory.checkpoints.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            if path != self._checkpoint():
                remove_directory(path)

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
        """Return whether the weights after a step are the initial ones, which need no snapshot."""
        return step == 0 and not self.starts_from_snapshot()

    def protected_steps(self, *, is_finished: bool) -> tuple[int, ...]:
        best = best_evaluation(self.evaluations)
        if best is None or is_finished:  # the user asked for no snapshots at the end
            return ()
        return (best.step,)

    def num_skipped_steps(self) -> int:
        return self.engine.skipped_steps
