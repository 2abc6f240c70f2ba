"""A sharded model in DeepSpeed's engine: forward passes, votes of ranks, and directories of it."""

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
from lezo_ds.checkpoints.snapshots import Card, load_snapshot, snapshot_path, write_snapshot
from lezo_ds.config import (
    RunConfig,
    ZoConfig,
    check_partition,
    make_law,
    trained_part,
)
from lezo_ds.config.deepspeed import offloads_weights, tensor_parallel_size
from lezo_ds.data.generation import generate
from lezo_ds.distributed.workers import Ranks, Workers
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import LossFunction, MicroBatch, StepBatch, to_device
from lezo_ds.forward.directions import directions_of
from lezo_ds.forward.perturbed_forward import PerturbedForward
from lezo_ds.forward.probes import AT_THETA, Perturbation, TrainedParameter
from lezo_ds.journal import Journal
from lezo_ds.noise import kernels_of
from lezo_ds.sharding.weights import WeightChanges

LAST_RESULT = "result of the step before"
"""The name of a claim about the step before, after which weights may differ already."""

Parts = tuple[PerturbedForward, ShardedModel]
"""What makes an engine: the forward pass, and the model with its shards and DeepSpeed's engine."""


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

    def __init__(self, parts: Parts) -> None:
        self._perturbed, self.sharded = parts
        self.module = self.sharded.module
        self.weights = self.sharded.weights
        self.layout = self.sharded.layout
        self.base = self.sharded.base
        self.global_steps = 0
        self.stop_requested = False
        self.stop_agreed = False
        self.workers: Workers = Ranks(self.num_workers)
        self.journal: Journal | None = None

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
    def num_workers(self) -> int:
        """Number of workers of this launch: ranks that split each weight are one worker."""
        return self.world_size // self.tensor_parallel

    @property
    def worker(self) -> int:
        """Index of the worker that this process belongs to, among those of this launch."""
        return self.global_rank // self.tensor_parallel

    @property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        return distributed.device()

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
        (outputs,) = self.run(to_device(micro_batch, self.device), AT_THETA)
        return outputs

    def run(self, micro_batch: MicroBatch, perturbation: Perturbation) -> tuple[Tensor, ...]:
        """Run one forward pass, or write answers, with inputs that are on the device. A collective.

        Returns:
            The output at each probe of the perturbation, or one output at the weights themselves:
            logits, or new tokens if the micro-batch has `prompts`.
        """
        call: Callable[..., Any] = self.sharded.engine
        if micro_batch.prompts is not None:
            call = partial(generate, self.module, micro_batch)
        return self._perturbed(micro_batch, perturbation, call)

    def losses_at(
        self, batch: MicroBatch, perturbation: Perturbation, loss_function: LossFunction
    ) -> list[Tensor]:
        """Return the summed loss of each example of a micro-batch at each probe. A collective.

        Args:
            batch: on any device.
            perturbation: the probes, or `AT_THETA`.
            loss_function: (logits or generated tokens, micro-batch) -> losses, [examples].
        """
        batch = to_device(batch, self.device)
        losses = [loss_function(output, batch) for output in self.run(batch, perturbation)]
        for of_probe in losses:
            check_losses(of_probe, batch)
        return losses

    def run_at_theta(self, micro_batch: MicroBatch) -> Tensor:
        """Return the outputs of a training pass for a micro-batch at theta. A collective."""
        return self.forward(micro_batch)

    @torch.no_grad()
    def forward_alone(self, ids: Sequence[int]) -> Tensor:
        """Return the logits of one sequence at the weights themselves. A collective.

        This is a plain call of the model, in which all modules run by their own forward methods.

        Args:
            ids: token ids.

        Returns:
            [len(ids), vocabulary], in the dtype of the model.
        """
        input_ids = torch.tensor([list(ids)], device=self.device)
        logits: Tensor = self.sharded.engine(input_ids=input_ids).logits
        return logits[0]

    def save_checkpoint(self, save_dir: str | Path) -> Path:
        """Write the model as a Hugging Face directory, and return it. A collective.

        The directory is `save_dir/step-NNNNNNNN`, with the number of steps so far. If the journal
        has these steps, the directory is a snapshot of this run and of no other one.
        """
        target = snapshot_path(Path(save_dir), self.global_steps)
        checksum = None
        if self.journal is not None:
            checksum = self.journal.step_checksums[self.global_steps]
        self.write_model(target, journal=checksum)
        return target

    def write_model(
        self,
        target: Path,
        *,
        card: Card | None = None,
        texts: Mapping[str, str] | None = None,
        merge: bool = False,
        changes: WeightChanges | None = None,
        **claims: Any,
    ) -> None:
        """Write the model, or its adapter, to a directory (`write_snapshot`). A collective.

        The records of its steps are on the disk before.
        """
        self.finish_records()
        facts = {"step": self.global_steps, **claims}
        write_snapshot(
            self.sharded, target, facts, card=card, texts=texts, merge=merge, changes=changes
        )

    def finish_records(self) -> None:
        """Wait until the records of all steps are on the disk, or raise JournalError."""
        if self.journal is not None:
            self.journal.sync()

    def load_model(self, snapshot: Path | None, step: int) -> None:
        """Load a snapshot's weights (None: the initial ones), after `step` steps. A collective."""
        if snapshot is None:
            self.sharded.load_initial()
        else:
            load_snapshot(self.sharded, snapshot)
        self.global_steps = step

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
            if len({claims_of_rank.get(LAST_RESULT) for claims_of_rank in by_rank}) > 1:
                # The ranks had different results in the last step, so they did different updates.
                num_good -= 1
            self._cut_journal(num_good)
            raise agreement.disagreement(step_of_first, by_rank, num_good)
        return sums[: len(values)]

    def _cut_journal(self, num_good: int) -> None:
        if self.journal is not None:
            self.journal.cut(num_good)


def check_losses(losses: Any, micro_batch: MicroBatch) -> None:
    """Raise UserError unless `losses` is a tensor with one entry per example, and not their mean.

    Its sum would be another number than that which the weight of the micro-batch divides.
    """
    number = micro_batch.num_examples
    shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    if shape != (number,):
        raise UserError(
            f"the loss function returned {shape}, not one loss for each of {number} examples",
            fix="return a tensor with their losses, or name the examples in MicroBatch.examples",
        )


def load_parts(config: RunConfig, ds_config: Mapping[str, Any], zo: ZoConfig | None) -> Parts:
    """Load a model sharded over all ranks, and return what an engine is made of. A collective.

    Each rank reads only its own slices of the weights. No rank ever holds the whole model.

    Args:
        config: of a run, or of a model.
        ds_config: DeepSpeed's JSON, completed.
        zo: of training, of which the law of directions, the trained part of the weights and the
            precision of updates count. None perturbs and updates no weight.
    """
    distributed.init_distributed()
    check_partition(config.partition_size, distributed.world_size())
    directions = None
    if zo is not None:
        directions = directions_of(make_law(zo))
        # Refused before weights are loaded. Offloaded shards are updated on the CPU.
        kernels_of(distributed.device())
        if offloads_weights(ds_config):
            kernels_of(torch.device("cpu"))
    sharded = load_sharded_model(config, ds_config, zo)
    if zo is None:
        return PerturbedForward(sharded.module, ()), sharded
    blocks = list(sharded.module.get_submodule(sharded.layout.path).children())
    trainable = [
        TrainedParameter(shard.parameter, shard.block, shard.computed)
        for shard in sharded.weights.shards
        if shard.is_trained
    ]
    perturbed = PerturbedForward(
        sharded.module,
        trainable,
        blocks,
        directions=directions,
        shares_start=trained_part(zo) != "all",
    )
    return perturbed, sharded
