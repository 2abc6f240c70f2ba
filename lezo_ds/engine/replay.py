"""An engine that does recorded steps again. It decides nothing.

So a replay needs neither an estimator nor a layer policy, which may be code of a user, and which
`training` adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from lezo_ds import agreement, distributed
from lezo_ds.checkpoints.snapshots import SnapshotOwner, newest_snapshot, read_facts, snapshot_path
from lezo_ds.config import ZoConfig
from lezo_ds.engine.model import LAST_RESULT, ModelEngine, Parts
from lezo_ds.errors import UserError
from lezo_ds.sharding.weights import Witness
from lezo_ds.zo.records import StepRecord
from lezo_ds.zo.updates import StepUpdate, step_updates


class ReplayEngine(ModelEngine):
    """A sharded model and the recorded steps that made its weights.

    Attributes:
        records: of all steps so far, from step 0.
        directions: what the run does with random directions, by their law; None if there are no
            steps.
    """

    def __init__(self, parts: Parts, zo: ZoConfig) -> None:
        super().__init__(parts)
        self.directions = self._perturbed.directions
        self.records: list[StepRecord] = []
        self._weight_decay = zo.weight_decay
        self._witness: Witness | None = None
        self._num_checked = 0  # steps after which the weights were checked last

    def apply(self, stop: int) -> None:
        """Update this rank's shards by the records of all steps before step `stop`."""
        self.weights.apply(self._updates(self.global_steps, stop), self.directions)
        self.global_steps = stop

    def _updates(self, start: int, stop: int) -> list[StepUpdate]:
        return step_updates(self.records, start, stop, self._weight_decay)

    def _last_result(self) -> dict[str, str]:
        """Return the result of the last step, with every bit of its projected gradients."""
        return {LAST_RESULT: repr(self.records[-1] if self.records else None)}

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
            UserError: `steps` has fewer than `step` records or is not in order, or a snapshot is of
                another base model.
            LezoError: a snapshot's weights do not have the digest in its manifest.
        """
        records: tuple[StepRecord, ...] = distributed.broadcast_object(tuple(steps))
        target = len(records) if step is None else step
        if not 0 <= target <= len(records):
            raise UserError(f"step {target} is not in the journal, which has 0 to {len(records)}")
        if [getattr(record, "step", None) for record in records] != list(range(len(records))):
            raise UserError(
                "the records are not the steps 0, 1, 2, ... of a run",
                fix="pass all steps of one journal, in order",
            )
        self._load_nearest(Path(load_dir), records[:target], owner)
        self.records = list(records[:target])
        self.apply(target)
        if self._witness is not None:
            self.watch_weights()

    def _newest(self, root: Path, target: int, owner: SnapshotOwner | None) -> int | None:
        """Return the step of the newest snapshot up to `target`. UserError: it has another base."""
        found = newest_snapshot(root, target, owner)
        if found is not None:
            directory = snapshot_path(root, found)
            base = (read_facts(directory) or {}).get("base")
            if base != self.base.fingerprint:
                raise UserError(
                    f"{directory} is of another base model: its fingerprint is {base}, and this "
                    f"one's {self.base.fingerprint}",
                    fix="open the base model that it was trained on",
                )
        return found

    def _load_nearest(
        self, root: Path, records: Sequence[StepRecord], owner: SnapshotOwner | None
    ) -> None:
        """Load the newest weights from which `records` lead to the target, unless they are here."""
        target = len(records)
        snapshot = distributed.on_rank_zero(lambda: self._newest(root, target, owner))
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
