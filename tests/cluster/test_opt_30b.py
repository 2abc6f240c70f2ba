"""The commands of docs/opt-30b.md in their order, on a real Slurm of two hosts without GPUs.

A tiny OPT takes the place of OPT-30b. CHANGES lists all that is replaced in the commands.
"""

import random
import re

import pytest
import torch
from assets import REPOSITORY, labelled_reviews, read_lines, write_reader, write_records
from hosts import wait_until
from run_ends import num_steps, results_of
from transformers import AutoModelForCausalLM

from lezo_ds.checkpoints.snapshots import read_manifest

pytestmark = [pytest.mark.cluster, pytest.mark.distributed]

PAGE = (REPOSITORY / "docs" / "opt-30b.md").read_text()
CHANGES = {
    # Two ranks, because they are on two cores, in bf16, because DeepSpeed does fp16 only on GPUs.
    "tensor_parallel=4)": "tensor_parallel=2 model.dtype=bf16 deepspeed=zero3_bf16)",
    "--ntasks-per-node=4 --gpus-per-node=4": "--ntasks-per-node=2 --gpus-per-node=2",
    "--gpus 4 --gpu-memory": "--gpus 2 --gpu-memory",
    # 200 steps, and two seeds.
    "train.snapshot_every=0)": "train.snapshot_every=0 train.steps=200 train.eval_every=100)",
    "--array=0-4": "--array=0-1",
    "data.path=glue/sst2)": "data.path=glue/sst2 model.dtype=bf16 deepspeed=zero3_bf16 "
    "zo.learning_rate=0.1 train.steps=20 train.eval_every=10)",
    "seed,data.seed=0,1,2,3,4)": "seed,data.seed=0,1)",
}
HF = """#!/bin/sh
# Plays `hf download`: copies what the hub would send.
for folder; do :; done
cp -r "hub/$folder" "$folder"
"""
PRELUDE = """
set -e
cd {directory}
export PATH=$PWD/bin:$PATH
[ ! -f state ] || . ./state
sbatch() {{ command sbatch --wait "$@"; }}
{commands}
declare -p data settings cell node sweep > state 2> /dev/null || true
"""


def blocks():
    """Return the page's blocks of commands with CHANGES, by their first words."""
    text = PAGE
    for shown, run in CHANGES.items():
        assert shown in text, f"the page does not have {shown}"
        text = text.replace(shown, run)
    return re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def directory(tmp_path):
    """A directory that looks like the root of a clone, and what the hub has, with a tiny OPT."""
    for name in ("launch", "ds_configs"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "hf").write_text(HF)
    (tmp_path / "bin" / "hf").chmod(0o755)
    model = write_reader(tmp_path / "hub" / "opt-30b")
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float16).state_dict()
    torch.save(weights, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    rng = random.Random(0)
    for split, number in (("train", 1600), ("validation", 60)):
        path = tmp_path / "hub" / "glue" / "sst2" / f"{split}.jsonl"
        write_records(path, labelled_reviews(rng, number))
    records = [{"sentence": record["sentence"]} for record in labelled_reviews(rng, 5)]
    write_records(tmp_path / "sentences.jsonl", records)
    return tmp_path


@pytest.fixture
def run(slurm, directory):
    """Return a function that runs commands as a user types them, and returns what they print."""

    def run(commands):
        script = PRELUDE.format(directory=directory, commands=commands)
        return slurm.run_well("bash", "-c", script)

    return run


def test_the_page_of_opt_30b_from_the_download_to_five_seeds(slurm, directory, run):
    fetch, settings, dry_runs, health, train, stop, signal, use, seeds, *rest = blocks()
    two_nodes, one_card = rest
    run(fetch)
    run(settings)
    printed = run(dry_runs)
    assert "tensor_parallel=2" in printed
    assert re.search(r"^time +about .* 200 steps of ", printed, re.MULTILINE)
    assert "sst2, opt-30b, accuracy" in run(health).lower()
    assert results_of(directory / "runs" / "opt-30b-zero-shot")["finished"]

    def wait_for_fact(name, value):
        wait_until(lambda: slurm.fact(job, name) == value)

    run_dir = directory / "runs" / "opt-30b-sst2"
    submit, watch = train.split("\n", 1)
    submit = submit.replace("sbatch", "command sbatch --parsable", 1)
    job = int(run(submit))
    wait_until(lambda: num_steps(run_dir) >= 20)
    run(stop)
    wait_for_fact("JobState", "COMPLETED")
    assert not results_of(run_dir)["finished"]
    job = int(run(submit))
    wait_until(lambda: num_steps(run_dir) >= 60)
    run(signal.replace("JOB", str(job)))
    wait_for_fact("Restarts", "1")
    wait_for_fact("JobState", "COMPLETED")
    assert "Finished: 200 steps" in run(watch.replace("JOB", str(job)))
    results = results_of(run_dir)
    assert results["finished"] and results["world_size"] == 2

    run(use)
    labels = read_lines(directory / "labels.jsonl")
    assert [set(row) for row in labels] == [{"sentence", "predicted", "probability"}] * 5
    assert read_manifest(directory / "opt-30b-sst2")["step"] == results["best_step"]
    assert (directory / "opt-30b-sst2.lezo").is_file()
    assert run(seeds).count("  done  ") == 2
    of_seeds = [path.parent for path in (directory / "runs/opt-30b-seeds").rglob("results.json")]
    assert [results_of(run_dir)["world_size"] for run_dir in of_seeds] == [2, 2]
    run(two_nodes)
    assert results_of(directory / "runs" / "opt-30b-two-nodes")["world_size"] == 4
    run(one_card)
    assert read_manifest(directory / "opt-30b-4bit-adapter")["bits"] == 4
