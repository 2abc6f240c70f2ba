"""An engine that trains: it decides the steps of LeZO, and does them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from lezo_ds import distributed
from lezo_ds.config import (
    ZoConfig,
    make_estimator,
    make_layer_policy,
    make_schedule,
    probes_per_pass,
)
from lezo_ds.engine.model import Parts
from lezo_ds.engine.replay import ReplayEngine
from lezo_ds.errors import DivergenceError, UserError
from lezo_ds.forward.batch import LossFunction, MicroBatch, StepBatch
from lezo_ds.forward.probes import Perturbation
from lezo_ds.user_code import call_of_user
from lezo_ds.zo.estimators import Probe
from lezo_ds.zo.keys import direction_keys, step_key
from lezo_ds.zo.layers import LayerSample
from lezo_ds.zo.passes import Groups, KeyedProbe
from lezo_ds.zo.records import StepPlan, StepRecord
from lezo_ds.zo.step import PlanFormat, Step

FAR_FROM_THETA = 0.1
"""A scale at which a model's output is another one, and yet finite in 16 bits."""
MAX_SKIPPED_STEPS = 10
"""Number of steps in a row that may be skipped before the run ends."""


class LezoEngine(ReplayEngine):
    """A sharded model and its zeroth-order optimizer.

    Attributes:
        config: settings of the optimizer.
        seed: of the run.
        learning_rates, estimator, layer_policy: made from the config.
        plan_format: bytes of the plan that rank 0 broadcasts at each step.
        resources: what is open as long as the engine, such as the journal of a loop of one's own.
    """

    def __init__(
        self, parts: Parts, config: ZoConfig, seed: int, num_steps: int | None = None
    ) -> None:
        super().__init__(parts, config)
        self.seed = seed
        self.config = config
        self.learning_rates = make_schedule(config, num_steps)
        self.estimator = make_estimator(config)
        num_blocks = self.layout.num_blocks
        trained = (shard for shard in self.weights.shards if shard.is_trained)
        trains_outside = any(shard.block >= num_blocks for shard in trained)
        self.layer_policy = make_layer_policy(config, num_blocks, trains_outside=trains_outside)
        self.plan_format = PlanFormat(
            num_groups=self.layer_policy.num_groups,
            num_probes=self.estimator.num_probes,
            has_weights=self.layer_policy.has_weights,
        )
        self._num_steps = num_steps
        self._probes_per_pass = probes_per_pass(config)
        self._settings_agreed = False
        self.resources = ExitStack()

    @torch.no_grad()
    def run_at_theta(self, micro_batch: MicroBatch) -> Tensor:
        """Return the output at a probe of scale 0, with the layers and groups of the next step.

        If a pass of a step has several probes, it is that of the last of two. The first is far from
        theta, so that a row that meets the wrong probe shows.
        """
        num_examples = micro_batch.num_examples
        size = min(self.config.examples_per_direction or num_examples, num_examples)
        groups = Groups.of(1, num_examples, size)
        key = step_key(self.seed, self.global_steps)
        keys = direction_keys(key, groups.number)
        scales = (FAR_FROM_THETA, 0.0)[-self._probes_per_pass :]
        probes = tuple(KeyedProbe(keys, scale) for scale in scales)
        dropped = frozenset(self._sample().dropped)
        return self.run(micro_batch, Perturbation(probes, dropped))[-1]

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
        claims = self._claims(step)
        losses = self._measure(step, batch, loss_function)
        sums = self.sum_losses(losses, batch, claims)
        record = call_of_user(self._named("estimator"), step.estimate, sums)
        self._write_ahead(record)
        self.apply(record.step + 1)
        self._end_if_diverged()
        return record

    def plan_step(self, batch: StepBatch) -> Step:
        """Return the next step, which rank 0 plans for all ranks. A collective."""
        size = self.config.examples_per_direction
        groups = Groups.of(len(batch), batch.num_examples, size)
        if not self._settings_agreed:
            call_of_user(self._named("estimator"), self.estimator.check_groups, groups.number)
            self._agree_on_settings(len(batch))
        message = b""
        if self.global_rank == 0:
            probes = call_of_user(self._named("estimator"), self._probes)
            message = self.plan_format.pack(self._decide(), probes)
        message = distributed.broadcast_bytes(message, self.plan_format.num_bytes)
        plan, probes = self.plan_format.unpack(message)
        return Step(
            plan,
            probes,
            self.estimator,
            groups,
            self._probes_per_pass,
            batch.total_weight,
            batch.may_lack_losses,
        )

    def _probes(self) -> tuple[Probe, ...]:
        probes = self.estimator.checked_probes(self.records)
        if len(probes) != self.plan_format.num_probes:
            raise UserError(
                f"{type(self.estimator).__name__} has {len(probes)} probes at step "
                f"{self.global_steps} and {self.plan_format.num_probes} at step 0",
                fix="return equally many from Estimator.probes for any records",
            )
        return probes

    def _decide(self) -> StepPlan:
        """Return the plan of the next step, a function of the run's seed and its records so far."""
        layers = self._sample()
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
        return call_of_user(self._named("lr_schedule"), self.learning_rates.at, self.global_steps)

    def _sample(self) -> LayerSample:
        policy = self.layer_policy
        return call_of_user(
            self._named("layer_policy"), policy.checked_sample, self.seed, self.records
        )

    def _named(self, key: str) -> str:
        """Return a key of zo and its value, as an error of the component that it names says."""
        return f"zo.{key}={getattr(self.config, key)}"

    def _measure(self, step: Step, batch: StepBatch, loss_function: LossFunction) -> Tensor:
        """Run this rank's passes; return their losses, and 0 for those of other ranks' passes.

        So the sum over all ranks, float64 [num_losses], has every loss.
        """
        losses = torch.zeros(step.num_losses, dtype=torch.float64, device=self.device)
        dropped = frozenset(step.plan.dropped_layers)
        for forward_pass in self.workers.passes_of(self.worker, step.passes):
            micro_batch = batch[forward_pass.micro_batch]
            perturbation = Perturbation(forward_pass.probes, dropped)
            step.add(losses, forward_pass, self.losses_at(micro_batch, perturbation, loss_function))
        return losses

    def _claims(self, step: Step) -> dict[str, str]:
        """Return what this rank works on. Ranks of the same step have the same claims."""
        return {
            "step": str(self.global_steps),
            "seed": str(self.seed),
            "plan": repr((step.plan, step.probes)),
            **self._last_result(),
        }

    def _write_ahead(self, record: StepRecord) -> None:
        """Append a record to the run's records, and to the journal if this rank has it.

        The journal comes first, as in any write-ahead log. Weights in memory are gone after a power
        cut, so they need not wait for the disk: only what is on a disk must never be ahead of the
        journal.
        """
        if self.journal is not None:
            self.journal.append(record, wait=False)
        self.records.append(record)

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
        claims = {f"zo.{key}": repr(value) for key, value in self.config.model_dump().items()}
        claims["train.steps"] = repr(self._num_steps)
        claims["number of micro-batches"] = str(num_micro_batches)
        claims |= self._last_result()
        self._sum_agreed(torch.empty(0, dtype=torch.float64, device=self.device), claims)
        self._settings_agreed = True
