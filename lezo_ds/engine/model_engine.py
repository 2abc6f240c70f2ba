"""The part of the engines that scoring needs and that both ways of training share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from lezo_ds import distributed
from lezo_ds.data.generation import runner
from lezo_ds.engine.agreement import (
    BATCH,
    Facts,
    all_agree,
    batch_digest,
    batch_facts,
    disagreement,
    fact_numbers,
    share_number,
    watched_rank,
)
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import MicroBatch, to_device
from lezo_ds.forward.perturbed_forward import Perturbation, PerturbedForward
from lezo_ds.forward.step_batch import StepBatch
from lezo_ds.model.sharded_model import ShardedModel
from lezo_ds.model.snapshots import snapshot_path
from lezo_ds.sharding import zero3


class ModelEngine:
    """A sharded model in DeepSpeed's engine.

    Attributes:
        module: the model with sharded parameters.
        weights: this rank's shards.
        layout: position of the transformer blocks in the model.
        base: origin of the weights.
        global_steps: number of steps since the base weights, including skipped ones.
        stop_agreed: whether the votes of the last step asked for a stop. It is the same on all ranks.
        snapshot_agreed: whether the votes of the last step asked for a snapshot. It is the same on all ranks.
    """

    def __init__(
        self,
        deepspeed_engine: Any,  # noqa: ANN401
        perturbed: PerturbedForward,
        sharded: ShardedModel,
    ) -> None:
        self._sharded = sharded
        self.module = sharded.module
        self.weights = sharded.weights
        self.layout = sharded.layout
        self.base = sharded.base
        self.global_steps = 0
        self.stop_agreed = False
        self.snapshot_agreed = False
        self._deepspeed = deepspeed_engine
        self._perturbed = perturbed
        self._stop_requested = False
        self._snapshot_requested = False

    @property
    def global_rank(self) -> int:
        """Index of this process among all processes."""
        return distributed.rank()

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return distributed.world_size()

    @property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        return distributed.device()

    @property
    def monitor(self) -> Any:  # noqa: ANN401
        """DeepSpeed's monitor, which writes to TensorBoard, W&B or CSV as the DeepSpeed config says."""
        return self._deepspeed.monitor

    def request_stop(self) -> None:
        """Ask all ranks to stop: after the next step, `stop_agreed` is true on every rank.

        A signal handler may call this, because it only sets a flag.
        """
        self._stop_requested = True

    def request_snapshot(self) -> None:
        """Ask all ranks for one snapshot: after the next step, `snapshot_agreed` is true on every rank."""
        self._snapshot_requested = True

    def agree_on_stop(self) -> bool:
        """Return whether any rank has asked for a stop. A collective for use between steps."""
        vote = torch.tensor([float(self._stop_requested)], dtype=torch.float64, device=self.device)
        self.stop_agreed = distributed.sum_vector(vote)[0] > 0
        return self.stop_agreed

    @torch.no_grad()
    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Return the logits or the generated tokens of a micro-batch at the current weights. A collective."""
        (outputs,) = self._run(to_device(micro_batch, self.device), None)
        return outputs

    __call__ = forward

    def save_checkpoint(
        self, save_dir: str | Path, step: int | None = None, journal: str | None = None
    ) -> Path:
        """Write the model as a Hugging Face directory `save_dir/step-NNNNNNNN`. A collective.

        Args:
            save_dir: folder of snapshots.
            step: number in the directory's name; by default that of the steps so far.
            journal: on rank 0, checksum of the run's records after this step (see `SnapshotOwner`).
        """
        step = self.global_steps if step is None else step
        target = snapshot_path(Path(save_dir), step)
        self.write_model(target, journal=journal)
        return target

    def write_model(self, target: Path, card: str = "", journal: str | None = None) -> None:
        """Write the model, or its adapter, to the directory `target` (see `write_snapshot`). A collective."""
        self._sharded.write(target, self.global_steps, card, journal)

    def load_model(self, snapshot: Path | None, step: int) -> None:
        """Load the weights of a snapshot, or the initial weights if it is None. A collective.

        Args:
            snapshot: directory of the snapshot.
            step: number of steps that these weights have seen.
        """
        if snapshot is None:
            self._sharded.load_initial()
        else:
            self._sharded.load_snapshot(snapshot)
        self.global_steps = step

    def _my_share(self, num_passes: int) -> range:
        """Return the indices of the forward passes of a step that this rank runs. See `_share_of`."""
        return self._share_of(self.global_rank, num_passes)

    def _share_of(self, rank: int, num_passes: int) -> range:
        """Return the indices of the forward passes of a step that a rank runs.

        Raises:
            UserError: the number of passes is not a multiple of the number of ranks.
        """
        if num_passes % self.world_size:
            raise UserError(
                "the forward passes of a step cannot be shared evenly",
                got=f"{num_passes} forward passes on {self.world_size} ranks",
                expected="a multiple of the number of ranks",
                fix="change train.micro_batch_size or the number of ranks",
            )
        return range(rank, num_passes, self.world_size)

    def _run(self, micro_batch: MicroBatch, perturbation: Perturbation | None) -> tuple[Tensor, ...]:
        outputs = self._perturbed(micro_batch, perturbation, runner(micro_batch, self._deepspeed))
        zero3.assert_released(self.weights.parameters)
        return outputs

    def _sum_losses(
        self,
        losses: Tensor,
        facts: Facts,
        batch: StepBatch,
        share_of: Callable[[int], Iterable[int]],
    ) -> list[float]:
        """Return the sums of float64 [n] over all ranks, and collect the votes. See `_sum_agreed`.

        Args:
            losses: this rank's losses, 0 for those of other ranks.
            facts: what this rank works on, besides the batch.
            batch: of the step.
            share_of: function (rank) -> indices of the micro-batches that it runs.

        The votes are part of the all-reduce that every step has anyway. All ranks thus learn of a request at
        the same step, without another message.
        """
        votes = losses.new_tensor([float(self._stop_requested), float(self._snapshot_requested)])
        self._snapshot_requested = False
        share = 0.0
        if self.world_size > 1:
            watched = watched_rank(self.global_rank, self.world_size, self.global_steps)
            share = share_number(batch, share_of(self.global_rank), share_of(watched))
        *sums, stop, snapshot = self._sum_agreed(
            torch.cat([losses, votes]),
            {**facts, **batch_facts(batch)},
            share=share,
            in_full=lambda: {**facts, BATCH: f"{batch_facts(batch)[BATCH]} {batch_digest(batch)}"},
        )
        self.stop_agreed, self.snapshot_agreed = stop > 0, snapshot > 0
        return sums

    def _sum_agreed(
        self,
        values: Tensor,
        facts: Facts,
        share: float = 0.0,
        in_full: Callable[[], Facts] | None = None,
    ) -> list[float]:
        """Return the sums of float64 [n] over all ranks, and check that all ranks work on the same thing.

        There is one all-reduce. A sum is exact if its element is 0 on all ranks but one, or a small whole
        number on each.

        Args:
            values: this rank's summands.
            facts: what this rank works on, and its result of the last step.
            share: `share_number` of this rank.
            in_full: function () -> the facts with all details. It is called if the ranks do not agree.

        Raises:
            DesyncError: the facts are not the same on all ranks. All ranks raise.
        """
        proof = values.new_tensor([share, *fact_numbers(facts)])
        found = distributed.sum_vector(torch.cat([values, proof]))
        difference, *numbers = found[len(values) :]
        if difference or not all_agree(numbers, self.world_size):
            theirs = facts if in_full is None else in_full()
            by_rank = distributed.gather_objects((self.global_steps, dict(theirs)))
            self._disagree(by_rank[0][0], [theirs for _, theirs in by_rank])
        return found[: len(values)]

    def _disagree(self, step: int, by_rank: Sequence[Facts]) -> NoReturn:
        """Raise the error for facts that are not the same on all ranks.

        Args:
            step: step of rank 0, which may differ from the step of this rank.
            by_rank: facts of every rank.
        """
        raise disagreement(step, by_rank, step)
