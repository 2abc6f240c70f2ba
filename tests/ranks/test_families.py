"""Models of every family are trained, validated and tested by the same command, on two ranks.

The loss is a function of what the model writes, so that the ranks, of which one has fewer prompts, write
answers that end at different lengths, for both signs of every step and at every evaluation.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from assets import REPOSITORY
from commands import run_forked_well
from tiny_tasks import DS_CONFIG, NUM_POSITIONS, write_tasks, write_writer
from transformers import AutoModelForCausalLM, AutoTokenizer

from lezo_ds.config import DataConfig
from lezo_ds.data.objectives import reward
from lezo_ds.data.splits import load_splits
from lezo_ds.journal import EvaluationRecord, read_journal
from lezo_ds.model.snapshots import snapshot_path
from lezo_ds.tasks import TASKS
from lezo_ds.tasks.metrics import best_f1
from lezo_ds.zo.records import StepRecord

pytestmark = pytest.mark.distributed

# As published: whether the tokenizer begins a text with BOS, and whether it has a pad token. The seeds are of
# models whose answers to different prompts end at different lengths.
MODELS = {
    "llama": {"seed": 0, "adds_bos": True, "has_pad": False},
    "mistral": {"seed": 5, "adds_bos": True, "has_pad": False},
    "qwen2": {"seed": 8, "adds_bos": False, "has_pad": True},
    "qwen3": {"seed": 6, "adds_bos": False, "has_pad": True},
    "gpt_neox": {"seed": 26, "adds_bos": False, "has_pad": False},
    "gpt2": {"seed": 2, "adds_bos": False, "has_pad": False},
}
SIZES = {"num_train": 12, "num_dev": 4, "num_test": 7}
BOS, NEWLINE, EOS = 0, 4, 2


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("data"))


@torch.no_grad()
def written(model, tokenizer, prompt, adds_bos):
    """Return the tokens a plain model writes behind a prompt, one at a time, without a cache."""
    ids = [BOS] * adds_bos + tokenizer(prompt, add_special_tokens=False).input_ids
    new = []
    while len(new) < 50 and not {EOS, NEWLINE} & set(new):
        new.append(int(model(torch.tensor([ids + new])).logits[0, -1].argmax()))
    return new


@reward
def characters(answers, records):
    """The sum of an answer's characters, by their numbers."""
    return [float(sum(map(ord, answer))) for answer in answers]


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "qwen3", "gpt2"),
        *(pytest.param(family, marks=pytest.mark.long) for family in ("mistral", "qwen2", "gpt_neox")),
    ],
)
def test_a_family_trains_under_the_same_command_and_writes_what_plain_transformers_does(
    family, data, tmp_path
):
    directory, run_dir = write_writer(tmp_path / "model", family, **MODELS[family]), tmp_path / "run"
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
    examples = load_splits(task, DataConfig(path=str(data / "squad"), **SIZES)).test
    evaluations = [r for r in records if isinstance(r, EvaluationRecord) and r.split == "test"]
    weights = [directory, snapshot_path(run_dir / "snapshots", 2)]
    for found, path in zip(evaluations, weights, strict=True):
        model = AutoModelForCausalLM.from_pretrained(path).eval()
        tokens = [written(model, tokenizer, e.prompt, MODELS[family]["adds_bos"]) for e in examples]
        assert len(set(map(len, tokens))) > 1
        answers = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in tokens]
        scores = [best_f1(answer, e.references) for answer, e in zip(answers, examples, strict=True)]
        assert found.loss == pytest.approx(-np.mean(characters(answers, None)), rel=1e-6)
        assert found.metrics["f1"] == pytest.approx(sum(scores) / len(scores), rel=1e-12)
