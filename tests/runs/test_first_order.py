"""AdamW under ZeRO-3: as torch's own on a plain model, and in runs that are stopped, killed and
exported."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import signal

import pytest
import torch
from commands import assert_one_error, run_forked, run_forked_well, wait_until
from faults import run_faulty
from ranks import run_ranks
from run_ends import digest_after, results_of
from thorough import thorough
from tiny_runs import DS_CONFIG, SEED, TINY_OPT, make_batch, write_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, TrainerCallback

from lezo_ds.checkpoints.snapshots import read_manifest, snapshot_steps
from lezo_ds.config import config_from_dict
from lezo_ds.config.deepspeed import load_ds_config
from lezo_ds.data.objectives import classification_loss
from lezo_ds.errors import DivergenceError
from lezo_ds.forward.batch import StepBatch
from lezo_ds.runs.first_order import FirstOrderTrainer, initialize_first_order
from lezo_ds.zo.keys import dropout_key

pytestmark = pytest.mark.distributed

NUM_STEPS = 4
RATE = 1e-3


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    config = copy.deepcopy(TINY_OPT)
    config.dropout = config.attention_dropout = 0.3
    return str(write_model(config, tmp_path_factory.mktemp("opt")))


def gathered(engine):
    return {parameter.name: parameter.gather() for parameter in engine.weights.shards}


class Follower(TrainerCallback):
    """Notes the learning rate and the loss of each step, and writes a checkpoint after the second
    one."""

    def __init__(self, engine):
        self.engine, self.steps = engine, []

    def on_train_begin(self, *_, **__):
        self.engine.start(self.trainer.model_wrapped)

    def on_step_end(self, arguments, state, *_, **__):
        self.steps.append((self.trainer.rate, self.trainer.mean_loss))
        if state.global_step == 2:
            self.trainer.save_checkpoint()


def train(config, engine, root, checkpoint=None, loss=classification_loss):
    """Return (learning rate, loss) of each step."""

    def batches(step):
        return StepBatch.of(make_batch(step))

    follower = Follower(engine)
    follower.trainer = FirstOrderTrainer(config, engine, batches, loss, follower, root)
    follower.trainer.train(resume_from_checkpoint=checkpoint)
    return follower.steps


def train_and_resume(directory, root, num_ranks):
    """Return steps and weights, those after a resumption, and whether a failed step changed no
    weight."""
    torch.set_num_threads(1)
    values = {
        "run_dir": "none",
        "seed": SEED,
        "method": "adamw",
        "model": {"path": directory, "dtype": "fp32"},
        "adamw": {"learning_rate": RATE, "weight_decay": 0.1},
        "train": {"steps": NUM_STEPS, "batch_size": 8, "micro_batch_size": 2},
    }
    config = config_from_dict(values, "the test")
    ds_config = load_ds_config(DS_CONFIG, "fp32", num_ranks, 2)
    engine, fresh, broken = (initialize_first_order(config, ds_config) for _ in range(3))
    steps = train(config, engine, root)
    (batch,) = make_batch(0, num_micro_batches=1)
    assert torch.equal(engine.forward(batch), engine.forward(batch)), "dropout acts in evaluations"
    resumed = [*steps[:2], *train(config, fresh, root, str(root / "checkpoint-2"))]
    before = gathered(broken)
    with pytest.raises(DivergenceError, match="loss of step 0 is not finite"):
        train(config, broken, root, loss=lambda logits, _: logits[:, 0] * math.nan)
    same = all(torch.equal(before[name], weight) for name, weight in gathered(broken).items())
    return steps, gathered(engine), resumed, gathered(fresh), same


def train_plainly(directory):
    """Return (learning rate, loss) of each step, and the weights: transformers and torch alone."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    steps, norms = [], []
    for step in range(NUM_STEPS):
        optimizer.param_groups[0]["lr"] = RATE * (NUM_STEPS - step) / NUM_STEPS
        losses = []
        for index, batch in enumerate(make_batch(step)):
            with torch.random.fork_rng([]):
                torch.manual_seed(dropout_key(SEED, step, index))
                logits = model(**batch.inputs).logits
            wanted = logits[batch.selection.rows, batch.selection.positions][
                :, batch.selection.vocabulary
            ]
            losses.append(F.cross_entropy(wanted, batch.labels["label"]) / 4)
        optimizer.zero_grad()
        sum(losses).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        steps.append((optimizer.param_groups[0]["lr"], sum(losses).item()))
    assert max(norms) > 2.0, "nothing was clipped"
    return steps, {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_steps_are_those_of_torchs_adamw_and_go_on_bit_for_bit_after_a_resumption(
    directory, tmp_path
):
    expected, weights = train_plainly(directory)
    first = dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())
    outcomes = run_ranks(train_and_resume, 2, directory, tmp_path, 2)
    for steps, own, resumed, own_resumed, same in outcomes:
        for (rate, loss), (expected_rate, expected_loss) in zip(steps, expected, strict=True):
            assert rate == pytest.approx(expected_rate, rel=1e-12)
            assert loss == pytest.approx(expected_loss, rel=1e-4)
        assert own.keys() == weights.keys()
        # Adam divides a gradient by its own size; that of a key's bias is nothing but rounding
        # noise.
        for name in [name for name in own if not name.endswith("k_proj.bias")]:
            moved = (weights[name] - first[name]).abs().mean()
            assert moved > 1e-4, name
            assert (own[name] - weights[name]).abs().mean() < 0.05 * moved, name
        assert resumed == steps
        assert all(torch.equal(own[name], own_resumed[name]) for name in own)
        assert same, "a step whose loss is not finite changed a weight"


# Runs.

STEPS = 9
KEYS = ["method=adamw", "adamw.learning_rate=1e-3", f"train.steps={STEPS}", "train.eval_every=3"]
KEPT = ("zero_shot", "test", "best_step", "best_dev_loss", "steps", "finished", "weights_digest")


def arguments(recipe, run_dir, *more):
    return ["--config", recipe, f"run_dir={run_dir}", *KEYS, "train.keep_snapshots=1", *more]


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    run_forked_well(arguments(recipe, run_dir, "train.report_to=[csv]"), num_ranks=2)
    return run_dir


def steps_logged(run_dir):
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if "learning_rate" in line]


def test_monitors_get_every_step(undisturbed):
    (path,) = (undisturbed / "monitors").rglob("train_loss.csv")
    _, *rows = path.read_text().splitlines()
    assert [int(row.split(",")[0]) for row in rows] == list(range(1, STEPS + 1))


@pytest.mark.thorough
def test_a_run_stopped_then_killed_ends_as_if_nothing_had_happened(recipe, undisturbed, tmp_path):
    run_dir = tmp_path / "run"
    command = arguments(recipe, run_dir)

    def stop(ranks):
        wait_until(lambda: steps_logged(run_dir), ranks[0])
        os.kill(ranks[0].pid, signal.SIGTERM)

    run_forked_well(command, num_ranks=2, meanwhile=stop)
    stopped = json.loads((run_dir / "training_state.json").read_text())["step"]
    assert not results_of(run_dir)["finished"]
    assert 1 <= stopped == results_of(run_dir)["steps"] < STEPS

    def kill(ranks):
        wait_until(lambda: len(steps_logged(run_dir)) > stopped, ranks[0])
        for rank in ranks:
            rank.kill()

    assert run_forked(command, num_ranks=2, meanwhile=kill).code == -signal.SIGKILL
    for _ in range(2):  # the same command on a finished run changes nothing
        run_forked_well(command, num_ranks=2)
        ended, expected = results_of(run_dir), results_of(undisturbed)
        assert {name: ended[name] for name in KEPT} == {name: expected[name] for name in KEPT}
        assert steps_logged(run_dir) == list(range(1, STEPS + 1))
    assert digest_after(run_dir, STEPS) == digest_after(undisturbed, STEPS)
    assert set(snapshot_steps(run_dir / "snapshots")) == {ended["best_step"], STEPS}


def test_all_files_of_a_checkpoint_are_on_the_disk_before_the_state_names_it(recipe, tmp_path):
    run_dir = tmp_path / "run"
    log = tmp_path / "operations"
    finished = run_faulty(arguments(recipe, run_dir, "train.steps=3"), num_ranks=2, log=log)
    assert finished.code == 0, finished.err[-5000:]
    operations = log.read_text().splitlines()
    last_named = len(operations) - operations[::-1].index("replace training_state.json")
    synced = {line for line in operations[:last_named] if line.startswith("fsync ")}
    checkpoint = run_dir / "checkpoints" / "checkpoint-3"
    files = list(checkpoint.rglob("*"))
    assert len([path for path in files if path.suffix == ".pt"]) == 5  # weights, moments, schedule
    for path in (*files, checkpoint, checkpoint.parent):
        assert f"fsync {path.relative_to(run_dir)}" in synced


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        ("missing", "model"),
        ("cut short", "optim"),
        thorough("missing", "optim"),
        thorough("cut short", "model"),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_refused_in_one_line(
    kind, damage, recipe, undisturbed, tmp_path
):
    run_dir = shutil.copytree(undisturbed, tmp_path / "run")
    (path,) = (run_dir / "checkpoints").rglob(f"*rank_0_*_{kind}_states.pt")
    if damage == "missing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size // 2)
    finished = run_forked(arguments(recipe, run_dir), num_ranks=2)
    # The other rank may add that this one has ended.
    error = next(line for line in finished.err.splitlines() if line.startswith("error: "))
    assert finished.code == 2 and "Traceback" not in finished.err
    assert f"the checkpoint {path.parents[1]} cannot be loaded: " in error
    assert "fix: restore it from a copy" in error
    assert (run_dir / "training_state.json").read_bytes() == (
        undisturbed / "training_state.json"
    ).read_bytes()


def test_the_best_step_is_exported_and_scored_and_other_ranks_are_refused(
    recipe, undisturbed, tmp_path
):
    assert_one_error(run_forked(arguments(recipe, undisturbed)), 2, "has 2 ranks, not 1")
    results = results_of(undisturbed)
    shutil.rmtree(undisturbed / "checkpoints")  # pickles, which neither command opens
    run_forked_well(["--run", undisturbed, "--out", tmp_path / "model"], program="export")
    assert read_manifest(tmp_path / "model")["digest"] == results["weights_digest"]
    of_run = json.loads(run_forked_well(["--run", undisturbed, "--json"], program="evaluate").out)
    assert (of_run["step"], of_run["score"]) == (results["best_step"], results["test"])
