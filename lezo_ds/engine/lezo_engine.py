"""The training engine: a ZeRO-3 sharded model, and the zeroth-order step on it (LeZO, Algorithm 1).

A step: rank 0's plan is broadcast; each rank runs the dual forward of its share of the micro-batches; ONE
all-reduce gives every rank every loss; rank 0 appends the record to the journal and syncs it; each rank
updates its own shards.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from lezo_ds import distributed
from lezo_ds.config import PeftConfig, ZoConfig, num_dropped
from lezo_ds.engine.agreement import Facts, batch_digest, check_noise, disagreement, wrong_weights
from lezo_ds.engine.estimator import OUTLIER_WINDOW, estimate, is_outlier
from lezo_ds.engine.model_engine import ModelEngine
from lezo_ds.engine.step_plan import MAX_BLOCKS, PLAN_BYTES, StepPlan, direction_seed, noise_seed
from lezo_ds.errors import DivergenceError, UserError
from lezo_ds.journal import Journal, StepRecord
from lezo_ds.model.batch import LossFunction, MicroBatch, to_device
from lezo_ds.model.blocks import draw_dropped_layers
from lezo_ds.model.perturbed_forward import Perturbation, PerturbedForward, Sign
from lezo_ds.model.sharded_model import ShardedModel, load_sharded_model
from lezo_ds.model.snapshots import newest_snapshot, snapshot_path
from lezo_ds.noise import noise_backend
from lezo_ds.sharding import zero3
from lezo_ds.sharding.witness import Witness

logger = logging.getLogger(__name__)

_LAST_RESULT = "result of the step before"


class LezoEngine(ModelEngine):
    """A sharded model and its zeroth-order optimiser; made by `initialize`."""

    def __init__(
        self,
        deepspeed_engine: Any,  # noqa: ANN401
        perturbed: PerturbedForward,
        sharded: ShardedModel,
        config: ZoConfig,
        seed: int,
    ) -> None:
        super().__init__(deepspeed_engine, perturbed, sharded)
        self._seed = seed
        self._configure(config)

    def _configure(self, config: ZoConfig) -> None:
        assert config.learning_rate is not None, "zeroth-order training has a learning rate"
        self._learning_rate = config.learning_rate
        self._config = config
        self._num_dropped = num_dropped(config, self.layout.num_blocks)
        self._journal: Journal | None = None
        self._skipped_in_a_row = 0
        self._last: StepRecord | None = None
        self._magnitudes: deque[float] = deque(maxlen=OUTLIER_WINDOW)
        self._witness: Witness | None = None
        self._unchecked: list[StepRecord] = []

    def with_config(self, config: ZoConfig) -> LezoEngine:
        """Return another engine on the same model and the same weights, with its own settings and steps."""
        other = copy.copy(self)
        other._configure(config)
        other.global_steps = 0
        return other

    def attach_journal(self, journal: Journal | None) -> None:
        """Write every step ahead to this journal (rank 0 has it, the others pass None)."""
        self._journal = journal

    @torch.no_grad()
    def train_batch(self, batch: Sequence[MicroBatch], loss_function: LossFunction) -> StepRecord:
        """Do one step.

        Args:
            batch: the step's whole batch, the same on every rank. Each pair of a micro-batch and a direction
                is one forward pass; rank r runs passes r, r + world, ... Runs are equal on any number of
                ranks if their micro-batches are.
            loss_function: (logits, or new tokens; micro-batch) -> summed loss of each example.

        Returns:
            What was done; `applied` is false if a loss was not finite or an outlier, and then nothing has
            changed.

        Raises:
            UserError: the passes cannot be shared evenly among the ranks.
            DivergenceError: `max_skipped_steps` steps in a row were skipped.
            DesyncError: the ranks do not work on the same step or batch, did not come to the same g in the
                step before, or weights have changed by themselves. All ranks raise; the step is not done, and
                those before that may be wrong are cut off the journal.
            JournalError: the journal cannot be written; the step is not applied.
        """
        passes = self._my_share(len(batch) * self._config.directions)
        own_plan = self._plan()
        plan = StepPlan.unpack(distributed.broadcast_bytes(own_plan.pack(), PLAN_BYTES))
        losses = self._local_losses(plan, batch, passes, loss_function)
        facts = self._facts(own_plan, plan, batch)  # a GPU meanwhile runs what was asked of it; suspects wait
        suspects = self._number(len(self.weights.suspects))
        *sums, num_suspects = self._sum_losses(torch.cat([losses, suspects]), facts)
        if num_suspects:
            self.check_weights()
        record = self._record(plan, batch, sums)
        if self._journal is not None:
            self._journal.append(record)
        if record.applied:
            self.weights.apply([record])
        self.global_steps += 1
        self._remember([record])
        self._check_divergence(record)
        return record

    def _plan(self) -> StepPlan:
        step = self.global_steps
        dropped = draw_dropped_layers(self._seed, step, self.layout.num_blocks, self._num_dropped)
        scale = self._config.perturbation_scale
        return StepPlan(step, noise_seed(self._seed, step), dropped, self._learning_rate, scale)

    def _facts(self, own_plan: StepPlan, plan: StepPlan, batch: Sequence[MicroBatch]) -> dict[str, str]:
        """Return what must be the same on all ranks."""
        return {
            "plan of its own": repr(own_plan),
            "plan from rank 0": repr(plan),
            "batch": batch_digest(batch),
            **self._last_result(),
        }

    def _last_result(self) -> dict[str, str]:
        """Return what the last step came to, every bit of g included."""
        return {_LAST_RESULT: repr(self._last)}

    def _disagree(self, step: int, by_rank: Sequence[Facts]) -> NoReturn:
        agreed_on_last = len({facts[_LAST_RESULT] for facts in by_rank}) == 1
        num_good = step - (not agreed_on_last)
        self._cut_journal(num_good)
        raise disagreement(step, by_rank, num_good)

    def _cut_journal(self, num_good: int) -> None:
        if self._journal is not None:
            self._journal.cut(num_good)

    def _remember(self, records: Sequence[StepRecord]) -> None:
        """Keep what later steps need of those done."""
        self._last = records[-1] if records else None
        recent = [record for record in records if record.applied][-OUTLIER_WINDOW:]
        self._magnitudes.extend(max(map(abs, record.projected_grads)) for record in recent)
        if self._witness is not None:
            self._unchecked += records

    def watch_weights(self) -> None:
        """Take the weights as right; from now on changes that are no step's are found.

        A step finds those of the weights that it updates, and `check_weights` all.
        """
        self.weights.watch()
        self._start_witness()

    def _start_witness(self) -> None:
        self._witness = self.weights.witness()
        self._unchecked = []

    def check_weights(self) -> None:
        """Check that every rank's weights are what the steps made of them. A collective.

        Every bit: none has changed but by an update. Some elements of each shard: they are what a replay of
        the journal gives. Where groups of ranks hold replicas: these are equal. The last step: all ranks had
        the same. Does nothing before `watch_weights`.

        Raises:
            DesyncError: they are not; it names ranks and parameters. All ranks raise. What was journaled
                since the last check that found all well is cut off.
        """
        if self._witness is None:
            return
        self.weights.look()
        self._witness.follow(self._unchecked)
        wrong = dict.fromkeys(self.weights.suspects, "changed by itself")
        for name in self._witness.unlike(self.weights.low_bits):
            wrong.setdefault(name, "is not what a replay of the journal gives")
        (num_wrong,) = self._sum_agreed(self._number(len(wrong)), self._last_result())
        unlike = self.weights.unlike_replicas()
        if num_wrong or unlike:
            self._report(wrong, unlike)
        self._unchecked = []

    def _report(self, wrong: Mapping[str, str], unlike: Sequence[tuple[int, str]]) -> NoReturn:
        found = [
            f"on rank {rank} {name} {how}"
            for rank, by_name in enumerate(distributed.gather_objects(wrong))
            for name, how in by_name.items()
        ]
        found += [f"on rank {rank} {name} differs from its replica's" for rank, name in unlike]
        num_good = self.global_steps - len(self._unchecked)
        self._cut_journal(num_good)
        raise wrong_weights(self.global_steps, found, num_good)

    def _number(self, value: float) -> Tensor:
        return torch.tensor([value], dtype=torch.float64, device=self.device)

    def _local_losses(
        self, plan: StepPlan, batch: Sequence[MicroBatch], passes: range, loss_function: LossFunction
    ) -> Tensor:
        """Return float64 [2 * passes]: both losses of my forward passes, 0 for the other ranks'.

        Pass i is micro-batch i // directions in direction i % directions: with as many directions as ranks,
        each rank runs the whole batch in a direction of its own.
        """
        num_directions = self._config.directions
        losses = torch.zeros(2 * len(batch) * num_directions, dtype=torch.float64, device=self.device)
        # All before the first pass: a GPU takes tensors of the host only when it has nothing else to do.
        mine = {
            index: to_device(batch[index], self.device) for index in {i // num_directions for i in passes}
        }
        for index in passes:
            micro_batch = mine[index // num_directions]
            seed = direction_seed(plan.seed, index % num_directions)
            for side, outputs in enumerate(self._both_sides(plan, seed, micro_batch)):
                losses[2 * index + side] = loss_function(outputs, micro_batch).double().sum()
        return losses

    def _both_sides(self, plan: StepPlan, seed: int, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        def run(sign: Sign) -> tuple[Tensor, ...]:
            dropped = frozenset(plan.dropped_layers)
            perturbation = Perturbation(seed, plan.perturbation_scale, dropped, sign)
            return self._run(micro_batch, perturbation)

        if self._config.forward == "dual":
            return run(Sign.BOTH)
        return run(Sign.PLUS) + run(Sign.MINUS)

    def _record(self, plan: StepPlan, batch: Sequence[MicroBatch], sums: Sequence[float]) -> StepRecord:
        total_weight = sum(micro_batch.weight for micro_batch in batch)
        stride = 2 * self._config.directions
        found = [
            estimate(sums[first::stride], sums[first + 1 :: stride], total_weight, plan.perturbation_scale)
            for first in range(0, stride, 2)
        ]
        is_finite = all(direction.is_finite for direction in found)
        gradients = tuple(direction.projected_gradient for direction in found) if is_finite else ()
        magnitude = max(map(abs, gradients), default=0.0)
        return StepRecord(
            step=plan.step,
            seed=plan.seed,
            dropped_layers=plan.dropped_layers,
            projected_grads=gradients,
            learning_rate=plan.learning_rate,
            perturbation_scale=plan.perturbation_scale,
            loss=sum(direction.loss for direction in found) / len(found) if is_finite else None,
            applied=is_finite and not is_outlier(magnitude, self._magnitudes, self._config.outlier_factor),
        )

    def _check_divergence(self, record: StepRecord) -> None:
        self._skipped_in_a_row = 0 if record.applied else self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= self._config.max_skipped_steps:
            raise DivergenceError(
                "the loss was not finite, or an outlier, in "
                f"zo.max_skipped_steps={self._skipped_in_a_row} steps in a row; "
                f"got: the last at step {record.step}, loss {record.loss}; "
                "fix: lower zo.learning_rate, or use bf16 or fp32 in the place of fp16"
            )

    def load_checkpoint(
        self, load_dir: str | Path, steps: Sequence[StepRecord], step: int | None = None
    ) -> None:
        """Bring the weights to what they were after `step` updates, bit for bit. A collective.

        Starts from what is nearest: the present weights, the newest valid snapshot in `load_dir`, or the base
        weights; the journal's later steps are replayed. Any number of ranks may do it.

        Args:
            load_dir: folder of snapshots; it may be empty or absent.
            steps: the journal's steps from 0 (on rank 0; the others may pass none).
            step: how many updates; by default all of `steps`.
        """
        records: tuple[StepRecord, ...] = distributed.broadcast_object(tuple(steps))
        target = len(records) if step is None else step
        if not 0 <= target <= len(records):
            raise UserError(
                f"step {target} is not in the journal", got=target, expected=f"0 to {len(records)}"
            )
        self._load_nearest(Path(load_dir), target)
        self.weights.apply(records[self.global_steps : target])
        self.global_steps = target
        self._skipped_in_a_row = _trailing_skips(records[:target])
        self._magnitudes.clear()
        self._remember(records[:target])
        if self._witness is not None:
            self._start_witness()

    def _load_nearest(self, root: Path, target: int) -> None:
        newest = newest_snapshot(root, target) if self.global_rank == 0 else None
        snapshot: int | None = distributed.broadcast_object(newest)
        # A snapshot of step 0 is loaded though this engine stands there too: the values that an adapter
        # starts from may come from a forward pass, whose last bits another machine does not repeat.
        present = self.global_steps or -1
        if self.global_steps > target or (snapshot is not None and snapshot > present):
            self.load_model(None if snapshot is None else snapshot_path(root, snapshot), snapshot or 0)


def _trailing_skips(records: Sequence[StepRecord]) -> int:
    """Return how many of the last steps, in a row, were skipped."""
    return sum(1 for _ in itertools.takewhile(lambda record: not record.applied, reversed(records)))


def initialize(
    model: str,
    config: ZoConfig,
    ds_config: Mapping[str, Any],
    dtype: str = "fp32",
    seed: int = 0,
    peft: PeftConfig | None = None,
    partition_size: int | None = None,
) -> LezoEngine:
    """Load a model sharded over all ranks and return the engine that trains it.

    Each rank reads only its own slices of the weights; none ever holds the whole model.

    Args:
        model: hub id, or directory with config.json and safetensors (or .bin, converted once).
        config: the zeroth-order optimiser's settings.
        ds_config: DeepSpeed config as a dict, from `lezo_ds.ds_config.load_ds_config`.
        dtype: of the weights: "fp32", "bf16" or "fp16".
        seed: of the run: noise and dropped layers follow from (seed, step), an adapter's start from seed.
        peft: the adapter to train; None to train all weights.
        partition_size: number of ranks that share the weights (it divides their number), so that every so
            many hold a replica and exchange nothing but scalars with the others; None for all ranks.

    Raises:
        UserError: no such model, no transformer blocks, weights or an adapter that do not fit; or all that
            would be trained is in blocks, and all blocks are dropped; or fast noise that is not the same
            everywhere.
    """
    distributed.init_distributed()
    check_noise("exact", ds_config)
    precision = config.update_precision
    sharded = load_sharded_model(model, ds_config, dtype, precision, seed, peft, partition_size)
    num_blocks = sharded.layout.num_blocks
    if num_blocks > MAX_BLOCKS:
        raise UserError("the model has too many blocks", got=num_blocks, expected=f"at most {MAX_BLOCKS}")
    trainable = {
        parameter.parameter: parameter.named
        for parameter in sharded.weights.parameters
        if parameter.parameter.requires_grad
    }
    dropped = num_dropped(config, num_blocks)
    if dropped == num_blocks and all(named.block is not None for named in trainable.values()):
        raise UserError(
            "nothing is left to train: every block is dropped, and what is trained is in the blocks",
            got=f"{dropped} of {num_blocks} blocks dropped a step, and an adapter in them",
            expected=f"at most {num_blocks - 1}",
            fix="set zo.sparsity=0.5, or peft.kind=none",
        )
    blocks = sharded.module.get_submodule(sharded.layout.path).children()
    engine = zero3.start_engine(sharded.module, blocks, sharded.ds_config)
    perturbed = PerturbedForward(sharded.module, trainable, noise_backend(distributed.device()))
    return LezoEngine(engine, perturbed, sharded, config, seed)
