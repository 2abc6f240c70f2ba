"""launch/export.py and launch/evaluate.py: the weights of any step come back, and score as they did."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from assets import recipe_values, write_data, write_reader
from commands import assert_one_error, run_forked, run_forked_well
from peft import PeftModel
from run_ends import digest_after, results_of
from transformers import AutoModelForCausalLM

from lezo_ds.data.encoding import encode_example, load_tokenizer
from lezo_ds.model.snapshots import read_manifest, snapshot_path
from lezo_ds.tasks import TASKS

BF16 = ("model.dtype=bf16", "zo.update_precision=fp32_master")


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    """A finished run in bf16 that keeps its last two snapshots, of steps 4 and 8."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    run_forked_well(["--config", recipe, f"run_dir={run_dir}", *BF16])
    return run_dir


def export(run_dir, step, target, num_ranks=1):
    arguments = ["--run", run_dir, "--step", step, "--out", target]
    run_forked_well(arguments, program="export.py", num_ranks=num_ranks)
    return read_manifest(target)


def scores(*arguments):
    return json.loads(run_forked_well([*arguments, "--json"], program="evaluate.py").out)


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_without_a_snapshot_is_rebuilt_bit_for_bit(num_ranks, recipe, finished, tmp_path):
    run_forked_well(["--config", recipe, f"run_dir={tmp_path / 'short'}", "train.steps=3", *BF16])
    short = read_manifest(snapshot_path(tmp_path / "short" / "snapshots", 3))
    exported = export(finished, "3", tmp_path / "exported", num_ranks)
    assert exported["step"] == 3
    assert exported["digest"] == short["digest"] != exported["base"]
    weights = "model-00001.safetensors"
    assert exported["files"][weights] == short["files"][weights]


def test_best_and_last_are_the_steps_of_the_results_and_the_journals_end(finished, tmp_path):
    results = results_of(finished)
    best = export(finished, "best", tmp_path / "best")
    assert (best["step"], best["digest"]) == (results["best_step"], results["weights_digest"])
    last = export(finished, "last", tmp_path / "last")
    assert (last["step"], last["digest"]) == (8, digest_after(finished, 8))


def test_a_run_without_its_snapshots_is_rebuilt_from_the_base_weights(finished, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    shutil.rmtree(copy / "snapshots")
    exported = export(copy, "last", tmp_path / "exported")
    assert exported["digest"] == digest_after(finished, 8)


def test_a_run_and_its_exported_model_score_alike_and_as_plain_transformers(finished, recipe, tmp_path):
    results = results_of(finished)
    of_run = scores("--run", finished, "--predictions", tmp_path / "run.json")
    assert (of_run["step"], of_run["score"]) == (results["best_step"], results["test"])
    assert of_run["majority_class"] == results["majority_class"]
    export(finished, "best", tmp_path / "model")
    data = [f"data.{name}" for name in (f"path={recipe.parent / 'data'}", "num_train=30", "num_dev=11")]
    of_model = scores(
        *("--model", tmp_path / "model", "--predictions", tmp_path / "model.json", *data, "data.num_test=13")
    )
    assert (of_model["score"], of_model["num_examples"]) == (of_run["score"], 13)
    predictions = json.loads((tmp_path / "model.json").read_text())["predictions"]
    assert predictions == json.loads((tmp_path / "run.json").read_text())["predictions"]
    indices = [entry["index"] for entry in predictions]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16
    expected = plain_predictions(model, recipe.parent, indices)
    assert [entry["prediction"] for entry in predictions] == expected


def test_an_exported_adapter_opened_by_peft_predicts_what_its_run_does(recipe, tmp_path):
    run_dir = tmp_path / "run"
    model = write_reader(tmp_path / "model", seed=5)  # one that gives varied answers
    keys = ["peft.kind=lora", "zo.learning_rate=0.1", "zo.perturbation_scale=1e-2", f"model.path={model}"]
    run_forked_well(["--config", recipe, f"run_dir={run_dir}", *keys])
    export(run_dir, "last", tmp_path / "adapter")
    scores("--run", run_dir, "--step", "last", "--predictions", tmp_path / "run.json")
    predictions = json.loads((tmp_path / "run.json").read_text())["predictions"]
    indices = [entry["index"] for entry in predictions]
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    untrained = plain_predictions(base, recipe.parent, indices)
    tuned = plain_predictions(PeftModel.from_pretrained(base, tmp_path / "adapter"), recipe.parent, indices)
    assert [entry["prediction"] for entry in predictions] == tuned != untrained
    assert len(set(tuned)) > 1


def plain_predictions(model, root, indices):
    """Return the more probable candidate of some test records, by `model` alone, one sequence at a time."""
    model.eval()
    file, tokenizer = root / "data" / "validation.jsonl", load_tokenizer(str(root / "model"))
    records = [json.loads(line) for line in file.read_text().splitlines()]
    found = []
    for index in indices:
        encoded = encode_example(tokenizer, TASKS.find("sst2").build_example(records[index], index), 2048)
        with torch.no_grad():
            logits = [model(torch.tensor([ids[:-1]])).logits[0, -1, ids[-1]] for ids in encoded.sequences]
        found.append(int(torch.stack(logits).float().argmax()))
    return found


def assert_refused(program, *arguments, because):
    assert_one_error(run_forked(arguments, program=program), 2, because)


def test_bad_input_is_refused_and_nothing_is_written(finished, tmp_path):
    target = tmp_path / "out"
    out = ("--out", target)
    problem = "has no step 9; got: 9; expected: best, last, or 0 to 8"
    assert_refused("export.py", "--run", finished, "--step", "9", *out, because=problem)
    assert_refused("export.py", "--run", tmp_path, *out, because="is not the directory of a run")
    other = write_reader(tmp_path / "other", seed=1)
    problem = "is not the base model of the run"
    assert_refused("export.py", "--run", finished, *out, f"model.path={other}", because=problem)
    assert not target.exists()
    target.mkdir()
    (target / "kept").write_text("")
    assert_refused("export.py", "--run", finished, *out, because=f"{target} exists")
    assert [path.name for path in target.iterdir()] == ["kept"]
    assert_refused("evaluate.py", "--model", other, "data.pth=x", because="unknown key")


def test_a_run_without_an_evaluation_has_no_best_step_yet(tmp_path):
    values = recipe_values(write_reader(tmp_path / "model"), write_data(tmp_path / "data"))
    (tmp_path / "recipe.yaml").write_text(json.dumps(values))
    run_dir = tmp_path / "run"
    run_forked_well(["--config", tmp_path / "recipe.yaml", f"run_dir={run_dir}", "method=zero_shot"])
    problem = "no evaluation yet, so it has no best step; got: 0 steps"
    assert_refused("export.py", "--run", run_dir, "--out", tmp_path / "out", because=problem)
