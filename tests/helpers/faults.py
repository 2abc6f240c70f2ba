"""Runs with faults: killed inside a file operation, or refused by the disk."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from commands import run_forked
from faulty_train import VARIABLE
from run_ends import num_steps

from lezo_ds.checkpoints.snapshots import read_manifest, snapshot_path, snapshot_steps

FAULTY_TRAIN = Path(__file__).with_name("faulty_train.py")


@dataclass(frozen=True)
class Fault:
    """What goes wrong on rank 0, at the `number`-th matching operation on the run's directory."""

    operation: str = ".*"  # its name, or save (a safetensors file)
    path: str = ".*"  # within the run's directory; of a rename the new one
    number: int = 1
    moment: str = "before"  # or after, or within: half of what is written stays
    effect: str = "kill"  # or the name of an errno
    lasts: bool = False  # whether all later operations fail, too


def run_faulty(arguments, fault=Fault(number=0), log=None, **options):
    """Run launch/train.py with a fault. `log` gets the operations on the run's directory."""
    (key,) = (word for word in map(str, arguments) if word.startswith("run_dir="))
    told = {**asdict(fault), "root": key.removeprefix("run_dir="), "log": log and str(log)}
    return run_forked(arguments, FAULTY_TRAIN, **options, **{VARIABLE: json.dumps(told)})


def check_interrupted(run_dir, undisturbed):
    """Check that a killed run left what the undisturbed one had at that moment.

    The last line of its journal may be torn, and no step that metrics.jsonl calls done is lost.
    """
    path = run_dir / "journal.jsonl"
    if path.exists():
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        assert undisturbed.journal.startswith(whole)
        assert undisturbed.journal[len(whole) :].startswith(data[len(whole) :])
    # An older one may have been in removal.
    for step in snapshot_steps(run_dir / "snapshots")[-1:]:
        assert read_manifest(snapshot_path(run_dir / "snapshots", step)) is not None
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    reported = [json.loads(line)["step"] for line in lines if line.endswith("\n")]
    assert max(reported, default=0) <= num_steps(run_dir)
