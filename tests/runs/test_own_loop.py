"""A user-written training loop resumes from its journal after a kill, and `export` takes it."""

import os
import signal

import pytest
from commands import assert_refused, lezo
from ranks import run_ranks
from tiny_adapters import peft_config
from tiny_runs import TINY_OPT, start_engine, train, write_model

from lezo_ds.checkpoints.snapshots import read_manifest
from lezo_ds.errors import UserError
from lezo_ds.journal import read_journal

pytestmark = pytest.mark.distributed

STEPS = 6


def loop(model, run_dir, kind, stop=STEPS):
    """Train up to a step, and return the first step and the digest; or die like a kill at it."""
    peft = None if kind == "none" else peft_config(kind)
    engine = start_engine(model, num_ranks=2, peft=peft, run_dir=run_dir)
    first = engine.global_steps
    for step in range(first, stop):
        train(engine, 1)
        if step == 1:
            engine.save_checkpoint(run_dir / "snapshots")
    if stop < STEPS:
        os.kill(os.getpid(), signal.SIGKILL)
    return first, engine.weights.digest()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(TINY_OPT, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("kind", ["none", "lora", "prefix"])
def test_a_killed_loop_resumes_and_both_are_exported(model, tmp_path, kind):
    whole, killed, out, again = (tmp_path / name for name in ("whole", "killed", "out", "again"))
    ((_, digest), _) = run_ranks(loop, 2, model, whole, kind)
    with pytest.raises(AssertionError, match="died without an answer"):
        run_ranks(loop, 2, model, killed, kind, 4)
    assert run_ranks(loop, 2, model, killed, kind) == [(4, digest)] * 2
    assert read_journal(whole / "journal.jsonl") == read_journal(killed / "journal.jsonl")
    lezo("export", "--run", killed, "--step", "last", "--out", out)
    assert read_manifest(out)["digest"] == digest
    if kind == "prefix":  # its start is not in the journal
        return
    file = tmp_path / "loop.lezo"
    lezo("export", "--run", killed, "--journal", file)
    base = f"model.path={model}"
    lezo("export", "--journal", file, "--step", "last", "--out", again, base)
    assert read_manifest(again)["digest"] == digest


def test_a_directory_holds_one_loop_and_names_no_task(model, tmp_path):
    engine = start_engine(model, run_dir=tmp_path / "run")
    train(engine, 2)
    saved = engine.save_checkpoint(tmp_path / "run" / "snapshots")
    assert read_manifest(saved)["journal"] == engine.journal.last_checksum  # so it is of this loop
    with pytest.raises(UserError, match=r"run_dir .* is in use by process"):
        start_engine(model, run_dir=tmp_path / "run")
    engine.resources.close()
    with pytest.raises(UserError, match=r"zo.learning_rate differs from the journal's: it is 0.1"):
        start_engine(model, run_dir=tmp_path / "run", learning_rate=0.1)
    words = ["--run", tmp_path / "run", "--step", "last"]
    assert_refused("evaluate", words, "data.task=own-loop is not a registered task")
