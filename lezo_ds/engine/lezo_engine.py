"""The training engine: a ZeRO-3 sharded model and the zeroth-order step on it (LeZO, Algorithm 1).

A step has five parts. Rank 0 broadcasts its plan. Each rank runs its share of the forward passes. One
all-reduce gives every loss to every rank. Rank 0 appends the record to the journal. Each rank updates its own
shards, while a thread syncs the record.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from lezo_ds import distributed
from lezo_ds.config import (
    PeftConfig,
    ZoConfig,
    checked_layer_policy,
    make_estimator,
    make_layer_policy,
    make_schedule,
    make_update_rule,
)
from lezo_ds.engine.agreement import Facts, disagreement, wrong_weights
from lezo_ds.engine.model_engine import ModelEngine
from lezo_ds.engine.step_plan import StepPlan, plan_format_of
from lezo_ds.errors import DivergenceError, UserError
from lezo_ds.forward.batch import LossFunction, MicroBatch, to_device
from lezo_ds.forward.perturbed_forward import KeyedProbe, Perturbation, PerturbedForward
from lezo_ds.forward.step_batch import StepBatch
from lezo_ds.journal import Journal
from lezo_ds.model.sharded_model import ShardedModel, load_sharded_model
from lezo_ds.model.snapshots import SnapshotOwner, newest_snapshot, snapshot_path
from lezo_ds.noise import noise_backend
from lezo_ds.sharding import zero3
from lezo_ds.sharding.witness import Witness
from lezo_ds.zo.estimators import Estimate, mean_losses
from lezo_ds.zo.keys import direction_key, step_key
from lezo_ds.zo.passes import Pass, passes_of_step
from lezo_ds.zo.records import StepRecord

logger = logging.getLogger(__name__)

MAX_SKIPPED_STEPS = 10
"""A run ends after this number of consecutive steps whose loss was not finite."""

_LAST_RESULT = "result of the step before"


class LezoEngine(ModelEngine):
    """A sharded model and its zeroth-order optimizer. `initialize` makes it."""

    def __init__(
        self,
        deepspeed_engine: Any,  # noqa: ANN401
        perturbed: PerturbedForward,
        sharded: ShardedModel,
        config: ZoConfig,
        seed: int,
        num_steps: int | None = None,
    ) -> None:
        super().__init__(deepspeed_engine, perturbed, sharded)
        self._seed = seed
        self._num_steps = num_steps
        self._configure(config)

    def _configure(self, config: ZoConfig) -> None:
        self._config = config
        self._learning_rates = make_schedule(config, self._num_steps)
        self._estimator = make_estimator(config)
        self._layer_policy = make_layer_policy(config, self.layout.num_blocks)
        self._update_rule = make_update_rule(config)
        self.plan_format = plan_format_of(self._estimator, self._layer_policy)
        self._settings_agreed = False
        self._journal: Journal | None = None
        self._records: list[StepRecord] = []
        self._witness: Witness | None = None
        self._num_checked = 0

    def with_config(self, config: ZoConfig) -> LezoEngine:
        """Return another engine on the same weights, with its own settings, at step 0."""
        other = copy.copy(self)
        other._configure(config)
        other.global_steps = 0
        return other

    def attach_journal(self, journal: Journal | None) -> None:
        """From now on, write each step to this journal before it is applied. Only rank 0 passes a journal.

        A step's record is on the disk before the next step is applied, and before a model is written.
        `finish_records` waits for it. Shards on a disk are updated only after that.
        """
        self._journal = journal

    def finish_records(self) -> None:
        """Wait until the records of all steps are on the disk. Call this before anything that relies on them.

        Raises:
            JournalError: the record of the last step cannot be written.
        """
        if self._journal is not None:
            self._journal.sync()

    def write_model(self, target: Path, card: str = "", journal: str | None = None) -> None:
        """Write the model as `ModelEngine.write_model` does, after the records of its steps. A collective."""
        self.finish_records()
        super().write_model(target, card, journal)

    def passes_of_step(self, num_micro_batches: int) -> list[Pass]:
        """Return the forward passes of a step on all ranks together."""
        return passes_of_step(num_micro_batches, self.plan_format.num_probes, self._config.probes_per_pass)

    @torch.no_grad()
    def train_batch(self, batch: StepBatch | Sequence[MicroBatch], loss_function: LossFunction) -> StepRecord:
        """Do one step.

        Args:
            batch: all micro-batches of the step, the same on every rank. Rank r runs the passes r,
                r + world_size, ... of `passes_of_step`, and only reads their micro-batches and those of one
                other rank. A run with the same micro-batches gives the same weights on any number of ranks.
            loss_function: (logits or generated tokens, micro-batch) -> summed loss of each example.

        Returns:
            The record of the step. If a loss was not finite, `applied` is false and the
            weights have not changed.

        Raises:
            UserError: the passes cannot be shared evenly among the ranks.
            DivergenceError: `MAX_SKIPPED_STEPS` steps in a row were skipped.
            DesyncError: the ranks do not have the same settings, do not work on the same step or batch, or
                had different results in the step before. All ranks raise. The step is not done, and earlier
                steps that may be wrong are cut off the journal.
            JournalError: the record of this step, or of the step before, cannot be written. The step is not
                applied.
        """
        batch = StepBatch.of(batch)
        if not self._settings_agreed:
            self._agree_on_settings(len(batch))
        passes = self.passes_of_step(len(batch))
        mine = [passes[index] for index in self._my_share(len(passes))]

        def share_of(rank: int) -> list[int]:
            return sorted({passes[index].micro_batch for index in self._share_of(rank, len(passes))})

        plan = self._agree_on_plan()
        losses = self._local_losses(plan, batch, passes=mine, loss_function=loss_function)
        # The batch is hashed while a GPU still runs the forward passes.
        sums = self._sum_losses(losses, self._facts(plan), batch, share_of)
        record = self._record(plan, batch, sums)
        # The journal comes first, as in any write-ahead log. Weights in memory are gone after a power cut, so
        # they need not wait for the disk: only what is on a disk must never be ahead of the journal.
        if self._journal is not None:
            self._journal.append(record, wait=self._sharded.is_on_disk)
        self._records.append(record)
        self._apply(self._records, plan.step, plan.step + 1)
        self.global_steps += 1
        self._check_divergence(record)
        return record

    def _apply(self, records: Sequence[StepRecord], start: int, stop: int) -> None:
        """Update this rank's shards by the steps `start` to `stop` - 1."""
        updates = self._update_rule.step_updates(records, start, stop)
        self.weights.apply(updates, self._config.noise_distribution)

    def _agree_on_settings(self, num_micro_batches: int) -> None:
        """Check, before the first step, that all ranks have the same settings. A collective.

        The number of probes and of micro-batches decides the length of a step's messages. If the lengths
        differ, gloo fails without a reason, and NCCL waits forever.
        """
        settings = {f"zo.{key}": repr(value) for key, value in vars(self._config).items()}
        settings["train.steps"] = repr(self._num_steps)
        facts = {**settings, "number of micro-batches": str(num_micro_batches), **self._last_result()}
        self._sum_agreed(torch.empty(0, dtype=torch.float64, device=self.device), facts)
        self._settings_agreed = True

    def _agree_on_plan(self) -> StepPlan:
        """Return rank 0's plan of the next step. A collective."""
        message = self.plan_format.pack(self._decide()) if self.global_rank == 0 else b""
        return self.plan_format.unpack(distributed.broadcast_bytes(message, self.plan_format.num_bytes))

    def _decide(self) -> StepPlan:
        layers = self._layer_policy.sample(self._seed, self._records)
        return StepPlan(
            step=self.global_steps,
            key=step_key(self._seed, self.global_steps),
            learning_rate=self._learning_rates.at(self.global_steps),
            perturbation_scale=self._config.perturbation_scale,
            dropped_layers=layers.dropped,
            layer_weights=layers.weights,
            probes=tuple(self._estimator.probes(self._records)),
        )

    def _facts(self, plan: StepPlan) -> dict[str, str]:
        """Return the facts that must be the same on all ranks, besides the batch."""
        return {
            "step": str(self.global_steps),
            "seed": str(self._seed),
            "plan": repr(plan),
            **self._last_result(),
        }

    def _last_result(self) -> dict[str, str]:
        """Return the result of the last step, with every bit of its projected gradients."""
        return {_LAST_RESULT: repr(self._records[-1] if self._records else None)}

    def _disagree(self, step: int, by_rank: Sequence[Facts]) -> NoReturn:
        # If the ranks had different results in the last step, they have also applied different updates.
        agreed_on_last = len({facts[_LAST_RESULT] for facts in by_rank}) == 1
        num_good = step - (not agreed_on_last)
        self._cut_journal(num_good)
        raise disagreement(step, by_rank, num_good)

    def _cut_journal(self, num_good: int) -> None:
        if self._journal is not None:
            self._journal.cut(num_good)

    def watch_weights(self) -> None:
        """Assume that the weights are right now, and let `check_weights` follow them from here."""
        self._witness = self.weights.witness()
        self._num_checked = self.global_steps

    def check_weights(self) -> None:
        """Check that the weights of every rank are what the steps made of them. A collective.

        A replay of the journal must give the same value for some elements of each shard. Replicas in
        different shard groups must be equal. All ranks must have the same result of the last step. Before
        `watch_weights`, this does nothing.

        Raises:
            DesyncError: the check failed. The message names ranks and parameters. All ranks raise. The steps
                since the last check that passed are cut off the journal.
        """
        if self._witness is None:
            return
        updates = self._update_rule.step_updates(self._records, self._num_checked, self.global_steps)
        self._witness.follow(updates, self._config.noise_distribution)
        how = "is not what a replay of the journal gives"
        wrong = dict.fromkeys(self._witness.unlike(self.weights.low_bits), how)
        num_wrong = torch.tensor([float(len(wrong))], dtype=torch.float64, device=self.device)
        (total_wrong,) = self._sum_agreed(num_wrong, self._last_result())
        unlike = self.weights.unlike_replicas()
        if total_wrong or unlike:
            self._report(wrong, unlike)
        self._num_checked = self.global_steps

    def _report(self, wrong: Mapping[str, str], unlike: Sequence[tuple[int, str]]) -> NoReturn:
        found = [
            f"on rank {rank} {name} {how}"
            for rank, by_name in enumerate(distributed.gather_objects(wrong))
            for name, how in by_name.items()
        ]
        found += [f"on rank {rank} {name} differs from its replica's" for rank, name in unlike]
        self._cut_journal(self._num_checked)
        raise wrong_weights(self.global_steps, found, self._num_checked)

    def _local_losses(
        self, plan: StepPlan, batch: StepBatch, passes: Sequence[Pass], loss_function: LossFunction
    ) -> Tensor:
        """Return float64 [micro-batches * probes]: the losses of this rank's passes, 0 for all others."""
        num_probes = len(plan.probes)
        losses = torch.zeros(len(batch) * num_probes, dtype=torch.float64, device=self.device)
        # All inputs are copied before the first pass, because a copy from the host waits for queued GPU work.
        mine = {index: to_device(batch[index], self.device) for index in {run.micro_batch for run in passes}}
        for run in passes:
            micro_batch = mine[run.micro_batch]
            outputs = self._run(micro_batch, self._perturbation(plan, run.probes))
            for probe, output in zip(run.probes, outputs, strict=True):
                loss = loss_function(output, micro_batch).double().sum()
                losses[run.micro_batch * num_probes + probe] = loss
        return losses

    def _perturbation(self, plan: StepPlan, probes: range) -> Perturbation:
        """Return the perturbation at which one forward pass of a step runs."""
        keyed = [
            KeyedProbe(direction_key(plan.key, probe.direction), probe.scale)
            for probe in (plan.probes[index] for index in probes)
        ]
        return Perturbation(tuple(keyed), frozenset(plan.dropped_layers), self._config.noise_distribution)

    def _record(self, plan: StepPlan, batch: StepBatch, sums: Sequence[float]) -> StepRecord:
        losses = mean_losses(sums, len(plan.probes), batch.total_weight)
        try:
            found = self._estimator.estimate(plan.probes, losses)
        except ArithmeticError:
            # An estimate that overflows counts as not finite, so the step is skipped.
            found = Estimate(loss=math.nan, projected_grads=())
        gradients = found.projected_grads if found.is_finite else ()
        return StepRecord(
            step=plan.step,
            key=plan.key,
            dropped_layers=plan.dropped_layers,
            projected_grads=gradients,
            learning_rate=plan.learning_rate,
            perturbation_scale=plan.perturbation_scale,
            loss=found.loss if found.is_finite else None,
            applied=found.is_finite,
            layer_weights=plan.layer_weights,
        )

    def _check_divergence(self, record: StepRecord) -> None:
        num_skipped = _trailing_skips(self._records)
        if num_skipped >= MAX_SKIPPED_STEPS:
            self.finish_records()
            raise DivergenceError(
                f"the loss was not finite in {num_skipped} steps in a row; "
                f"got: the last at step {record.step}, loss {record.loss}; "
                "fix: lower zo.learning_rate, or use bf16 or fp32 instead of fp16"
            )

    def load_checkpoint(
        self,
        load_dir: str | Path,
        steps: Sequence[StepRecord],
        step: int | None = None,
        owner: SnapshotOwner | None = None,
    ) -> None:
        """Restore the exact weights after `step` updates. A collective.

        This starts from the nearest of the current weights, the newest valid snapshot in `load_dir` and the
        base weights, and replays the later steps. The number of ranks may differ from the original run.

        Args:
            load_dir: directory of snapshots, which may be empty or missing.
            steps: the journal's steps from 0. Only those that rank 0 passes count.
            step: number of updates; by default all of `steps`.
            owner: the run of these steps, whose snapshots are used and no others. Only that of rank 0
                counts. None uses any snapshot: the caller vouches for those in `load_dir`.

        Raises:
            UserError: `steps` has fewer than `step` records.
            LezoError: a snapshot's weights do not have the digest in its manifest.
        """
        records: tuple[StepRecord, ...] = distributed.broadcast_object(tuple(steps))
        target = len(records) if step is None else step
        if not 0 <= target <= len(records):
            raise UserError(
                f"step {target} is not in the journal", got=target, expected=f"0 to {len(records)}"
            )
        self._load_nearest(Path(load_dir), target, owner)
        self._apply(records, self.global_steps, target)
        self.global_steps = target
        self._records = list(records[:target])
        if self._witness is not None:
            self.watch_weights()

    def _load_nearest(self, root: Path, target: int, owner: SnapshotOwner | None) -> None:
        newest = newest_snapshot(root, target, owner) if self.global_rank == 0 else None
        snapshot: int | None = distributed.broadcast_object(newest)
        # At step 0 a snapshot of step 0 is loaded, too. The initial values of a prefix come from a forward
        # pass, and the snapshot keeps their exact bits, which another machine would not repeat.
        present = self.global_steps or -1
        if self.global_steps > target or (snapshot is not None and snapshot > present):
            self.load_model(None if snapshot is None else snapshot_path(root, snapshot), snapshot or 0)


def _trailing_skips(records: Sequence[StepRecord]) -> int:
    """Return the number of skipped steps after the last step that was not skipped."""
    return sum(1 for _ in itertools.takewhile(lambda record: not record.applied, reversed(records)))


def initialize(
    model: str,
    config: ZoConfig,
    ds_config: Mapping[str, Any],
    dtype: str = "fp32",
    seed: int = 0,
    peft: PeftConfig | None = None,
    partition_size: int | None = None,
    num_steps: int | None = None,
) -> LezoEngine:
    """Load a model sharded over all ranks and return the engine that trains it.

    Each rank reads only its own slices of the weights. No rank ever holds the whole model.

    Args:
        model: hub id, or directory with config.json and safetensors files. A .bin file is converted once.
        config: settings of the zeroth-order optimizer.
        ds_config: DeepSpeed config as a dict, from `lezo_ds.config.deepspeed.load_ds_config`.
        dtype: "fp32", "bf16" or "fp16".
        seed: seed of the run. Noise and dropped layers depend on (seed, step), an adapter's start on seed.
        peft: the adapter to train, or None to train all weights.
        partition_size: number of ranks in a shard group, a divisor of the number of ranks; None for all.
            Each group holds a replica of the weights and exchanges only scalars with the others.
        num_steps: number of steps of the run; needed if the learning rate depends on it.

    Raises:
        UserError: there is no such model, it has no transformer blocks, or its weights or the adapter do not
            fit; or everything that is trainable is in blocks and all blocks are dropped.
    """
    distributed.init_distributed()
    sharded = load_sharded_model(
        model,
        ds_config=ds_config,
        dtype=dtype,
        precision=config.update_precision,
        seed=seed,
        peft=peft,
        partition_size=partition_size,
        only_blocks=config.only_blocks,
    )
    num_blocks = sharded.layout.num_blocks
    trainable = {
        parameter.parameter: parameter.named
        for parameter in sharded.weights.parameters
        if parameter.parameter.requires_grad
    }
    trains_outside = any(named.block is None for named in trainable.values())
    checked_layer_policy(config, num_blocks, trains_outside=trains_outside)
    blocks = list(sharded.module.get_submodule(sharded.layout.path).children())
    engine = zero3.start_forward_engine(sharded.module, blocks, sharded.ds_config)
    noise = noise_backend(distributed.device())
    perturbed = PerturbedForward(
        sharded.module,
        trainable,
        noise,
        blocks=blocks if config.only_blocks else (),
        at_once=blocks if noise.takes_blocks and engine.has_whole_blocks else (),
    )
    return LezoEngine(engine, perturbed, sharded, config=config, seed=seed, num_steps=num_steps)
