"""The training engine: a sharded model and its zeroth-order optimizer. `initialize` returns it.

    ModelEngine      a sharded model: forward passes, votes and agreement of ranks, snapshots
      LezoEngine     its zeroth-order optimizer: steps, journal, replay, checks of weights

All ranks call the same methods in the same order: most of them exchange messages ("a collective").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lezo_ds import agreement, distributed
from lezo_ds.agreement import Claims
from lezo_ds.checkpoints.sharded_model import ShardedModel, load_sharded_model
from lezo_ds.checkpoints.snapshots import (
    Card,
    SnapshotOwner,
    load_snapshot,
    newest_snapshot,
    snapshot_path,
    write_snapshot,
)
from lezo_ds.config import (
    PeftConfig,
    ZoConfig,
    checked_optimizer,
    make_estimator,
    make_law,
    make_layer_policy,
    make_schedule,
    probes_per_pass,
    trained_part,
)
from lezo_ds.config.deepspeed import offloads_weights, tensor_parallel_size
from lezo_ds.data.generation import generate
from lezo_ds.distributed.workers import Ranks, Workers
from lezo_ds.errors import DivergenceError, UserError
from lezo_ds.forward.batch import LossFunction, MicroBatch, StepBatch, to_device
from lezo_ds.forward.directions import PROBES_AT_ONCE, Directions, directions_of
from lezo_ds.forward.perturbed_forward import PerturbedForward
from lezo_ds.forward.probes import Perturbation
from lezo_ds.journal import Journal
from lezo_ds.noise import kernels_of
from lezo_ds.sharding import zero3
from lezo_ds.sharding.integrity import Witness
from lezo_ds.zo.keys import direction_key, step_key
from lezo_ds.zo.passes import Groups, KeyedProbe, Pass
from lezo_ds.zo.records import StepPlan, StepRecord
from lezo_ds.zo.step import PlanFormat, Step
from lezo_ds.zo.updates import StepUpdate, step_updates

MAX_SKIPPED_STEPS = 10
"""Number of steps in a row that may be skipped before the run ends."""

_LAST_RESULT = "result of the step before"


class ModelEngine:
    """A sharded model in DeepSpeed's engine: what scoring and all ways of training share.

    Attributes:
        sharded: the model, its shards, and the files that it came from.
        module: the transformers model, with sharded parameters.
        weights: this rank's shards.
        layout: the transformer blocks of the model.
        base: the model on disk that the run starts from.
        global_steps: number of steps since the base weights, including skipped ones.
        stop_requested: whether this rank was asked to stop.
        stop_agreed: whether the votes of the last step asked for a stop. It is the same on all
            ranks.
        workers: who shares the passes of a step: the ranks of this launch, or of all replicas.
        journal: on rank 0, each zeroth-order step is written here before it is applied. A step's
            record is on the disk before the next step is applied, and before a model is written.
    """

    def __init__(
        self, deepspeed_engine: Any, perturbed: PerturbedForward, sharded: ShardedModel
    ) -> None:
        self.sharded = sharded
        self.module = sharded.module
        self.weights = sharded.weights
        self.layout = sharded.layout
        self.base = sharded.base
        self.global_steps = 0
        self.stop_requested = False
        self.stop_agreed = False
        self.workers: Workers = Ranks(self.world_size // self.tensor_parallel)
        self.journal: Journal | None = None
        self._deepspeed = deepspeed_engine
        self._perturbed = perturbed

    @property
    def global_rank(self) -> int:
        """Index of this process among all processes."""
        return distributed.rank()

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return distributed.world_size()

    @property
    def tensor_parallel(self) -> int:
        """Number of ranks that split each weight and run the same passes. It is 1 under ZeRO-3."""
        return tensor_parallel_size(self.sharded.ds_config)

    @property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        return distributed.device()

    @property
    def monitor(self) -> Any:
        """DeepSpeed's monitor, which writes to TensorBoard, W&B, Comet or CSV."""
        return self._deepspeed.monitor

    def request_stop(self) -> None:
        """Ask all ranks to stop after the next step. As a signal handler must, it sets a flag."""
        self.stop_requested = True

    def agree_on_stop(self) -> bool:
        """Return whether any rank has asked for a stop. A collective for use between steps."""
        vote = torch.tensor([float(self.stop_requested)], dtype=torch.float64, device=self.device)
        self.stop_agreed = distributed.sum_vector(vote)[0] > 0
        return self.stop_agreed

    @torch.no_grad()
    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Return the logits or new tokens of a micro-batch at the current weights. A collective."""
        (outputs,) = self.run(to_device(micro_batch, self.device), None)
        return outputs

    def run(self, micro_batch: MicroBatch, perturbation: Perturbation | None) -> tuple[Tensor, ...]:
        """Run one forward pass, or write answers, with inputs that are on the device. A collective.

        Returns:
            The output at each probe of the perturbation, or one output at the weights themselves:
            logits, or new tokens if the micro-batch has `generation` settings.
        """
        call: Callable[..., Any] = self._deepspeed
        if micro_batch.generation is not None:
            call = partial(generate, self.module, micro_batch)
        return self._perturbed(micro_batch, perturbation, call)

    def run_at_theta(self, micro_batch: MicroBatch) -> Tensor:
        """Return what a training pass makes of a micro-batch at theta. A collective."""
        return self.forward(micro_batch)

    @torch.no_grad()
    def forward_alone(self, ids: Sequence[int]) -> Tensor:
        """Return the logits of one sequence by the modules' own forward methods. A collective.

        Args:
            ids: token ids.

        Returns:
            [len(ids), vocabulary], in the dtype of the model.
        """
        input_ids = torch.tensor([list(ids)], device=self.device)
        with self._perturbed.own_forwards():
            output = self._deepspeed(input_ids=input_ids)
        logits: Tensor = output.logits
        return logits[0]

    def save_checkpoint(self, save_dir: str | Path) -> Path:
        """Write the model as a Hugging Face directory, and return it. A collective.

        The directory is `save_dir/step-NNNNNNNN`, with the number of steps so far.
        """
        target = snapshot_path(Path(save_dir), self.global_steps)
        self.write_model(target)
        return target

    def write_model(
        self,
        target: Path,
        *,
        card: Card | None = None,
        merge: bool = False,
        **claims: Any,
    ) -> None:
        """Write the model, or its adapter, to a directory (`write_snapshot`). A collective."""
        facts = {"step": self.global_steps, **claims}
        write_snapshot(self.sharded, target, facts, card=card, merge=merge)

    def load_model(self, snapshot: Path | None, step: int) -> None:
        """Load a snapshot's weights (None: the initial ones), after `step` steps. A collective."""
        if snapshot is None:
            self.sharded.load_initial()
        else:
            load_snapshot(self.sharded, snapshot)
        self.global_steps = step

    def passes_of_rank(self, rank: int, passes: Sequence[Pass]) -> list[Pass]:
        """Return those of a step's passes that a rank runs.

        Raises:
            UserError: the ranks of this launch cannot share them evenly.
        """
        return self.workers.passes_of(rank // self.tensor_parallel, passes)

    def sum_losses(self, losses: Tensor, batch: StepBatch, claims: Claims) -> list[float]:
        """Sum the losses of a step, check that ranks agree, and collect the votes. A collective.

        The votes for a stop are part of the all-reduce that every step has anyway. All ranks thus
        learn of a request at the same step, without another message.

        Args:
            losses: float64 [n], this rank's losses, and 0 for those of other ranks.
            batch: of the step.
            claims: what this rank works on, besides the batch.

        Returns:
            The sums over all workers, n numbers.

        Raises:
            DesyncError: the ranks disagree. All ranks raise.
        """
        if self.global_rank % self.tensor_parallel:
            # Of ranks that split the weights and run the same passes, the first one counts.
            losses = torch.zeros_like(losses)
        vote = losses.new_tensor([float(self.stop_requested)])
        if self.world_size > 1 or batch.content is not None:
            claims = {**claims, **agreement.batch_claims(batch)}
        values = self._sum_agreed(torch.cat([losses, vote]), claims)
        *sums, stop_votes = self.workers.sum(values, claims)
        self.stop_agreed = stop_votes > 0
        return sums

    def _sum_agreed(self, values: Tensor, claims: Claims) -> list[float]:
        """Sum over all ranks by one all-reduce; all ranks raise DesyncError if their claims differ.

        A sum is exact if its element is 0 on all ranks but one, or a small integer on each.
        """
        proof = values.new_tensor(agreement.claim_numbers(claims))
        sums = distributed.sum_vector(torch.cat([values, proof]))
        if not agreement.all_agree(sums[len(values) :], self.world_size):
            by_rank = distributed.gather_objects((self.global_steps, dict(claims)))
            step_of_first, _ = by_rank[0]
            by_rank = [claims_of_rank for _, claims_of_rank in by_rank]
            num_good = step_of_first
            if len({claims_of_rank.get(_LAST_RESULT) for claims_of_rank in by_rank}) > 1:
                # The ranks had different results in the last step, so they did different updates.
                num_good -= 1
            self._cut_journal(num_good)
            raise agreement.disagreement(step_of_first, by_rank, num_good)
        return sums[: len(values)]

    def _cut_journal(self, num_good: int) -> None:
        if self.journal is not None:
            self.journal.cut(num_good)


class LezoEngine(ModelEngine):
    """A sharded model and its zeroth-order optimizer.

    Attributes:
        config: settings of the optimizer.
        seed: of the run.
        records: of all steps so far, from step 0.
        learning_rates, estimator, layer_policy: made from the config.
        directions: what the run does with random directions, by their law.
        plan_format: bytes of the plan that rank 0 broadcasts at each step.
    """

    def __init__(
        self,
        deepspeed_engine: Any,
        perturbed: PerturbedForward,
        sharded: ShardedModel,
        directions: Directions,
        config: ZoConfig,
        seed: int,
        num_steps: int | None = None,
    ) -> None:
        super().__init__(deepspeed_engine, perturbed, sharded)
        self.seed = seed
        self.config = config
        self.learning_rates = make_schedule(config, num_steps)
        self.estimator = make_estimator(config)
        self.directions = directions
        num_blocks = self.layout.num_blocks
        trained = (shard.named for shard in self.weights.shards if shard.is_trained)
        trains_outside = any(named.block >= num_blocks for named in trained)
        self.layer_policy = make_layer_policy(config, num_blocks, trains_outside=trains_outside)
        self.plan_format = PlanFormat(
            num_groups=self.layer_policy.num_groups,
            num_probes=self.estimator.num_probes,
            has_weights=self.layer_policy.has_weights,
        )
        self.records: list[StepRecord] = []
        self._num_steps = num_steps
        self._probes_per_pass = probes_per_pass(config)
        self._settings_agreed = False
        self._witness: Witness | None = None
        self._num_checked = 0  # steps after which the weights were checked last

    def finish_records(self) -> None:
        """Wait until the records of all steps are on the disk, or raise JournalError."""
        if self.journal is not None:
            self.journal.sync()

    def write_model(self, target: Path, **options: Any) -> None:
        """Write the model after the records of its steps are on the disk. A collective."""
        self.finish_records()
        super().write_model(target, **options)

    @torch.no_grad()
    def run_at_theta(self, micro_batch: MicroBatch) -> Tensor:
        """Return the output at a probe of scale 0 of all layers, in the groups of a step.

        It is that of the last of two copies of the batch, if a pass of a step has several.
        """
        num_examples = micro_batch.num_examples
        size = min(self.config.examples_per_direction or num_examples, num_examples)
        key = step_key(self.seed, self.global_steps)
        keys = tuple(direction_key(key, group) for group in range(num_examples // size))
        probes = (KeyedProbe(keys, scale=0.0),) * min(PROBES_AT_ONCE, self._probes_per_pass)
        return self.run(micro_batch, Perturbation(probes))[-1]

    @torch.no_grad()
    def train_batch(
        self, batch: StepBatch | Sequence[MicroBatch], loss_function: LossFunction
    ) -> StepRecord:
        """Do one step (LeZO, Wang et al. 2024, Algorithm 1).

        Args:
            batch: all micro-batches of the step, the same on every rank. Rank r runs the passes r,
                r + world_size, ... and a run lays out only the micro-batches of these. A run with
                the same micro-batches gives the same weights on any number of ranks.
            loss_function: (logits or generated tokens, micro-batch) -> summed loss of each example.

        Returns:
            The record of the step. If a loss was not finite, `applied` is false and the weights
            have not changed.

        Raises:
            UserError: the passes cannot be shared evenly among the ranks, or the examples are not
                whole groups with enough directions.
            DivergenceError: `MAX_SKIPPED_STEPS` steps in a row were skipped.
            DesyncError: the ranks do not have the same settings, do not work on the same step or
                batch, or had different results in the step before. All ranks raise. The step is
                not done, and earlier steps that may be wrong are cut off the journal.
            JournalError: the record of this step, or of the step before, cannot be written. The
                step is not applied.
        """
        batch = StepBatch.of(batch)
        step = self.plan_step(batch)
        losses = self._measure(step, batch, loss_function)
        record = step.estimate(self._sum(losses, step, batch))
        self._write_ahead(record)
        self.apply(record.step + 1)
        self._end_if_diverged()
        return record

    def plan_step(self, batch: StepBatch) -> Step:
        """Return the next step, which rank 0 plans for all ranks. A collective."""
        size = self.config.examples_per_direction
        groups = Groups.of(len(batch), batch.num_examples, size)
        if not self._settings_agreed:
            self.estimator.check_groups(groups.number)
            self._agree_on_settings(len(batch))
        message = b""
        if self.global_rank == 0:
            probes = self.estimator.probes(self.records)
            message = self.plan_format.pack(self._decide(), probes)
        message = distributed.broadcast_bytes(message, self.plan_format.num_bytes)
        plan, probes = self.plan_format.unpack(message)
        return Step(plan, probes, self.estimator, groups, self._probes_per_pass, batch.total_weight)

    def _decide(self) -> StepPlan:
        """Return the plan of the next step, a function of the run's seed and its records so far."""
        layers = self.layer_policy.sample(self.seed, self.records)
        return StepPlan(
            step=self.global_steps,
            key=step_key(self.seed, self.global_steps),
            dropped_layers=layers.dropped,
            learning_rate=self.workers.learning_rate(self.own_learning_rate()),
            perturbation_scale=self.config.perturbation_scale,
            layer_weights=layers.weights,
        )

    def own_learning_rate(self) -> float:
        """Return the learning rate of the next step, as this machine computes it."""
        return self.learning_rates.at(self.global_steps)

    def perturbation(self, step: Step, forward_pass: Pass) -> Perturbation:
        """Return the weights at which a pass measures the loss. theta itself stays as it is."""
        dropped = frozenset(step.plan.dropped_layers)
        return Perturbation(step.probes_of(forward_pass), dropped)

    def _measure(self, step: Step, batch: StepBatch, loss_function: LossFunction) -> Tensor:
        """Run this rank's passes.

        Returns:
            float64 [num_losses], with 0 for the losses of other ranks' passes, so that the sum over
            all ranks has every loss.
        """
        losses = torch.zeros(step.num_losses, dtype=torch.float64, device=self.device)
        passes = self.passes_of_rank(self.global_rank, step.passes)
        # All inputs are copied before the first pass, because a copy from the host waits for queued
        # GPU work.
        indices = {forward_pass.micro_batch for forward_pass in passes}
        inputs = {index: to_device(batch[index], self.device) for index in indices}
        for forward_pass in passes:
            index = forward_pass.micro_batch
            outputs = self.run(inputs[index], self.perturbation(step, forward_pass))
            for probe, output in zip(forward_pass.probes, outputs, strict=True):
                of_examples = loss_function(output, inputs[index]).double()
                if self.config.examples_per_direction is not None:
                    check_losses(len(of_examples), inputs[index])
                of_groups = of_examples.chunk(step.groups.per_micro_batch)
                for group, of_group in enumerate(of_groups):
                    if forward_pass.counts:
                        losses[step.place(index, group, probe)] = of_group.sum()
        return losses

    def _sum(self, losses: Tensor, step: Step, batch: StepBatch) -> list[float]:
        """Return the losses of all ranks, and check that all do the same step. A collective."""
        claims = {
            "step": str(self.global_steps),
            "seed": str(self.seed),
            "plan": repr((step.plan, step.probes)),
            **self._last_result(),
        }
        return self.sum_losses(losses, batch, claims)

    def _write_ahead(self, record: StepRecord) -> None:
        """Append a record to the run's records, and to the journal if this rank has it.

        The journal comes first, as in any write-ahead log. Weights in memory are gone after a power
        cut, so they need not wait for the disk: only what is on a disk must never be ahead of the
        journal.
        """
        if self.journal is not None:
            self.journal.append(record, wait=False)
        self.records.append(record)

    def apply(self, stop: int) -> None:
        """Update this rank's shards by the records of all steps before step `stop`."""
        self.weights.apply(self._updates(self.global_steps, stop), self.directions)
        self.global_steps = stop

    def _end_if_diverged(self) -> None:
        last = self.records[-MAX_SKIPPED_STEPS:]
        if len(last) == MAX_SKIPPED_STEPS and not any(record.applied for record in last):
            self.finish_records()
            raise DivergenceError(
                f"the loss was not finite in {MAX_SKIPPED_STEPS} steps in a row, up to step "
                f"{last[-1].step}; fix: start again in another run_dir, with a third of "
                "zo.learning_rate, or with bf16 or fp32 instead of fp16"
            )

    def _agree_on_settings(self, num_micro_batches: int) -> None:
        """Check, before the first step, that all ranks have the same settings. A collective.

        The number of probes and of micro-batches decides the length of a step's messages. If the
        lengths differ, gloo fails without a reason, and NCCL waits forever.
        """
        claims = {f"zo.{key}": repr(value) for key, value in vars(self.config).items()}
        claims["train.steps"] = repr(self._num_steps)
        claims["number of micro-batches"] = str(num_micro_batches)
        claims |= self._last_result()
        self._sum_agreed(torch.empty(0, dtype=torch.float64, device=self.device), claims)
        self._settings_agreed = True

    def _updates(self, start: int, stop: int) -> list[StepUpdate]:
        return step_updates(self.records, start, stop, self.config.weight_decay)

    def _last_result(self) -> dict[str, str]:
        """Return the result of the last step, with every bit of its projected gradients."""
        return {_LAST_RESULT: repr(self.records[-1] if self.records else None)}

    def watch_weights(self) -> None:
        """Assume that the weights are right now, and let `check_weights` follow them from here."""
        self._witness = self.weights.witness()
        self._num_checked = self.global_steps

    def check_weights(self) -> None:
        """Check that the weights of every rank are what the steps made of them. A collective.

        A replay of the journal must give the same value for some elements of each shard. Replicas
        in different shard groups must be equal. All ranks must have the same result of the last
        step. Before `watch_weights`, this does nothing.

        Raises:
            DesyncError: the check failed. The message names ranks and parameters. All ranks raise.
                The steps since the last check that passed are cut off the journal.
        """
        if self._witness is None:
            return
        self._witness.follow(self._updates(self._num_checked, self.global_steps), self.directions)
        wrong = self._witness.unlike()
        num_wrong = torch.tensor([float(len(wrong))], dtype=torch.float64, device=self.device)
        (total_wrong,) = self._sum_agreed(num_wrong, self._last_result())
        unlike = self.weights.unlike_replicas()
        if total_wrong or unlike:
            differences = []
            for rank, names in enumerate(distributed.gather_objects(wrong)):
                differences += [
                    f"on rank {rank} {name} is not what a replay of the journal gives"
                    for name in names
                ]
            for rank, name in unlike:
                differences.append(f"on rank {rank} {name} differs from its replica's")
            self._cut_journal(self._num_checked)
            raise agreement.desync_error(
                f"the weights are not what {self.global_steps} steps made of them",
                differences,
                self._num_checked,
                fix="test the memory of that rank's machine",
            )
        self._num_checked = self.global_steps

    def load_checkpoint(
        self,
        load_dir: str | Path,
        steps: Sequence[StepRecord],
        step: int | None = None,
        owner: SnapshotOwner | None = None,
    ) -> None:
        """Restore the exact weights after `step` updates. A collective.

        This starts from the nearest of the current weights, the newest valid snapshot in `load_dir`
        and the base weights, and replays the later steps. The current weights count only if `steps`
        begins with the steps that made them. The number of ranks may differ from the original run.

        Args:
            load_dir: directory of snapshots, which may be empty or missing.
            steps: the journal's steps from 0. Only those that rank 0 passes count.
            step: number of updates; by default all of `steps`.
            owner: the run of these steps, whose snapshots are used and no others. Only that of
                rank 0 counts. None uses any snapshot: the caller vouches for those in `load_dir`.

        Raises:
            UserError: `steps` has fewer than `step` records.
            LezoError: a snapshot's weights do not have the digest in its manifest.
        """
        records: tuple[StepRecord, ...] = distributed.broadcast_object(tuple(steps))
        target = len(records) if step is None else step
        if not 0 <= target <= len(records):
            raise UserError(f"step {target} is not in the journal, which has 0 to {len(records)}")
        self._load_nearest(Path(load_dir), records[:target], owner)
        self.records = list(records[:target])
        self.apply(target)
        if self._witness is not None:
            self.watch_weights()

    def _load_nearest(
        self, root: Path, records: Sequence[StepRecord], owner: SnapshotOwner | None
    ) -> None:
        """Load the newest weights from which `records` lead to the target, unless they are here."""
        target = len(records)
        newest = newest_snapshot(root, target, owner) if self.global_rank == 0 else None
        snapshot: int | None = distributed.broadcast_object(newest)
        are_on_the_way = list(records[: self.global_steps]) == self.records[: self.global_steps]
        if are_on_the_way and self.global_steps <= target:
            # At step 0 a snapshot of step 0 is loaded, too. The initial values of a prefix come
            # from a forward pass, and the snapshot keeps their exact bits, which another machine
            # would not repeat.
            is_newer = snapshot is not None and snapshot > (self.global_steps or -1)
            if not is_newer:
                return
        if snapshot is None:
            self.load_model(None, 0)
        else:
            self.load_model(snapshot_path(root, snapshot), snapshot)


def check_losses(num_losses: int, micro_batch: MicroBatch) -> None:
    """Refuse losses of which nobody can say to which group of examples each belongs."""
    if num_losses != micro_batch.num_examples:
        raise UserError(
            f"zo.examples_per_direction needs a loss for each of {micro_batch.num_examples} "
            f"examples of a micro-batch, and its loss function returned {num_losses}",
            fix="return one loss per example, or name the examples in MicroBatch.examples",
        )


def initialize(
    model: str,
    config: ZoConfig,
    ds_config: Mapping[str, Any],
    dtype: str = "fp32",
    seed: int = 0,
    peft: PeftConfig | None = None,
    partition_size: int | None = None,
    num_steps: int | None = None,
    bits: int | None = None,
) -> LezoEngine:
    """Load a model sharded over all ranks and return the engine that trains it.

    Each rank reads only its own slices of the weights. No rank ever holds the whole model.

    Args:
        model: hub id, or directory with config.json and safetensors files.
        config: settings of the zeroth-order optimizer.
        ds_config: DeepSpeed config as a dict, from `lezo_ds.config.deepspeed.load_ds_config`. With
            `tensor_parallel.autotp_size` of N, groups of N ranks split the weights and run the same
            passes.
        dtype: "fp32", "bf16" or "fp16".
        seed: seed of the run. Noise and dropped layers depend on (seed, step), an adapter's start
            on seed.
        peft: the adapter to train, or None to train all weights.
        partition_size: number of ranks in a shard group, a divisor of the number of ranks; None
            for all. Each group holds a replica of the weights and exchanges only scalars with the
            others.
        num_steps: number of steps of the run; needed if the learning rate depends on it.
        bits: 4 or 8 stores the matrices of the blocks in so many bits (`sharding.quantization`).
            Only an adapter can be trained then. None stores them in `dtype`.

    Raises:
        UserError: settings contradict each other; there is no such model, it has no transformer
            blocks, or its weights or the adapter do not fit; or everything that is trainable is in
            blocks and all blocks are dropped.
    """
    distributed.init_distributed()
    if dtype == "fp16" and not distributed.supports_fp16():
        raise UserError(
            f"{model} has model.dtype=fp16, in which this machine does not compute",
            fix="add model.dtype=bf16, or fp32, which keeps all bits",
        )
    config = checked_optimizer(config, peft, bits, num_steps)
    directions = directions_of(make_law(config))
    # Refused before weights are loaded. Offloaded shards are updated on the CPU.
    kernels_of(distributed.device())
    if offloads_weights(ds_config):
        kernels_of(torch.device("cpu"))
    sharded = load_sharded_model(
        model,
        ds_config=ds_config,
        dtype=dtype,
        precision=config.update_precision,
        seed=seed,
        peft=peft,
        partition_size=partition_size,
        trained=trained_part(config),
        bits=bits,
    )
    trainable = {
        shard.parameter: shard.named for shard in sharded.weights.shards if shard.is_trained
    }
    blocks = list(sharded.module.get_submodule(sharded.layout.path).children())
    engine = sharded.engine
    if engine is None:
        engine = zero3.start_forward_engine(sharded.module, blocks, sharded.ds_config)
    perturbed = PerturbedForward(
        sharded.module,
        trainable,
        blocks,
        directions=directions,
        shares_start=trained_part(config) != "all",
    )
    return LezoEngine(
        engine, perturbed, sharded, directions, config=config, seed=seed, num_steps=num_steps
    )
