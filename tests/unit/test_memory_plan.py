"""The formula of a rank's memory against measured peaks and the page of OPT-30b; the dry run."""

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
from lezo_ds.tools import memory_plan
from lezo_ds.tools.dry_run import dry_run, measured_step
from lezo_ds.tools.examples import example_lines
from lezo_ds.tools.memory_plan import GIB, InputSizes, ModelSizes

MAX_FILE_BYTES = 150 << 20  # of a snapshot of 330 MB
INPUTS = InputSizes(64)
OPT_30B = 29_974_540_288
BLOCK = 616_655_872


def recipe(path="opt-30b", *words):
    """Return a run of 8 examples a step."""
    values = {"run_dir": "none", "model.path": str(path), "model.dtype": "fp16"}
    values |= {"zo.learning_rate": 1e-6, "zo.sparsity": 0.5, "train.steps": 10}
    values |= {"train.batch_size": 8, "train.micro_batch_size": 8, "train.eval_batch_size": 8}
    return config_from_dict(values, "the test", words)


def memory(config, num_ranks=1, inputs=INPUTS, on_gpu=True):
    return memory_plan.memory_of(config, ModelSizes(config), inputs, num_ranks, on_gpu=on_gpu)


def peak(*args, **kwargs):
    return sum(memory(*args, **kwargs).values())


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
    masks = tuple((False,) * 64 + (True,) * len(option) for option in options)
    example = EncodedExample(sequences, masks, 0)
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
        thorough([], (tuple(range(3, 67)),) * 3, InputSizes(128, rows=3, targets=3 * 64)),
    ],
    ids=["ZeRO-3", "tensor parallelism", "long answers"],
)
def test_the_formula_is_within_a_fifth_of_the_peak(words, options, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_plan, "MAX_FILE_BYTES", MAX_FILE_BYTES)
    shape = {"hidden_size": 1024, "word_embed_proj_dim": 1024, "ffn_dim": 4096}
    shape |= {"num_hidden_layers": 5, "num_attention_heads": 4, "vocab_size": 20000}
    write_model(OPTConfig(**shape, max_position_embeddings=128), tmp_path)
    words = [*words, "model.dtype=fp32", f"run_dir={tmp_path / 'run'}", "train.micro_batch_size=4"]
    config = recipe(tmp_path, *words)
    planned = peak(config, 2, inputs, on_gpu=False)
    before, with_snapshot = run_ranks(measure_steps, 2, config, options)[0]
    assert planned - memory_plan.CPU_RESERVE == pytest.approx(with_snapshot - before, rel=0.2)


@pytest.mark.parametrize(
    ("bits", "num_ranks", "gib"),
    [("null", 1, 3.27), (8, 1, 2.22), (4, 1, 1.65), ("null", 2, 2.53), (8, 2, 1.87), (4, 2, 1.54)],
)
def test_the_formula_is_within_a_tenth_of_the_peaks_of_the_page_of_results(bits, num_ranks, gib):
    config = recipe("opt-1.3b", "model.dtype=bf16", f"model.bits={bits}", "peft.kind=lora")
    assert peak(config, num_ranks, on_gpu=False) / GIB == pytest.approx(gib, rel=0.1)


PAGE = """
4  30.7  paper-opt-30b tensor_parallel=4 train.micro_batch_size=16 zo.update_precision=fp32_master
4  16.8  paper-opt-30b tensor_parallel=4 train.micro_batch_size=16
8   9.5  paper-opt-30b tensor_parallel=8 train.micro_batch_size=16
2  59.3  paper-opt-30b tensor_parallel=2 train.micro_batch_size=16 zo.update_precision=fp32_master
2  36.6  paper-opt-30b train.micro_batch_size=8
4  22.6  paper-opt-30b train.micro_batch_size=4
8  22.6  paper-opt-30b partition_size=4 train.micro_batch_size=2
4   8.7  paper-opt-30b deepspeed=zero3_cpu_offload train.micro_batch_size=4
1  36.4  paper-opt-30b model.bits=8 zo.update_precision=fp32_master
1  19.9  opt-30b-4bit
"""
"""Ranks, GiB that each holds, recipe and keys: the pages of OPT-30b and of eight bits."""


@pytest.mark.parametrize("line", PAGE.strip().splitlines())
def test_the_pages_of_opt_30b_have_the_figures_of_the_plan(line):
    num_ranks, gib, recipe_name, *keys = line.split()
    config = load_config(recipe_name, ["model.path=opt-30b", *keys])
    assert f"{peak(config, int(num_ranks), InputSizes(72)) / GIB:.1f}" == gib
    if "bit" not in line:
        assert ModelSizes(config).snapshot == OPT_30B * (4 if "fp32_master" in line else 2)


THREE_OF_RANK_1 = ["zo.noise_rank=1", "zo.examples_per_direction=2", "zo.directions=3"]


@pytest.mark.parametrize(
    ("num_ranks", "words", "name", "expected"),
    [
        # A GPU that holds the model gathers nothing, and copies a block for each sign.
        (1, [], "weights", 4 * OPT_30B),
        (1, ["zo.update_precision=stochastic"], "weights", 2 * OPT_30B),
        (1, [], "copies", 2 * 2 * BLOCK),
        (1, ["zo.probes_per_pass=1"], "copies", 2 * BLOCK),
        # More probes have a block's copies one pair after the other.
        (1, ["zo.directions=8", "zo.probes_per_pass=16"], "copies", 2 * 2 * BLOCK),
        # Three blocks and the tied head are gathered.
        (4, [], "weights", OPT_30B + 2 * (3 * BLOCK + 50272 * 7168)),
        (1, ["peft.kind=lora"], "copies", 2 * 2 * 2 * 2 * 8 * 7168),
        # Directions of rank 1 are two vectors for each of six matrices, in half of the blocks.
        (4, THREE_OF_RANK_1, "copies", 2 * 2 * 3 * 24 * (4 * 2 + 2 * 5) * 7168),
    ],
)
def test_the_terms_are_sums_by_hand(num_ranks, words, name, expected):
    sizes = ["train.micro_batch_size=1", f"train.batch_size={num_ranks}"]
    assert memory(recipe("opt-30b", *sizes, *words), num_ranks)[name] == expected


def ways_of(config, gigabytes, num_ranks=4):
    usable = memory_plan.USABLE * GIB * gigabytes
    found = memory_plan.ways(config, ModelSizes(config), INPUTS, num_ranks, usable)
    return [keys for keys, _ in found]


def test_the_ways_are_those_that_fit_and_give_every_rank_the_same_share(tmp_path):
    config = recipe("opt-30b", "train.batch_size=16", "zo.update_precision=stochastic")
    one = "train.micro_batch_size=1 train.eval_batch_size=1"
    offloaded = "partition_size=4 deepspeed=zero3_cpu_offload"
    split = [f"tensor_parallel={size} partition_size=null" for size in (2, 4)]
    assert ways_of(config, 80) == [
        f"partition_size=1 {one}",  # eight examples a pass do not make a pass of each rank
        *split,
        *(f"partition_size={size} {one}" for size in (2, 4)),
        f"{offloaded} {one}",
    ]
    assert ways_of(config, 24) == [split[1], f"{offloaded} {one}"]
    assert ways_of(config, 4) == []
    # AutoTP does not split this model.
    write_model(FAMILIES["gpt2"][0], tmp_path)
    assert not any("tensor" in keys for keys in ways_of(recipe(tmp_path), 80, num_ranks=2))


def test_a_line_of_a_way_is_the_keys_that_run_it():
    words = ["model.path=opt-30b", "tensor_parallel=2"]
    text = text_of(load_config("paper-opt-30b", words), num_gpus=4, gpu_memory=80)
    facts = [line[14:] for line in text.splitlines() if line.startswith("a way")]
    assert len(facts) > 2
    for fact in facts:
        keys, _, needed = fact.partition(": ")
        again = text_of(load_config("paper-opt-30b", [*words, *keys.split()]), num_gpus=4)
        assert f" tokens: {needed.removesuffix(' a rank')}: " in again


def test_a_run_that_does_not_split_is_planned_and_then_refused():
    config = load_config("paper-opt-30b", ["model.path=opt-30b"])
    lines = []
    with pytest.raises(UserError, match="equally many for each of 8 ranks"):
        lines.extend(line.partition("  ")[0] for line in dry_run(config, num_gpus=8, gpu_memory=24))
    names = lines[:7]
    assert names == ["not checked", "model", "blocks", "disk", "memory", "a GPU", "a way"]


def test_every_token_of_every_label_is_counted(tmp_path):
    """A token is a byte, and a space comes before a label. An example has three rows."""
    write_byte_model(tmp_path / "model")
    tickets = write_tickets(tmp_path / "tickets.csv", num_rows=30)
    labels = ["billing", "bug", "shipping"]
    described = {"prompt": "{text}\nTopic:", "label_field": "topic", "labels": labels}
    values = own_values(tmp_path / "model", train=str(tickets), **described)
    config = config_from_dict({**values, "run_dir": str(tmp_path / "run")}, "the test")
    data = load_task_data(config)
    inputs = memory_plan.measured_inputs(config, replace(data, packed=False))
    assert inputs.targets == sum(1 + len(label) for label in labels)
    assert 2.5 < inputs.rows < 4  # with padding
    # Examples that share rows run fewer tokens, and as many of them count.
    packed = memory_plan.measured_inputs(config, replace(data, packed=True))
    assert packed.targets == inputs.targets and packed.rows <= inputs.rows


@pytest.fixture
def config(tmp_path):
    distributed.init_distributed()
    return load_config(write_recipe(tmp_path), [f"run_dir={tmp_path / 'run'}"])


def test_a_dry_run_checks_the_run_and_prints_the_facts(config):
    facts = {line[:13].strip(): line[14:] for line in dry_run(config)}
    assert facts["blocks"] == "4, of which a step perturbs 2"
    assert re.match(r"of a rank, with inputs of at most \d+ tokens: 0.6", facts["memory"])
    assert facts["disk"].startswith("at most 3 snapshots of 4.29e-05 GB at a time")
    assert re.match(r"about 0:[\d:]+, besides .*: 8 steps of [\d.e-]+ s$", facts["time"])
    assert not Path(config.run_dir).exists() and "not checked" not in facts
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


def test_a_step_is_measured_only_where_the_run_would_be_and_fits(config):
    data = load_task_data(config)
    assert 0 < measured_step(config, data, needed=1) < 10
    assert measured_step(config, data, needed=1e15) is None
    assert "time          not measured" in text_of(config, num_gpus=1)
