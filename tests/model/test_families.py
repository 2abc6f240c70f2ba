"""Models of every family are trained, validated and tested by the same command, on two ranks."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from assets import REPOSITORY
from commands import run_forked_well
from ranks import run_ranks
from tiny_adapters import start_engine, train
from tiny_models import FAMILIES, MIXTURES
from tiny_runs import full_weights, write_model
from tiny_tasks import DS_CONFIG, NUM_POSITIONS, write_tasks, write_writer
from transformers import AutoModelForCausalLM, AutoTokenizer

from lezo_ds.config import DataConfig
from lezo_ds.data.objectives import reward
from lezo_ds.data.splits import load_splits
from lezo_ds.journal import EvaluationRecord, read_journal
from lezo_ds.model.snapshots import snapshot_path
from lezo_ds.tasks import TASKS
from lezo_ds.zo.records import StepRecord

pytestmark = pytest.mark.distributed

# As published: whether the tokenizer begins a text with BOS, and whether it has a pad token. The seeds are of
# models whose answers to different prompts end at different lengths.
MODELS = {
    "llama": {"seed": 0, "adds_bos": True, "has_pad": False},
    "qwen3": {"seed": 6, "adds_bos": False, "has_pad": True},
    "gpt2": {"seed": 2, "adds_bos": False, "has_pad": False},
}
SIZES = {"num_train": 12, "num_dev": 7, "num_test": 4}
BOS, NEWLINE, EOS = 0, 4, 2


@torch.no_grad()
def written(model, tokenizer, prompt, adds_bos):
    ids = [BOS] * adds_bos + tokenizer(prompt, add_special_tokens=False).input_ids
    new = []
    while len(new) < 50 and not {EOS, NEWLINE} & set(new):
        new.append(int(model(torch.tensor([ids + new])).logits[0, -1].argmax()))
    return new


@reward
def characters(answers, records):
    return [float(sum(map(ord, answer))) for answer in answers]


@pytest.mark.parametrize("family", MODELS)
def test_a_family_trains_under_the_same_command_and_writes_what_plain_transformers_does(family, tmp_path):
    directory, run_dir = write_writer(tmp_path / "model", family, **MODELS[family]), tmp_path / "run"
    data = write_tasks(tmp_path / "data")
    keys = [
        *(f"run_dir={run_dir}", f"model.path={directory}", "model.dtype=fp32", f"deepspeed={DS_CONFIG}"),
        *("data.task=squad", f"data.path={data / 'squad'}", f"data.max_length={NUM_POSITIONS}"),
        *(f"data.{name}={number}" for name, number in SIZES.items()),
        *("zo.sparsity=0.5", "zo.learning_rate=1e-8", "zo.perturbation_scale=1e-1"),
        *("train.objective=test_families:characters", "train.steps=2", "train.eval_every=2"),
        *("train.batch_size=4", "train.micro_batch_size=2", "train.eval_batch_size=3"),
    ]
    own, helpers = Path(__file__).parent, REPOSITORY / "tests" / "helpers"
    run_forked_well(keys, num_ranks=2, PYTHONPATH=os.pathsep.join(map(str, (REPOSITORY, own, helpers))))
    _, records = read_journal(run_dir / "journal.jsonl")
    assert any(record.projected_grads != (0.0,) for record in records if isinstance(record, StepRecord))

    tokenizer, task = AutoTokenizer.from_pretrained(directory), TASKS.find("squad")
    examples = load_splits(task, DataConfig(path=str(data / "squad"), **SIZES)).dev
    evaluations = [r for r in records if isinstance(r, EvaluationRecord) and r.split == "dev"]
    weights = [directory, snapshot_path(run_dir / "snapshots", 2)]
    for found, path in zip(evaluations, weights, strict=True):
        model = AutoModelForCausalLM.from_pretrained(path).eval()
        tokens = [written(model, tokenizer, e.prompt, MODELS[family]["adds_bos"]) for e in examples]
        assert len(set(map(len, tokens))) > 1
        answers = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in tokens]
        assert found.loss == pytest.approx(-np.mean(characters(answers, None)), rel=1e-6)


def _train_mixture(directory, root, num_ranks):
    engine = start_engine(directory, None, "bf16", num_ranks, probes_per_pass=1)
    chosen = []
    router = engine.module.model.layers[0].mlp.gate
    router.register_forward_hook(lambda _, __, outputs: chosen.append(set(outputs[2].flatten().tolist())))
    records = train(engine, 4)
    engine.save_checkpoint(root / str(num_ranks))
    return records, engine.weights.digest(), full_weights(engine), chosen


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_of_experts_trains_alike_on_one_and_two_ranks_and_is_stored_as_published(family, tmp_path):
    config = copy.deepcopy(FAMILIES[family][0])
    config.num_local_experts = config.num_experts = 64  # the tokens of a pass cannot choose all of them
    config.num_experts_per_tok = 1
    directory = write_model(config, tmp_path / "model", torch.bfloat16)
    (alone,) = run_ranks(_train_mixture, 1, directory, tmp_path, 1)
    first, second = run_ranks(_train_mixture, 2, directory, tmp_path, 2)
    assert len(first[3]) == len(second[3]) > 0
    assert any(mine != others for mine, others in zip(first[3], second[3], strict=True))
    for records, digest, _, _ in (first, second):
        assert (records, digest) == alone[:2]
    assert any(record.applied and record.projected_grads != (0.0,) for record in alone[0])
    written = AutoModelForCausalLM.from_pretrained(snapshot_path(tmp_path / "2", 4), dtype=torch.bfloat16)
    assert all(torch.equal(alone[2][name], parameter) for name, parameter in written.named_parameters())
