"""The formula of a rank's memory against measured peaks and the page of OPT-30b; the dry run."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from assets import write_recipe
from own_data import own_values, write_byte_model, write_tickets
from own_memory import forget_peak, needs_peak, peak_memory
from ranks import run_ranks
from thorough import thorough
from tiny_models import FAMILIES
from tiny_runs import write_model
from transformers import OPTConfig

from lezo_ds import distributed
from lezo_ds.checkpoints import snapshots
from lezo_ds.config import config_from_dict, load_config
from lezo_ds.data.batches import candidate_batch
from lezo_ds.data.examples import EncodedExample
from lezo_ds.data.objectives import classification_loss
from lezo_ds.data.task_data import load_task_data
from lezo_ds.errors import UserError
from lezo_ds.runs.trainer import make_engine
from lezo_ds.tools import dry_run as planning
from lezo_ds.tools.dry_run import (
    CPU_RESERVE,
    GIB,
    InputSizes,
    ModelSizes,
    Plan,
    dry_run,
    example_lines,
    measured_inputs,
    measured_step,
    memory_of_card,
)

MAX_FILE_BYTES = 150 << 20  # of a snapshot of 330 MB
INPUTS = InputSizes(64, mean_length=20)
SST2 = InputSizes(72, mean_length=18)
OPT_30B = 29_974_540_288
BLOCK = 616_655_872


def recipe(path="opt-30b", *words):
    """Return a run of 8 examples a step."""
    values = {"run_dir": "none", "model.path": str(path), "model.dtype": "fp16"}
    values |= {"zo.learning_rate": 1e-6, "zo.sparsity": 0.5, "train.steps": 10}
    values |= {"train.batch_size": 8, "train.micro_batch_size": 8, "train.eval_batch_size": 8}
    return config_from_dict(values, "the test", words)


def plan_of(config, num_ranks=1, inputs=INPUTS, source="opt-30b", on_gpu=True):
    return Plan(config, ModelSizes(config, source), inputs, num_ranks, on_gpu)


def text_of(config, *args, **kwargs):
    return "\n".join(dry_run(config, *args, **kwargs))


def measure_steps(config, options):
    """Return this process's memory before a model loads, its peak in steps, and in a snapshot."""
    torch.set_num_threads(1)
    snapshots.MAX_FILE_BYTES = MAX_FILE_BYTES
    snapshots.sync = lambda path: None  # which takes most of the time
    for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD: freed blocks go back at once
        assert ctypes.CDLL(None).mallopt(option, 1 << 16)
    distributed.init_distributed()
    before = forget_peak()
    engine = make_engine(config)
    sequences = tuple((*range(3, 67), *option) for option in options)
    example = EncodedExample(sequences, tuple(map(len, options)), 0, False)
    micro_batch = candidate_batch([example] * config.train.micro_batch_size, 1)
    for _ in range(2):
        engine.train_batch([micro_batch] * distributed.world_size(), classification_loss)
    engine.save_checkpoint(Path(config.run_dir))
    return before, peak_memory()


@pytest.mark.distributed
@needs_peak
@pytest.mark.parametrize(
    ("words", "options", "inputs"),
    [
        thorough([], ((5,), (9,)), INPUTS),
        thorough(["tensor_parallel=2"], ((5,), (9,)), INPUTS),
        thorough([], (tuple(range(3, 67)),) * 3, InputSizes(128, 128, rows=3, targets=3 * 64)),
    ],
    ids=["ZeRO-3", "tensor parallelism", "long answers"],
)
def test_the_formula_is_within_a_quarter_of_the_measured_peak(
    words, options, inputs, tmp_path, monkeypatch
):
    monkeypatch.setattr(planning, "MAX_FILE_BYTES", MAX_FILE_BYTES)
    shape = OPTConfig(
        vocab_size=20000,
        num_attention_heads=4,
        max_position_embeddings=128,
        hidden_size=1024,
        word_embed_proj_dim=1024,
        ffn_dim=4096,
        num_hidden_layers=5,
    )
    write_model(shape, tmp_path)
    words = [*words, "model.dtype=fp32", f"run_dir={tmp_path / 'run'}", "train.micro_batch_size=4"]
    config = recipe(tmp_path, *words)
    plan = plan_of(config, 2, inputs, tmp_path, on_gpu=False)
    before, with_snapshot = run_ranks(measure_steps, 2, config, options)[0]
    assert plan.peak - CPU_RESERVE == pytest.approx(with_snapshot - before, rel=0.25)


@pytest.mark.parametrize(
    ("bits", "num_ranks", "gib"),
    [("null", 1, 3.27), (8, 1, 2.22), (4, 1, 1.65), ("null", 2, 2.53), (8, 2, 1.87), (4, 2, 1.54)],
)
def test_the_formula_is_within_a_tenth_of_the_peaks_of_the_page_of_results(bits, num_ranks, gib):
    config = recipe("opt-1.3b", "model.dtype=bf16", f"model.bits={bits}", "peft.kind=lora")
    plan = plan_of(config, num_ranks, source="opt-1.3b", on_gpu=False)
    assert plan.peak / GIB == pytest.approx(gib, rel=0.1)


PAGE = """
4  30.8  1.0  tensor_parallel=4 train.micro_batch_size=16 zo.update_precision=fp32_master
4  16.8  1.0  tensor_parallel=4 train.micro_batch_size=16
8   9.8  1.2  tensor_parallel=8 train.micro_batch_size=16
2  59.4  0.7  tensor_parallel=2 train.micro_batch_size=16 zo.update_precision=fp32_master
2  36.6  30   train.micro_batch_size=8
4  22.6  45   train.micro_batch_size=4
8  22.6  45   partition_size=4 train.micro_batch_size=2
4   7.1  45   deepspeed=zero3_cpu_offload train.micro_batch_size=4
"""
"""Ranks, GiB that each holds, GB that it receives in a step, and keys: the page of OPT-30b."""


@pytest.mark.parametrize("line", PAGE.strip().splitlines())
def test_the_page_of_opt_30b_has_the_figures_of_the_plan(line):
    num_ranks, gib, received, *keys = line.split()
    words = ["model.path=opt-30b", *keys]
    plan = plan_of(load_config("paper-opt-30b", words), int(num_ranks), SST2)
    assert f"{plan.peak / GIB:.1f}" == gib
    assert plan.received() / 1e9 == pytest.approx(float(received), rel=0.25)
    # Pinned memory comes in powers of two.
    is_offloaded = "offload" in line
    assert plan.in_host == (is_offloaded and pytest.approx(18.26 * GIB, rel=0.001))
    assert plan.snapshot == OPT_30B * (4 if "fp32_master" in line else 2)


@pytest.mark.parametrize(
    ("num_ranks", "words", "name", "expected"),
    [
        # A GPU that holds the model gathers nothing, and copies a block for each sign.
        (1, [], "weights", 4 * OPT_30B),
        (1, ["zo.update_precision=stochastic"], "weights", 2 * OPT_30B),
        (1, [], "copies", 2 * 2 * BLOCK),
        (1, ["zo.probes_per_pass=1"], "copies", 2 * BLOCK),
        # More probes perturb a layer at a time, of which two copies are in memory.
        (1, ["zo.directions=8", "zo.probes_per_pass=16"], "copies", 2 * 2 * 7168 * 4 * 7168),
        # Three blocks and the tied head are gathered.
        (4, [], "weights", OPT_30B + 2 * (3 * BLOCK + 50272 * 7168)),
        (1, ["peft.kind=lora"], "copies", 2 * 2 * 2 * 2 * 8 * 7168),
        # Directions of rank 1 are two vectors for each of six matrices, in half of the blocks.
        (
            4,
            ["zo.noise_rank=1", "zo.examples_per_direction=2", "zo.directions=3"],
            "copies",
            2 * 2 * 3 * 24 * (4 * 2 + 2 * 5) * 7168,
        ),
    ],
)
def test_the_terms_are_sums_by_hand(num_ranks, words, name, expected):
    sizes = ["train.micro_batch_size=1", f"train.batch_size={num_ranks}"]
    assert plan_of(recipe("opt-30b", *sizes, *words), num_ranks).memory[name] == expected


def ways(gigabytes, num_ranks=4, config=None, source="opt-30b"):
    """Return the keys of each way, and whether it fits."""
    plan = plan_of(config or recipe("opt-30b", "train.batch_size=16"), num_ranks, source=source)
    gpu_bytes = memory_of_card(gigabytes)
    return [(keys, way.peak <= gpu_bytes) for keys, way in plan.ways(gpu_bytes)]


def test_what_fits_comes_first_and_every_rank_has_the_same_share(tmp_path):
    found = ways(80)
    assert [fits for _, fits in found] == [True] * 4 + [False]
    assert "tensor_parallel=2 " in found[0][0] and "micro_batch_size=8 " in found[0][0]
    assert "partition_size=1" in found[-1][0]
    assert not any(key.startswith("partition") for key, _ in ways(141, num_ranks=32))
    # Nothing fits: the weights are in the host's memory.
    assert "zero3_cpu_offload" in ways(16)[0][0] and ways(16)[0][1]
    # AutoTP does not split this model.
    FAMILIES["gpt2"][0].save_pretrained(tmp_path)
    assert not any("tensor" in keys for keys, _ in ways(80, 2, recipe(tmp_path), tmp_path))


@pytest.mark.parametrize("more", [[], ["deepspeed=zero3_cpu_offload"]])
def test_a_line_of_a_way_is_the_keys_that_run_it(more):
    words = ["model.path=opt-30b", "train.micro_batch_size=4", *more]
    lines = text_of(load_config("paper-opt-30b", words), num_gpus=4, gpu_memory=16).splitlines()
    facts = [line[14:] for line in lines if line.startswith("a way")]
    assert len(facts) > 4
    for fact in facts:
        keys = fact.partition(":")[0].split()
        again = text_of(load_config("paper-opt-30b", [*words, *keys]), num_gpus=4)
        needed = re.search(r": ([\d.]+ GiB.*) a rank, rec", fact)[1]
        assert f"tokens (assumed): {needed}: " in again


def test_a_card_has_less_than_it_is_sold_with():
    assert [memory_of_card(size) for size in (24, 20.5)] == [22.5 * GIB, 20.5 * GIB]


def test_a_run_that_does_not_split_is_planned_if_the_question_is_what_fits_and_then_refused():
    config = load_config("paper-opt-30b", ["model.path=opt-30b"])
    with pytest.raises(UserError, match="equally many for each of 8 ranks"):
        text_of(config, num_gpus=8)
    lines = []
    with pytest.raises(UserError, match="equally many for each of 8 ranks"):
        lines.extend(dry_run(config, num_gpus=8, gpu_memory=24))
        pytest.fail("it ends with the refusal")
    iterator = dry_run(config, num_gpus=8, gpu_memory=24)
    assert next(iterator).startswith("refused       train.batch_size=16 does")
    assert "inputs of at most 72 tokens (assumed)" in next(
        line for line in iterator if line.startswith("memory")
    )


def test_every_token_of_every_label_is_counted(tmp_path):
    """A token is a byte, and a space comes before a label. An example has three rows."""
    write_byte_model(tmp_path / "model")
    tickets = write_tickets(tmp_path / "tickets.csv", num_rows=30)
    labels = ["billing", "bug", "shipping"]
    described = {"prompt": "{text}\nTopic:", "label_field": "topic", "labels": labels}
    values = own_values(tmp_path / "model", train=str(tickets), **described)
    config = config_from_dict({**values, "run_dir": str(tmp_path / "run")}, "the test")
    data = load_task_data(config)
    inputs = measured_inputs(config, replace(data, packed=False))
    assert inputs.targets == sum(1 + len(label) for label in labels)
    assert 2.5 < inputs.rows <= 3
    # Examples that share rows run fewer tokens, and as many of them count.
    packed = measured_inputs(config, replace(data, packed=True))
    assert packed.targets == inputs.targets and packed.rows <= inputs.rows


@pytest.fixture
def config(tmp_path):
    distributed.init_distributed()
    return load_config(write_recipe(tmp_path), [f"run_dir={tmp_path / 'run'}"])


def test_a_dry_run_checks_the_run_and_prints_the_facts(config):
    facts = {line[:13].strip(): line[14:] for line in dry_run(config)}
    assert facts["blocks"] == "4, 2 dropped per step"
    assert facts["memory"].startswith("of a rank, with inputs of at most 24 tokens: 0.6")
    assert facts["disk"].startswith("at most 3 snapshots of 4.29e-05 GB at a time")
    assert re.match(r"about 0:[\d:]+, besides .*: 8 steps of [\d.e-]+ s$", facts["time"])
    assert not Path(config.run_dir).exists() and not facts.keys() & {"not checked", "faster"}
    assert "faster        labels of one" in text_of(config, step_seconds=11)
    with pytest.raises(UserError, match="drops all 4 blocks"):
        zo = config.zo.model_copy(update={"sparsity": 1, "only_blocks": True})
        text_of(config.model_copy(update={"zo": zo}))


def test_examples_are_shown_of_a_recipe_without_keys_of_training(config):
    zo = type(config.zo)()
    data = load_task_data(config.model_copy(update={"zo": zo}))
    reads, learns, *others = example_lines(data, 2)
    assert re.fullmatch(r"reads  '<s>the .* was (great|terrible)'", reads.replace("<s> ", "<s>"))
    assert re.fullmatch(r"learns  \['\s?(great|terrible)'\] label [01]", learns)
    assert len(others) == 2


def test_a_step_is_measured_only_where_the_run_would_be_and_fits(config, monkeypatch):
    data = load_task_data(config)
    source = Path(config.model.path)
    inputs = measured_inputs(config, data)
    plan = plan_of(config, 1, inputs, source, on_gpu=False)
    assert 0 < measured_step(plan, data) < 10
    assert measured_step(plan_of(config, 1, inputs, source), data) is None
    assert measured_step(plan_of(config, 2, inputs, source, on_gpu=False), data) is None
    monkeypatch.setattr(distributed, "free_memory", lambda: plan.peak - 1)
    assert "time          not measured" in text_of(config)
