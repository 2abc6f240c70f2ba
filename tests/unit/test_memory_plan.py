"""The formula of a rank's memory against measured peaks, and sums by hand; and the dry run."""

from __future__ import annotations

import ctypes
import re
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from assets import write_reader, write_recipe
from own_data import own_values, write_byte_model, write_tickets
from own_memory import forget_peak, needs_peak, peak_memory
from ranks import run_ranks
from tiny_models import FAMILIES
from tiny_runs import write_model
from transformers import OPTConfig

from lezo_ds import distributed
from lezo_ds.checkpoints import snapshots
from lezo_ds.checkpoints.checkpoint import resolve_model
from lezo_ds.config import config_from_dict, load_config
from lezo_ds.data.batches import candidate_batch
from lezo_ds.data.encoding import EncodedExample
from lezo_ds.data.evaluation import evaluate
from lezo_ds.data.objectives import classification_loss
from lezo_ds.data.task_data import load_task_data
from lezo_ds.errors import UserError
from lezo_ds.runs.trainer import make_engine
from lezo_ds.tools import memory_plan, time_plan
from lezo_ds.tools.dry_run import Plan, dry_run
from lezo_ds.tools.memory_plan import CPU_RESERVE, GIB, memory_of_card, rank_memory, received_bytes
from lezo_ds.tools.sizes import InputSizes, measured_inputs, model_sizes
from lezo_ds.tools.time_plan import plan_time

MAX_FILE_BYTES = 150 << 20  # of a snapshot of 330 MB
INPUTS = InputSizes(64, 1, num_labels=2)
AUTOTP = '{"tensor_parallel": {"autotp_size": 4}}'
NO_OFFLOAD = '{"zero_optimization": {"stage": 3, "offload_param": null}}'
KINDS = ("partition_size", "tensor_parallel")
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
        (None, ((5,), (9,)), INPUTS),
        (2, ((5,), (9,)), INPUTS),
        (None, (tuple(range(3, 67)),) * 3, InputSizes(128, rows=3, targets=3 * 64)),
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
    memory = rank_memory(config, model_sizes(config, tmp_path), inputs, world_size=2, on_gpu=False)
    before, peak, with_snapshot = run_ranks(measure_steps, 2, config, options)[0]
    assert memory.total - CPU_RESERVE == pytest.approx(with_snapshot - before, rel=0.2)
    assert memory.total - CPU_RESERVE - memory.parts.get("snapshot", 0) == pytest.approx(
        peak - before, rel=0.2
    )


def memory_of(num_ranks=1, inputs=INPUTS, **changes):
    config = recipe(train__micro_batch_size=1, train__batch_size=num_ranks, **changes)
    return rank_memory(config, model_sizes(config, "opt-30b"), inputs, world_size=num_ranks)


def test_opt_30b_on_one_rank_gathers_nothing_and_copies_a_block_for_each_sign():
    parts = memory_of(zo__update_precision="stochastic").parts
    assert parts["shards"] == 2 * OPT_30B
    assert parts["copies"] == 2 * 2 * BLOCK
    assert not parts.keys() & {"gathered", "low bits"}
    assert memory_of(zo__probes_per_pass=1).parts["copies"] == parts["copies"] / 2


def test_shards_and_low_bits_shrink_with_the_ranks_and_three_blocks_and_the_head_are_gathered():
    parts = memory_of(4).parts
    assert parts["low bits"] == parts["shards"] == 2 * OPT_30B // 4
    assert parts["gathered"] == 2 * (3 * BLOCK + HEAD)
    assert memory_of(4, partition_size=2).parts["shards"] == OPT_30B


def test_a_step_sends_all_weights_under_zero_3_and_sums_of_activations_if_they_are_split():
    config = recipe(train__batch_size=16, train__micro_batch_size=4)
    model, inputs = model_sizes(config, "opt-30b"), InputSizes(64, mean_length=277 / 16)
    weights, activations = (
        received_bytes(config, model, inputs, ranks=4, split=split) for split in (1, 4)
    )
    assert weights == 2 * OPT_30B * 3 // 4
    assert activations == round((2 * 48 + 1) * 2 * 277 * 7168 * 2 * 2 * 3 / 4)


def test_a_dry_run_shows_what_a_rank_receives_and_holds_each_way():
    words = ["model=opt-30b", "task=sst2", "method=lezo", "train.micro_batch_size=4"]
    text = dry_run(load_config("paper", words), num_gpus=4)
    ways = [line[14:] for line in text.splitlines() if line.startswith("a way")]
    assert len(ways) == 5 and "fit" not in "".join(ways)
    # Each of 48 blocks sums two activations of 7168 numbers, and the embedding one, for each of 16
    # examples of 20 tokens at two probes.
    sums = (48 * 2 + 1) * 7168 * 2 * 16 * 20 * 2 * 2 * 3 / 4
    split = next(way for way in ways if "tensor_parallel=4" in way)
    assert split.startswith("train.micro_batch_size=16 tensor_parallel=4: ")
    assert split.endswith(f", receives {sums / 1e9:.3g} GB a step")
    whole = next(way for way in ways if "partition_size=4" in way)
    assert whole.endswith(f", receives {2 * OPT_30B * 3 / 4 / 1e9:.3g} GB a step")


def test_more_probes_in_a_pass_need_more_activations_and_copies_of_one_layer_at_a_time():
    few, many = (
        memory_of(zo__directions=8, zo__probes_per_pass=probes).parts for probes in (2, 16)
    )
    assert (few["copies"], many["copies"]) == (2 * 2 * BLOCK, 2 * 2 * (LAYER + 4 * 7168))
    assert (
        many["activations"] == few["activations"] * 16 / 8
    )  # with 2 probes, the evaluation has more rows


@pytest.mark.parametrize(
    ("kind", "count"), [("lora", 48 * 2 * 2 * 8 * 7168), ("prefix", 48 * 2 * 5 * 7168)]
)
def test_only_an_adapter_has_low_bits_and_copies(kind, count):
    parts = memory_of(peft__kind=kind).parts
    assert parts["low bits"] == 2 * count
    assert parts.get("copies", 0) < 2 * 2 * BLOCK / 100


def test_long_answers_need_the_whole_head_all_logits_and_their_keys_and_values():
    parts = memory_of(
        inputs=replace(INPUTS, num_labels=None, answer_tokens=100, new_tokens=50)
    ).parts
    # Of an evaluation of 8 examples, whose log-probabilities are made of 128 rows at a time.
    assert parts["logits"] == (8 * 100 * 2 + 128 * 8) * 50272
    assert (
        parts["activations"] - memory_of().parts["activations"] == 8 * (64 + 50) * 48 * 2 * 7168 * 2
    )


def ways(gigabytes, num_ranks=4, config=None, family="opt-30b"):
    """Return (ways to share, largest micro-batch, "fits" or not, whether weights are offloaded)."""
    config = config or recipe(train__batch_size=16)
    inputs = replace(INPUTS, mean_length=20)
    plan = Plan(config, model_sizes(config, family), inputs, num_ranks=num_ranks)
    _, *lines = plan.ways(gigabytes)
    found = []
    for _, text in lines:
        keys = dict(key.split("=") for key in text.partition(":")[0].split())
        way = next(f"{key}={keys[key]}" for key in KINDS if key in keys)
        size = int(keys["train.micro_batch_size"])
        found.append((way, size, text.rpartition(", ")[2], "cpu_offload" in text))
    return found


@pytest.mark.parametrize("way", [{}, {"tensor_parallel": 4}, AUTOTP, NO_OFFLOAD])
def test_what_fits_comes_first_and_weights_are_offloaded_only_if_nothing_else_fits(way, tmp_path):
    (tmp_path / "ds.json").write_text(str(way))
    keys = {"deepspeed": str(tmp_path / "ds.json")} if isinstance(way, str) else way
    config = recipe(train__batch_size=16, **keys)
    found = ways(80, config=config)
    assert {way for way, _, verdict, _ in found[:-1] if verdict == "fits"} == {
        "tensor_parallel=2",
        "tensor_parallel=4",
        "partition_size=2",
        "partition_size=4",
    }
    assert found[-1] == ("partition_size=1", 1, "does not fit", False)
    assert ways(16, config=config)[0] == ("partition_size=4", 4, "fits", True)


def test_the_fastest_comes_first_and_every_rank_has_the_same_share():
    found = ways(141, num_ranks=8)
    assert [way for way, *_ in found] == [
        "tensor_parallel=4",
        "tensor_parallel=8",
        "tensor_parallel=2",
        "partition_size=1",
        "partition_size=2",
        "partition_size=4",
        "partition_size=8",
    ]
    assert [size for _, size, *_ in found] == [8, 16, 4, 2, 2, 2, 2]
    assert not any(way.startswith("partition") for way, *_ in ways(141, num_ranks=32))


def test_models_that_autotp_does_not_split_are_listed_with_zero_3_only(tmp_path):
    config = recipe(train__batch_size=16, model__path=str(tmp_path))
    FAMILIES["gpt2"][0].save_pretrained(tmp_path)
    assert {way.partition("=")[0] for way, *_ in ways(80, 2, config, tmp_path)} == {
        "partition_size"
    }


def test_a_line_of_what_fits_is_the_keys_that_run_it():
    """From the paper's recipe for ZeRO-3, or from a JSON that offloads; without its own batch."""
    words = ["model=opt-30b", "task=sst2", "method=lezo"]
    for more in ([], ["deepspeed=zero3_cpu_offload", "train.micro_batch_size=4"]):
        text = dry_run(load_config("paper", [*words, *more]), num_gpus=4, gpu_memory=24)
        facts = [line[14:] for line in text.splitlines() if line.startswith("a way")]
        assert len(facts) > 4
        for fact in facts:
            keys = fact.partition(":")[0].split()
            again = dry_run(load_config("paper", [*words, *more, *keys]), num_gpus=4)
            needed = re.search(r": ([\d.]+ GiB) a rank", fact)[1]
            assert f"tokens (assumed): {needed}: " in again


def test_a_card_has_less_than_it_is_sold_with():
    assert [memory_of_card(size) for size in (24, 20.5)] == [22.5 * GIB, 20.5 * GIB]
    config = recipe(train__batch_size=16, zo__update_precision="stochastic")
    found = {way: verdict for way, _, verdict, _ in ways(24, num_ranks=4, config=config)}
    assert next(way for way, verdict in found.items() if verdict == "fits") == "tensor_parallel=4"


@pytest.mark.parametrize(
    ("task", "method", "length"),
    [("sst2", "lezo", 72), ("squad", "lezo", 896), ("sst2", "icl", 2048)],
)
def test_without_its_data_a_task_has_inputs_of_its_typical_length(task, method, length):
    words = ["model=opt-13b", f"task={task}", f"method={method}"]
    assert f"inputs of at most {length} tokens (assumed)" in dry_run(load_config("paper", words))


def test_a_run_that_does_not_split_is_planned_if_the_question_is_what_fits():
    config = load_config("paper", ["model=opt-30b", "task=sst2", "method=lezo"])
    with pytest.raises(UserError, match="equally many for each of 8 ranks"):
        dry_run(config, num_gpus=8)
    assert "refused       train.batch_size=16 does" in dry_run(config, num_gpus=8, gpu_memory=24)


def test_every_token_of_every_label_is_counted(tmp_path):
    """A token is a byte, and a space comes before a label. An example has three rows."""
    write_byte_model(tmp_path / "model")
    tickets = write_tickets(tmp_path / "tickets.csv", num_rows=30)
    labels = ["billing", "bug", "shipping"]
    values = own_values(
        tmp_path / "model",
        train=str(tickets),
        prompt="{text}\nTopic:",
        label_field="topic",
        labels=labels,
    )
    config = config_from_dict({**values, "run_dir": str(tmp_path / "run")}, "the test")
    data = load_task_data(config)
    inputs = measured_inputs(config, replace(data, packed=False))
    assert inputs.targets == sum(1 + len(label) for label in labels)
    assert (inputs.answer_tokens, inputs.num_labels, inputs.reads_logits) == (9, None, False)
    assert 2.5 < inputs.rows <= 3
    # Examples that share rows run fewer tokens, and as many of them count.
    packed = measured_inputs(config, replace(data, packed=True))
    assert packed.targets == inputs.targets and packed.rows <= inputs.rows
    parts = memory_of(inputs=replace(inputs, targets=21_000)).parts
    head = 2 * 2 * HEAD + (2 * 21_000 * 2 + 128 * 8) * 50272
    assert parts["logits"] == head - parts["copies"] - parts["activations"]
    distributed.init_distributed()
    seconds = {step: dry_run(config, seconds=(step, 0.1)) for step in (9, 11)}
    ways = "labels of one token each (a map in data.labels), train.batch_size=4"
    assert f"faster        {ways}" in seconds[11] and "faster" not in seconds[9]


def test_a_base_in_four_bits_takes_its_codes_and_one_matrix():
    matrices = 48 * 12 * 7168**2  # of the blocks
    lora = 48 * 2 * 2 * 8 * 7168
    keys = {"peft__kind": "lora", "zo__update_precision": "stochastic"}
    for bits in (4, 8):
        parts = memory_of(model__bits=bits, **keys).parts
        stored = OPT_30B + lora - matrices + matrices // 64 * (64 * bits // 16 + 2)
        assert parts["shards"] == pytest.approx(2 * stored, rel=0.001)
        assert parts["dequantized"] == 2 * LAYER
        gathered = memory_of(4, model__bits=bits, **keys).parts["gathered"]
        whole = memory_of(4, **keys).parts["gathered"]
        codes = BLOCK * (bits + 0.5) / 16
        assert gathered < whole
        assert gathered == pytest.approx(2 * max(HEAD + 3 * codes, 2 * HEAD), rel=0.02)
    assert "dequantized" not in memory_of(**keys).parts


def test_a_dry_run_checks_all_but_the_weights_and_prints_the_facts(tmp_path):
    path = write_recipe(tmp_path)
    distributed.init_distributed()
    text = dry_run(load_config(path, [f"run_dir={tmp_path / 'run'}"]))
    facts = {line[:13].strip(): line[14:] for line in text.splitlines()}
    assert facts["a step"] == "4 micro-batches of 2 examples, on 1 ranks; 8 steps"
    assert facts["blocks"] == "4 in model.decoder.layers, 2 dropped per step"
    assert facts["memory"].startswith("of a rank, with inputs of at most 24 tokens: 0.6")
    assert facts["disk"].startswith("8.58e-05 GB: snapshots, 2 of 4.29e-05 GB")
    time_of_run = r"about 0:[\d:]+, besides .*: 8 steps of [\d.]+ s, 3 validations of 0:[\d:]+"
    assert re.match(time_of_run, facts["time"])
    assert facts["first example"].startswith('"<s> the ')
    assert not (tmp_path / "run").exists() and "not checked" not in text
    with pytest.raises(UserError, match="drops all 4 blocks"):
        dry_run(load_config(path, ["run_dir=none", "zo.sparsity=1", "zo.only_blocks=true"]))


def seconds_of_steps(config):
    """Return the planned seconds of a step and of an example, and those of the real model."""
    distributed.init_distributed()
    data = load_task_data(config)
    engine = make_engine(config)
    planned = plan_time(config, resolve_model(config.model.path), data, engine.layout.num_blocks)
    times = []
    for step in range(6):
        start = time.perf_counter()
        engine.train_batch(data.step_batch(config, step), data.loss)
        middle = time.perf_counter()
        evaluate(engine, data, data.dev, config.train.eval_batch_size)
        times.append((middle - start, (time.perf_counter() - middle) / len(data.dev.examples)))
    return planned, tuple(map(min, zip(*times, strict=True)))


@pytest.mark.distributed
@pytest.mark.parametrize("more", [["zo.only_blocks=true", "zo.layer_policy=fixed"], []])
def test_the_time_of_steps_and_scores_is_near_that_of_the_real_model(more, tmp_path):
    config = load_config(
        write_recipe(tmp_path), [f"run_dir={tmp_path / 'run'}", "zo.sparsity=0.75", *more]
    )
    write_reader(tmp_path / "model", num_blocks=24)
    for planned, real in run_ranks(seconds_of_steps, 2, config):
        # Another process may take the processor meanwhile. A step of two blocks takes a tenth of
        # the time.
        assert all(real[i] / 4 < planned[i] < real[i] * 4 for i in (0, 1)), (planned, real)


def folders_of_planned_models(config, root):
    """Plan the time with a temporary directory for each rank, as ranks on different nodes have."""
    distributed.init_distributed()
    own = root / f"node-{distributed.rank()}"
    own.mkdir()
    tempfile.tempdir = str(own)
    folders = []

    def make_and_note(changed):
        folders.append(Path(changed.model.path).parent)
        return make_engine(changed)

    time_plan.make_engine = make_and_note
    data = load_task_data(config)
    plan_time(config, resolve_model(config.model.path), data, num_blocks=4)
    return folders, list(own.iterdir())


@pytest.mark.distributed
def test_each_node_measures_a_model_in_its_own_temporary_directory(tmp_path):
    config = load_config(write_recipe(tmp_path), [f"run_dir={tmp_path / 'run'}"])
    found = run_ranks(folders_of_planned_models, 2, config, tmp_path)
    # Nothing is left there.
    assert found == [([tmp_path / f"node-{rank}"], []) for rank in (0, 1)]
