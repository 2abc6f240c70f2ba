"""docs/file-formats.md is enough to rebuild the weights of real runs: a program of NumPy alone does so."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import numpy_replay
import pytest
from assets import REPOSITORY
from commands import run_forked_well
from run_ends import results_of

PAGE = (REPOSITORY / "docs" / "file-formats.md").read_text()
PROGRAM = REPOSITORY / "tests" / "helpers" / "numpy_replay.py"
FIXTURE = REPOSITORY / "tests" / "fixtures" / "run-0.1.0"

LENGTH = ("train.steps=6", "train.eval_every=6")
SHORT = (*LENGTH, "zo.learning_rate=1e-2")
BF16 = (*SHORT, "model.dtype=bf16")
FP16 = (*SHORT, "model.dtype=fp16")
STOCHASTIC = "zo.update_precision=stochastic"
DECAY = ("zo.update_rule=sgd-weight-decay", "zo.update_rule_options.weight_decay=0.1")
MOMENTUM = ("zo.update_rule=sgd-momentum", "zo.update_rule_options.window=3")
ADAPTER = (*LENGTH, "zo.learning_rate=0.1", "model.dtype=bf16")
OUTLIERS = ("zo.outlier_factor=1.01", "train.steps=26", "train.eval_every=26", "train.batch_size=4")
RUNS = {
    # Steps far larger than the weights: then every bit of the noise shows.
    "fp32": (*LENGTH, "zo.learning_rate=100"),
    "bf16, stochastic, 2 directions": (*BF16, STOCHASTIC, "zo.directions=2", "seed=7"),
    "bf16, fp32_master": BF16,
    # After 20 steps, every second gradient or so is larger than the median, and its step is skipped.
    "one-sided, skipped steps": ("zo.estimator=one-sided", *OUTLIERS),
    "weight decay": (*SHORT, *DECAY, "zo.directions=2"),
    "rademacher, bf16, fp32_master": (*BF16, "zo.noise_distribution=rademacher", "zo.directions=2"),
    "only blocks, bf16, fp32_master": (*BF16, "zo.only_blocks=true"),
    "momentum, weighted layers": (*SHORT, *MOMENTUM, "zo.directions=2", "zo.layer_policy=adalezo"),
}
LONG_RUNS = {
    "bf16, nearest, window": (*BF16, "zo.update_precision=nearest", "zo.layer_policy=window"),
    "bf16, stochastic, weight decay": (*BF16, STOCHASTIC, *DECAY),
    "fp16, stochastic": (*FP16, STOCHASTIC),
    "rademacher, fp16, stochastic": (*FP16, STOCHASTIC, "zo.noise_distribution=rademacher"),
    "fp16, fp32_master, weight decay": (*FP16, *DECAY),
    "LoRA": (*ADAPTER, "peft.kind=lora"),
    # B starts at 0 and stays so small that it is subnormal.
    "LoRA, fp16, stochastic": (
        *LENGTH,
        *("peft.kind=lora", "model.dtype=fp16", "zo.learning_rate=1e-4", STOCHASTIC),
    ),
    "prefix": (*ADAPTER, "peft.kind=prefix"),
}

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def run_of(recipe, tmp_path_factory):
    """Return a function that does a run of launch/train.py, once, and returns its directory."""
    done = {}

    def run_dir_of(keys):
        if keys not in done:
            done[keys] = tmp_path_factory.mktemp("numpy_replay") / "run"
            # The replay does not know how the weights were sharded.
            num_ranks = 2 if "model.dtype=bf16" in keys else 1
            run_forked_well(["--config", recipe, f"run_dir={done[keys]}", *keys], num_ranks=num_ranks)
        return done[keys]

    return run_dir_of


def replay(run_dir, model):
    """Replay a run to its last snapshot; return the replay and the snapshot."""
    snapshot = run_dir / "snapshots" / f"step-{results_of(run_dir)['steps']:08d}"
    return numpy_replay.replay_run(run_dir, model, snapshot), snapshot


@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=pytest.mark.long) for name in LONG_RUNS)])
def test_a_replay_by_numpy_gives_the_weights_of_a_run(name, run_of, recipe):
    run, snapshot = replay(run_of({**RUNS, **LONG_RUNS}[name]), recipe.parent / "model")
    manifest = numpy_replay.read_manifest(snapshot)
    assert numpy_replay.differences(run, snapshot) == []
    assert run.last.digest() == manifest["digest"] != run.first.digest()
    assert run.fingerprint() == manifest["base"] == run.header["model_fingerprint"]
    assert run.first.table_hash() == run.header["parameter_table_hash"]
    assert len(run.steps) == manifest["step"]


def test_the_replayed_runs_have_what_they_are_there_for(run_of, recipe):
    """Otherwise a replay that ignores it would pass, too."""
    runs = {name: replay(run_of(keys), recipe.parent / "model")[0] for name, keys in RUNS.items()}
    skipped = [step for step in runs["one-sided, skipped steps"].steps if not step["applied"]]
    assert skipped and all(step["projected_grads"] for step in skipped)
    assert all(len(step["dropped_layers"]) == 2 for step in runs["fp32"].steps)
    assert {len(step["projected_grads"]) for step in runs["weight decay"].steps} == {2}
    weighted = runs["momentum, weighted layers"].steps
    assert len({factor for step in weighted for factor in step["layer_weights"]}) > 4
    assert all(np.any(low) for low in runs["bf16, fp32_master"].last.low.values())
    only_blocks = runs["only blocks, bf16, fp32_master"]
    assert 0 < len(only_blocks.trained) < len(only_blocks.last.shapes)
    assert not any(run.last.low for name, run in runs.items() if "master" not in name)


def test_keys_and_dropped_blocks_come_from_the_seed(run_of, recipe):
    run, _ = replay(run_of(RUNS["bf16, stochastic, 2 directions"]), recipe.parent / "model")
    for number, step in enumerate(run.steps):
        assert (step["step"], step["seed"]) == (number, numpy_replay.step_key(7, number))
        assert step["dropped_layers"] == sorted(numpy_replay.block_order(7, number, num_blocks=4)[:2])


def test_the_run_of_an_earlier_version_is_replayed():
    run, results = numpy_replay.replay_run(FIXTURE / "run", FIXTURE / "model"), results_of(FIXTURE / "run")
    assert (run.last.digest(), len(run.steps)) == (results["weights_digest"], results["steps"])
    assert run.fingerprint() == results["model_fingerprint"]
    with tarfile.open(FIXTURE / "pack.tar.gz") as archive:
        contents = {member.name: archive.extractfile(member).read() for member in archive}
    assert next(iter(contents)) == "pack.json"
    pack = json.loads(contents.pop("pack.json"))
    assert {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()} == pack["files"]
    assert pack["digests"][str(results["steps"])] == run.last.digest()


def test_the_chain_of_checksums_shows_damage_and_a_torn_line_is_left_out(run_of, tmp_path):
    copy = Path(shutil.copy(run_of(RUNS["fp32"]) / "journal.jsonl", tmp_path))
    data = copy.read_bytes()
    items = numpy_replay.read_journal(copy)
    copy.write_bytes(data + data.splitlines()[-1][:-1])
    assert numpy_replay.read_journal(copy) == items
    flipped = data.replace(b'"learning_rate":100.0,', b'"learning_rate":101.0,', 1)
    assert flipped != data
    for damaged in (
        flipped,
        b"".join(data.splitlines(keepends=True)[:1] + data.splitlines(keepends=True)[2:]),
    ):
        copy.write_bytes(damaged)
        with pytest.raises(ValueError, match="another checksum"):
            numpy_replay.read_journal(copy)


def test_the_page_names_every_member_of_the_files(run_of):
    run_dir = run_of(RUNS["fp32"])
    header, records = numpy_replay.read_journal(run_dir / "journal.jsonl")
    (snapshot, *_) = (run_dir / "snapshots").iterdir()
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    objects = [header, *records, *metrics, results_of(run_dir), numpy_replay.read_manifest(snapshot)]
    with tarfile.open(FIXTURE / "pack.tar.gz") as archive:
        objects.append(json.load(archive.extractfile("pack.json")))
    names = {name.replace("accuracy", "METRIC") for members in objects for name in members}
    assert {name for name in names if f"`{name}`" not in PAGE} == {"test_METRIC", "test_loss"}


def test_the_values_on_the_page_are_those_of_the_program():
    key = numpy_replay.step_key(0, 0)
    parameter_id = numpy_replay.number("model.decoder.embed_tokens.weight", 4)
    normals = numpy_replay.normals(key, parameter_id, 4)
    signs = numpy_replay.signs(key, parameter_id, 32)
    values = [key, numpy_replay.direction_key(key, 1), parameter_id]
    values.append(" ".join(f"{bits:08x}" for bits in normals.view(np.uint32)))
    values.append("".join("+" if sign == 1 else "-" for sign in signs))
    values.append(" ".join(map(str, numpy_replay.dither(key, parameter_id, 4))))
    assert all(f"| {value} |" in PAGE for value in values)


def test_the_program_needs_neither_torch_nor_this_package(run_of, recipe):
    run_dir = run_of(RUNS["fp32"])
    given = [run_dir, recipe.parent / "model", run_dir / "snapshots" / "step-00000006"]
    checked = (
        "import atexit, runpy, sys;"
        "atexit.register(lambda: print(sorted({'torch', 'safetensors', 'lezo_ds'} & sys.modules.keys())));"
        f"sys.argv = {[str(PROGRAM), *map(str, given)]};"
        f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
    )
    finished = subprocess.run([sys.executable, "-c", checked], capture_output=True, text=True, check=True)
    assert finished.stdout.startswith("0 of ") and finished.stdout.splitlines()[1:] == ["[]"]
