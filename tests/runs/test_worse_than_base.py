"""Runs that only get worse: the base model is a candidate for the best step, and the user is
told."""

from __future__ import annotations

import json

import pytest
from assets import REPOSITORY
from commands import run_forked_well
from run_ends import results_of
from tiny_tasks import NUM_POSITIONS, write_tasks, write_writer

from lezo_ds.checkpoints.snapshots import read_manifest, snapshot_steps
from lezo_ds.data.rewards import reward
from lezo_ds.runs.screen import WORSE

pytestmark = pytest.mark.distributed

PATH = ":".join(f"{REPOSITORY}/{folder}" for folder in ("", "tests/helpers", "tests/runs"))
KINDS = {
    "lezo": ["zo.learning_rate=1"],
    "reward": [
        "zo.learning_rate=30",
        "train.objective=test_worse_than_base:variety",
        "generation.max_new_tokens=12",
    ],
}


@reward
def variety(answers, records):
    return [float(len(set(answer))) for answer in answers]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_gets_worse_says_so_and_gives_the_base_model(kind, recipe, tmp_path):
    run_dir, model, keys = tmp_path / "run", recipe.parent / "model", KINDS[kind]
    if kind == "reward":
        data, model = write_tasks(tmp_path / "data") / "squad", write_writer(tmp_path / "writer")
        keys = [*keys, "data.task=squad", f"data.path={data}", f"data.max_length={NUM_POSITIONS}"]
        keys += [f"data.{split}=9" for split in ("num_train", "num_dev", "num_test")]
    arguments = [f"run_dir={run_dir}", f"model.path={model}", "train.keep_snapshots=1", *keys]
    assert WORSE in run_forked_well(["--config", recipe, *arguments], PYTHONPATH=PATH).out
    results = results_of(run_dir)
    assert (results["best_step"], results["worse_than_base"], results["steps"]) == (0, True, 8)
    assert results["best_dev_loss"] < results["trained_dev_loss"]
    assert results["test"] == results["zero_shot"]
    assert snapshot_steps(run_dir / "snapshots") == [8]
    lines = list(map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()))
    assert [line["step"] for line in lines if "dev_loss" in line] == [0, 4, 8]

    source = ["--run", run_dir]
    if kind == "lezo":
        scored = json.loads(run_forked_well([*source, "--json"], program="evaluate").out)
        assert (scored["step"], scored["score"]) == (0, results["zero_shot"])
        run_forked_well([*source, "--journal", tmp_path / "run.lezo"], program="export")
        source = ["--journal", tmp_path / "run.lezo", f"model.path={model}"]
    exported = run_forked_well([*source, "--out", tmp_path / "out"], program="export")
    assert WORSE in exported.err and WORSE in (tmp_path / "out" / "README.md").read_text()
    digests = read_manifest(tmp_path / "out")["digest"], results["weights_digest"]
    assert digests == (results["model_fingerprint"],) * 2


@reward
def nothing(answers, records):
    return [0.0 for _ in answers]


def num_words(completions, **fields):
    return [len(completion.split()) for completion in completions]


def test_rewards_that_are_all_equal_are_named_and_samples_show_the_answers(recipe, tmp_path):
    run_dir = tmp_path / "run"
    data = write_tasks(tmp_path / "data") / "squad"
    keys = [
        f"run_dir={run_dir}",
        f"model.path={write_writer(tmp_path / 'writer')}",
        "data.task=squad",
        f"data.path={data}",
        f"data.max_length={NUM_POSITIONS}",
        *[f"data.{split}=9" for split in ("num_train", "num_dev", "num_test")],
        "train.objective={test_worse_than_base:nothing: 1, test_worse_than_base:num_words: 0}",
        "data.metric=reward",
        "generation.max_new_tokens=12",
    ]
    finished = run_forked_well(["--config", recipe, *keys], PYTHONPATH=PATH, num_ranks=2)
    assert "All losses or rewards were equal in 8 of 8 steps" in finished.out
    assert "-0" not in finished.out.replace("-0000", "").split("Run directory")[0]
    assert results_of(run_dir)["flat_steps"] == 8
    samples = list(map(json.loads, (run_dir / "samples.jsonl").read_text().splitlines()))
    of_base = [sample for sample in samples if (sample["step"], sample["split"]) == (0, "test")]
    predictions = (run_dir / "predictions" / "step-00000000.jsonl").read_text().splitlines()
    shown = [json.loads(line) for line in predictions][: len(of_base)]
    assert len(of_base) == 4
    assert [s["answer"] for s in of_base] == [row["predicted"] for row in shown]
    assert all(
        sample["reward"] == 0 and not str(sample["reward"]).startswith("-") for sample in samples
    )
    assert all(
        sample["rewards"] == {"nothing": 0.0, "num_words": len(sample["answer"].split())}
        for sample in samples
    )
    assert all(type(sample["ended"]) is bool for sample in samples)
    lines = list(map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()))
    means = [line["test_rewards/num_words"] for line in lines if "test_rewards/num_words" in line]
    words = [len(json.loads(line)["predicted"].split()) for line in predictions]
    assert means[0] == pytest.approx(sum(words) / len(words))
    shares = [line["test_share_ended"] for line in lines if "test_share_ended" in line]
    assert shares and all(0 <= share <= 1 for share in shares)
