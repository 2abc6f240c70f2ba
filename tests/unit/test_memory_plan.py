"""The formula of a rank's memory against measured peaks, and sums by hand; and the dry run."""

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
from lezo_ds.data.objectives import classification_loss
from lezo_ds.data.task_data import load_task_data
from lezo_ds.errors import UserError
from lezo_ds.runs.trainer import make_engine
from lezo_ds.tasks.base import EncodedExample
from lezo_ds.tools import memory_plan
from lezo_ds.tools.dry_run import dry_run, measured_step
from lezo_ds.tools.memory_plan import CPU_RESERVE, GIB, Plan, memory_of_card
from lezo_ds.tools.sizes import InputSizes, ModelSizes, measured_inputs

MAX_FILE_BYTES = 150 << 20  # of a snapshot of 330 MB
INPUTS = InputSizes(64, mean_length=20)
SST2 = InputSizes(72, mean_length=15)
AUTOTP = '{"tensor_parallel": {"autotp_size": 4}}'
NO_OFFLOAD = '{"zero_optimization": {"stage": 3, "offload_param": null}}'
OPT_30B = 29_974_540_288
LAYER, BLOCK, HEAD = 7168 * 4 * 7168, 616_655_872, 50272 * 7168  # the head is tied


def recipe(path="opt-30b", **changes):
    """Return a run of 8 examples a step. Changes are keys with __ for the dot."""
    values = {"run_dir": "none", "model.path": str(path), "model.dtype": "fp16"}
    values |= {"zo.learning_rate": 1e-6, "zo.sparsity": 0.5, "train.steps": 10}
    values |= {"train.batch_size": 8, "train.micro_batch_size": 8, "train.eval_batch_size": 8}
    return config_from_dict(
        values | {k.replace("__", "."): v for k, v in changes.items()}, "the test"
    )


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
    peak = peak_memory()
    engine.save_checkpoint(Path(config.run_dir))
    return before, peak, peak_memory()


@pytest.mark.distributed
@needs_peak
@pytest.mark.parametrize(
    ("split", "options", "inputs"),
    [
        thorough(None, ((5,), (9,)), INPUTS),
        thorough(2, ((5,), (9,)), INPUTS),
        thorough(None, (tuple(range(3, 67)),) * 3, InputSizes(128, 128, rows=3, targets=3 * 64)),
    ],
    ids=["ZeRO-3", "tensor parallelism", "long answers"],
)
def test_the_formula_is_within_a_fifth_of_the_measured_peak(
    split, options, inputs, tmp_path, monkeypatch
):
    monkeypatch.setattr(memory_plan, "MAX_FILE_BYTES", MAX_FILE_BYTES)
    sizes = {
        "hidden_size": 1024,
        "word_embed_proj_dim": 1024,
        "ffn_dim": 4096,
        "num_hidden_layers": 5,
    }
    shape = OPTConfig(vocab_size=20000, num_attention_heads=4, max_position_embeddings=128, **sizes)
    write_model(shape, tmp_path)
    changes = {"model__dtype": "fp32", "run_dir": str(tmp_path / "run"), "tensor_parallel": split}
    config = recipe(tmp_path, train__micro_batch_size=4, **changes)
    plan = plan_of(config, 2, inputs, tmp_path, on_gpu=False)
    before, peak, with_snapshot = run_ranks(measure_steps, 2, config, options)[0]
    planned = plan.peak - CPU_RESERVE
    assert planned == pytest.approx(with_snapshot - before, rel=0.2)
    assert planned - plan.memory["snapshot"] == pytest.approx(peak - before, rel=0.2)


@pytest.mark.parametrize(
    ("bits", "num_ranks", "gib"),
    [(None, 1, 3.27), (8, 1, 2.22), (4, 1, 1.65), (None, 2, 2.53), (8, 2, 1.87), (4, 2, 1.54)],
)
def test_the_formula_is_within_a_tenth_of_the_peaks_of_the_page_of_results(bits, num_ranks, gib):
    config = recipe(model__dtype="bf16", model__bits=bits, peft__kind="lora")
    plan = plan_of(config, num_ranks, source="opt-1.3b", on_gpu=False)
    assert plan.peak / GIB == pytest.approx(gib, rel=0.1)


PAGE = """
4  30.8  1.0  tensor_parallel=4 train.micro_batch_size=16 zo.update_precision=fp32_master
4  16.8  1.0  tensor_parallel=4 train.micro_batch_size=16
8  16.8  1.2  tensor_parallel=8 train.micro_batch_size=16 zo.update_precision=fp32_master
8   9.8  1.2  tensor_parallel=8 train.micro_batch_size=16
2  59.4  0.7  tensor_parallel=2 train.micro_batch_size=16 zo.update_precision=fp32_master
2  31.4  0.7  tensor_parallel=2 train.micro_batch_size=16
2  36.6  30   train.micro_batch_size=8
4  22.6  45   train.micro_batch_size=4
8  30.8  0.5  tensor_parallel=4 train.micro_batch_size=8 zo.update_precision=fp32_master
8  22.6  45   partition_size=4 train.micro_batch_size=2
4   8.7  45   deepspeed=zero3_cpu_offload train.micro_batch_size=4
"""
"""Ranks, GiB that each holds, GB that it receives in a step, and keys: the page of OPT-30b."""


@pytest.mark.parametrize("line", PAGE.strip().splitlines())
def test_the_page_of_opt_30b_has_the_figures_of_the_plan(line):
    num_ranks, gib, received, *keys = line.split()
    words = ["model=opt-30b", "task=sst2", "method=lezo", *keys]
    plan = plan_of(load_config("paper", words), int(num_ranks), SST2)
    assert f"{plan.peak / GIB:.1f}" == gib
    assert plan.received() / 1e9 == pytest.approx(float(received), rel=0.05)
    # Pinned memory comes in powers of two.
    is_offloaded = "offload" in line
    assert plan.in_host == (is_offloaded and pytest.approx(18.26 * GIB, rel=0.001))
    assert plan.snapshot == OPT_30B * (4 if "fp32_master" in line else 2)


@pytest.mark.parametrize(
    ("num_ranks", "changes", "expected"),
    [
        # A GPU that holds the model gathers nothing, and copies a block for each sign.
        (1, {}, {"weights": 2 * OPT_30B, "gathered": 0, "copies": 2 * 2 * BLOCK}),
        (1, {"zo__update_precision": "stochastic"}, {"weights": 2 * OPT_30B, "low bits": 0}),
        (1, {"zo__probes_per_pass": 1}, {"copies": 2 * BLOCK}),
        # Of more probes, too, two copies of a block are in memory.
        (1, {"zo__directions": 8, "zo__probes_per_pass": 16}, {"copies": 2 * 2 * BLOCK}),
        # Three blocks and the tied head are gathered.
        (4, {}, {"weights": OPT_30B / 2, "low bits": OPT_30B / 2}),
        (4, {}, {"gathered": 2 * (3 * BLOCK + HEAD)}),
        (4, {"partition_size": 2}, {"weights": OPT_30B}),
        # Only an adapter has low bits, and copies of its own size.
        (1, {"peft__kind": "lora"}, {"low bits": 2 * 48 * 2 * 2 * 8 * 7168}),
        (1, {"peft__kind": "lora"}, {"copies": 2 * 2 * 2 * 2 * 8 * 7168}),
        (1, {"peft__kind": "prefix"}, {"low bits": 2 * 48 * 2 * 5 * 7168}),
        # Directions of rank 1 are two vectors for each of six matrices, in half of the blocks.
        (
            4,
            {"zo__noise_rank": 1, "zo__examples_per_direction": 2, "zo__directions": 3},
            {"copies": 2 * 2 * 3 * 24 * (4 * 2 + 2 * 5) * 7168},
        ),
    ],
)
def test_the_terms_are_sums_by_hand(num_ranks, changes, expected):
    config = recipe(train__micro_batch_size=1, train__batch_size=num_ranks, **changes)
    memory = plan_of(config, num_ranks).memory
    assert {name: memory[name] for name in expected} == expected


def test_answers_need_logits_a_head_for_each_sign_and_their_keys_and_values():
    inputs = replace(INPUTS, targets=2000, new_tokens=50)
    plan = plan_of(recipe(train__micro_batch_size=4), inputs=inputs)
    # Log-probabilities are made of 128 rows at a time, in two float32 tensors.
    logits = (2 + 8) * 128 * 50272 + 2 * 2 * HEAD
    memory = plan.memory
    assert memory["logits"] == logits - memory["activations"]
    assert memory["answers"] == 8 * (64 + 50) * 48 * 2 * 7168 * 2


@pytest.mark.parametrize("bits", [4, 8])
def test_a_base_in_few_bits_takes_its_codes_and_one_matrix(bits):
    matrices = 48 * 12 * 7168**2  # of the blocks
    lora = 48 * 2 * 2 * 8 * 7168
    config = recipe(model__bits=bits, peft__kind="lora", train__micro_batch_size=2)
    memory = plan_of(config, 4).memory
    stored = OPT_30B + lora - matrices + matrices // 64 * (64 * bits // 16 + 2)
    assert memory["weights"] == pytest.approx(2 * stored / 4, rel=0.001)
    assert memory["dequantized"] == 2 * LAYER
    codes = BLOCK * (bits + 0.5) / 16
    assert memory["gathered"] == pytest.approx(2 * max(HEAD + 3 * codes, 2 * HEAD), rel=0.02)


def ways(gigabytes, num_ranks=4, config=None, source="opt-30b"):
    """Return (way to share, largest micro-batch, whether it fits, DeepSpeed JSON) of each way."""
    plan = plan_of(config or recipe(train__batch_size=16), num_ranks, source=source)
    gpu_bytes = memory_of_card(gigabytes)
    found = []
    for way in plan.ways(gpu_bytes):
        keys = way.keys_from(plan.config)
        shared = [key for key in ("tensor_parallel", "partition_size") if keys.get(key, 1) != 1]
        name = f"{shared[0]}={keys[shared[0]]}" if shared else "partition_size=1"
        found.append((name, keys["train.micro_batch_size"], way.fits(gpu_bytes)))
    return found


@pytest.mark.parametrize("way", [{}, {"tensor_parallel": 4}, AUTOTP, NO_OFFLOAD])
def test_what_fits_comes_first(way, tmp_path):
    (tmp_path / "ds.json").write_text(str(way))
    keys = {"deepspeed": str(tmp_path / "ds.json")} if isinstance(way, str) else way
    found = ways(80, config=recipe(train__batch_size=16, **keys))
    assert {way for way, _, fits in found[:-1] if fits} == {
        "tensor_parallel=2",
        "tensor_parallel=4",
        "partition_size=2",
        "partition_size=4",
    }
    assert found[-1] == ("partition_size=1", 1, False)


def test_the_fastest_comes_first_and_every_rank_has_the_same_share(tmp_path):
    assert [(way, size) for way, size, _ in ways(141, num_ranks=8)] == [
        ("tensor_parallel=4", 8),
        ("tensor_parallel=8", 16),
        ("tensor_parallel=2", 4),
        ("partition_size=1", 2),
        ("partition_size=2", 2),
        ("partition_size=4", 2),
        ("partition_size=8", 2),
    ]
    assert not any(way.startswith("partition") for way, *_ in ways(141, num_ranks=32))
    # AutoTP does not split this model.
    FAMILIES["gpt2"][0].save_pretrained(tmp_path)
    config = recipe(tmp_path, train__batch_size=16)
    assert {way for way, *_ in ways(80, 2, config, tmp_path)} == {
        "partition_size=1",
        "partition_size=2",
    }


@pytest.mark.parametrize("more", [[], ["deepspeed=zero3_cpu_offload", "train.micro_batch_size=4"]])
def test_a_line_of_a_way_is_the_keys_that_run_it(more):
    """From the paper's recipe for ZeRO-3, or from a JSON that offloads; without its own batch."""
    words = ["model=opt-30b", "task=sst2", "method=lezo", *more]
    lines = text_of(load_config("paper", words), num_gpus=4, gpu_memory=16).splitlines()
    facts = [line[14:] for line in lines if line.startswith("a way")]
    assert len(facts) > 4
    # Nothing fits on the GPUs alone.
    assert "zero3_cpu_offload" in facts[0] or more
    for fact in facts:
        keys = fact.partition(":")[0].split()
        again = text_of(load_config("paper", [*words, *keys]), num_gpus=4)
        needed = re.search(r": ([\d.]+ GiB.*) a rank, rec", fact)[1]
        assert f"tokens (assumed): {needed}: " in again


def test_a_card_has_less_than_it_is_sold_with():
    assert [memory_of_card(size) for size in (24, 20.5)] == [22.5 * GIB, 20.5 * GIB]
    config = recipe(train__batch_size=16, zo__update_precision="stochastic")
    assert ways(24, config=config)[0] == ("tensor_parallel=4", 16, True)


@pytest.mark.parametrize(
    ("task", "method", "length"),
    [("sst2", "lezo", 72), ("squad", "lezo", 896), ("sst2", "icl", 2048)],
)
def test_without_its_data_a_task_has_inputs_of_its_typical_length(task, method, length):
    words = ["model=opt-13b", f"task={task}", f"method={method}"]
    assert f"inputs of at most {length} tokens (assumed)" in text_of(load_config("paper", words))


def test_a_run_that_does_not_split_is_planned_if_the_question_is_what_fits():
    config = load_config("paper", ["model=opt-30b", "task=sst2", "method=lezo"])
    with pytest.raises(UserError, match="equally many for each of 8 ranks"):
        text_of(config, num_gpus=8)
    assert "refused       train.batch_size=16 does" in text_of(config, num_gpus=8, gpu_memory=24)


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
    assert not inputs.reads_logits
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
    assert facts["disk"] == "at most 3 snapshots of 4.29e-05 GB at a time"
    assert re.match(r"about 0:[\d:]+, besides .*: 8 steps of [\d.e-]+ s$", facts["time"])
    assert facts["first example"].startswith('"<s> the ')
    assert not Path(config.run_dir).exists() and not facts.keys() & {"not checked", "faster"}
    assert "faster        labels of one" in text_of(config, step_seconds=11)
    with pytest.raises(UserError, match="drops all 4 blocks"):
        zo = replace(config.zo, sparsity=1, only_blocks=True)
        text_of(replace(config, zo=zo))


def test_a_step_is_measured_only_where_the_run_would_be_and_fits(config, monkeypatch):
    data = load_task_data(config)
    plan = plan_of(config, 1, measured_inputs(config, data), Path(config.model.path), on_gpu=False)
    assert 0 < measured_step(plan, data) < 10
    assert measured_step(replace(plan, on_gpu=True), data) is None
    assert measured_step(replace(plan, num_ranks=2), data) is None
    monkeypatch.setattr(distributed, "free_memory", lambda: plan.peak - 1)
    assert "time          not measured" in text_of(config)
