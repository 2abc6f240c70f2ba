"""Weights that DeepSpeed's AutoTP splits have the bits of one rank, and only activations travel."""

from dataclasses import replace

import pytest
import torch
from assets import write_recipe
from commands import run_forked_well
from deepspeed import comm
from deepspeed.comm.comm import comms_logger
from eager_noise import draw
from family_models import small_config
from ranks import run_ranks
from run_ends import num_steps, results_of
from thorough import thorough
from tiny_adapters import peft_config
from tiny_models import FAMILIES, NUM_BLOCKS, VOCABULARY
from tiny_runs import make_batch, start_engine, train, write_model
from torch import nn
from transformers import AutoModelForCausalLM, OPTConfig

from lezo_ds.config import config_from_dict
from lezo_ds.config.deepspeed import ds_config_of, load_ds_config
from lezo_ds.errors import DesyncError, UserError
from lezo_ds.forward.probes import AT_THETA, Perturbation
from lezo_ds.journal import read_journal
from lezo_ds.sharding.tensor_parallel import check_that_it_runs
from lezo_ds.zo.passes import KeyedProbe

pytestmark = pytest.mark.distributed

WHOLE_VOCABULARY = ("phi", "gemma", "gemma2")
"""The head has a bias, or the embedding a scale, which DeepSpeed's split layers do not have."""
SPLIT = ("opt", "opt_projected", "llama", "qwen2", "qwen3", "gpt_neox", *WHOLE_VOCABULARY)
PROBES = (KeyedProbe((7,), 1e-2), KeyedProbe((9,), -2e-2))
DROPPED = 1
NOT_SPLIT = "_Failing does not run .*; fix: remove tensor_parallel"


def start(directory, size, dtype="fp32", num_ranks=2, **changes):
    """Return an engine whose weights `size` ranks split, or ZeRO-3 shards (0)."""
    split = {"tensor_parallel": {"autotp_size": size}, "zero_optimization": {"stage": 0}}
    return start_engine(directory, dtype, num_ranks, ds_changes=split if size else (), **changes)


@torch.no_grad()
def _families(directories):
    (batch,), outputs = make_batch(0, 1, vocabulary=VOCABULARY), []
    for directory in directories:
        engine = start(directory, 2)
        own = [(p.name, p.elements.parameter_id, p.block) for p in engine.weights.shards]
        matrices = [p for p in engine.weights.shards if p.block < NUM_BLOCKS and len(p.shape) == 2]
        assert all(2 * p.count == p.numel for p in matrices)
        tables = [p for p in engine.weights.shards if p.shape[0] in (VOCABULARY, VOCABULARY + 1)]
        shares = {round(p.numel / p.count) for p in tables}
        assert shares == {1 if directory.endswith(WHOLE_VOCABULARY) else 2}
        change = Perturbation(PROBES, frozenset({DROPPED}))
        whole = replace(batch, selection=None)
        runs = [engine.run(each, change) + engine.run(each, AT_THETA) for each in (batch, whole)]
        outputs.append((*runs, own))
    return outputs


@torch.no_grad()
def test_split_families_have_the_logits_of_plain_transformers(tmp_path):
    configs = {family: FAMILIES[family][0] for family in SPLIT}
    uneven = configs["opt"].to_dict() | {"vocab_size": VOCABULARY + 1}
    configs["opt"] = OPTConfig(**uneven)
    directories = [str(write_model(configs[family], tmp_path / family)) for family in SPLIT]
    (batch,) = make_batch(0, 1, vocabulary=VOCABULARY)
    chosen = batch.selection
    for directory, found in zip(directories, run_ranks(_families, 2, directories)[0], strict=True):
        *outputs, own = found
        for probe, output, full in zip((*PROBES, KeyedProbe((0,), 0.0)), *outputs, strict=True):
            model = AutoModelForCausalLM.from_pretrained(directory).eval()
            parameters = dict(model.named_parameters())
            for name, parameter_id, block in own:
                z = draw("normal", probe.key, parameter_id, 0, parameters[name].numel())
                parameters[name] += (block != DROPPED) * probe.scale * z.view_as(parameters[name])
            logits = model(**batch.inputs).logits
            near = 1e-5 * float(logits.abs().max())
            torch.testing.assert_close(full, logits, rtol=0, atol=near)
            selected = logits[chosen.rows, chosen.positions][:, chosen.vocabulary]
            torch.testing.assert_close(output, selected, rtol=0, atol=near)


@pytest.fixture(scope="module")
def opt(tmp_path_factory):
    return str(write_model(FAMILIES["opt"][0], tmp_path_factory.mktemp("opt")))


def _run(directory, size, num_ranks, settings, snapshots, records=()):
    """Train, or replay records; return base, results of the steps, and final digest."""
    engine = start(directory, size, num_ranks=num_ranks, weight_decay=0.1, **settings)
    engine.watch_weights()
    if records:
        engine.load_checkpoint(snapshots, records)
    else:
        records = train(engine, 3, vocabulary=VOCABULARY)
        engine.check_weights()
        engine.save_checkpoint(snapshots)
        records += train(engine, 3, vocabulary=VOCABULARY)
    engine.check_weights()
    return engine.base.fingerprint, records, engine.weights.digest()


@pytest.mark.parametrize(
    ("dtype", "precision", "kind", "rank"),
    [
        ("bf16", "fp32_master", "none", 0),
        thorough("bf16", "stochastic", "lora", 0),
        thorough("bf16", "fp32_master", "none", 2),
        ("fp32", "stochastic", "lora", 2),
    ],
)
def test_a_journal_gives_the_same_bits_in_any_layout(dtype, precision, kind, rank, opt, tmp_path):
    settings = {"dtype": dtype, "update_precision": precision}
    settings |= {"noise_rank": rank, "directions": 1 + rank}
    if kind == "lora":
        targets = {"lora_targets": "v_proj,out_proj,fc1"}
        settings["peft"] = peft_config(kind).model_copy(update=targets)
    ((base, records, digest),) = run_ranks(_run, 1, opt, 0, 1, settings, tmp_path / "alone")
    # Two ranks split the weights; tests of ZeRO-3 have none.
    for num_ranks in (2, 4) if kind == "none" else (2,):
        layout = (opt, 2, num_ranks, settings, tmp_path / "absent", records)
        for found in run_ranks(_run, num_ranks, *layout):
            assert (found[0], found[2]) == (base, digest), num_ranks
    # Its own run has nearly the same losses, and snapshots from which ZeRO-3 resumes.
    own = tmp_path / "own"
    first, second = run_ranks(_run, 2, opt, 2, 2, settings, own)
    assert first == second
    tolerance = 1e-5 if dtype == "fp32" else 2e-2
    assert [r.loss for r in first[1]] == pytest.approx([r.loss for r in records], rel=tolerance)
    (resumed,) = run_ranks(_run, 1, opt, 0, 1, settings, own, first[1])
    assert resumed[2] == first[2]


def _train_after_a_split_engine(directory):
    sizes = []
    for split in (0, 2, 0):
        engine = start(directory, split)
        sizes.append((train(engine, 1, vocabulary=VOCABULARY), engine.weights.shards[0].count))
    return sizes


def test_an_engine_of_zero_3_after_one_that_splits_weights_is_that_of_a_new_process(opt):
    for first, _, last in run_ranks(_train_after_a_split_engine, 2, opt):
        assert first == last


@torch.no_grad()
def _count_bytes(directory):
    """Return the bytes that a pass at two probes passes to each operation of deepspeed.comm."""
    engine = start(directory, 2)
    (batch,) = make_batch(0, 1, examples=6, vocabulary=VOCABULARY)
    comm.configure(enabled=True, prof_all=True, verbose=False)
    engine.run(batch, Perturbation(PROBES))
    counts = {
        operation: sum(size * entry[0] for size, entry in sizes.items())
        for operation, sizes in comms_logger.get_raw_data().items()
    }
    return counts, batch.inputs["input_ids"].numel(), batch.selection.vocabulary.numel()


def test_a_pass_sums_embeddings_two_activations_a_block_and_the_heads_rows_that_are_read(opt):
    counts, num_tokens, num_entries = run_ranks(_count_bytes, 2, opt)[0]
    num_rows = len(PROBES) * ((1 + NUM_BLOCKS * 2) * num_tokens + num_entries)
    assert counts == {"all_reduce": num_rows * FAMILIES["opt"][0].hidden_size * 4}


def _spoil(directory, name, element):
    engine = start(directory, 2)
    engine.watch_weights()
    train(engine, 1, vocabulary=VOCABULARY)
    (parameter,) = [p for p in engine.weights.shards if p.name == name]
    if engine.global_rank == 1:
        parameter.stored()[element] += 1
    with pytest.raises(DesyncError, match=f"on rank 1 {name}"):
        engine.check_weights()


@pytest.mark.parametrize(
    ("name", "element"), [("layers.1.fc2", slice(None)), ("final_layer_norm", slice(0, 1))]
)
def test_a_changed_weight_is_found_split_or_not(name, element, opt):
    run_ranks(_spoil, 2, opt, f"model.decoder.{name}.weight", element)


def _refused(directory, size, text):
    with pytest.raises(UserError, match=f"{text}.*ZeRO-3"):
        start(directory, size, num_ranks=size)


@pytest.mark.parametrize(
    ("family", "size", "text"),
    [
        ("gpt2", 2, "AutoTP does not support GPT2LMHeadModel"),
        ("llama", 4, "4 cannot split 4 heads and 2 of .* evenly; fix: use a divisor of 2"),
        ("dbrx", 2, "2 cannot split 4 heads and 1 of keys and values evenly; fix: remove"),
        ("falcon_mamba", 2, "2 cannot split 0 heads and 0 of keys and values evenly; fix: remove"),
        ("bloom", 2, "BloomForCausalLM does not run"),
        ("gemma3n_text", 2, "Gemma3nForCausalLM would compute something else"),
        ("stablelm", 2, "StableLmForCausalLM would compute something else"),
    ],
)
def test_what_cannot_be_split_is_refused_and_zero_3_is_named(family, size, text, tmp_path):
    config = small_config(family)
    config.qk_layernorm = True  # of StableLM 2 12B
    directory = str(write_model(config, tmp_path))
    run_ranks(_refused, size, directory, size, text)


class _Failing(nn.Module):
    """A model whose forward pass raises an error."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, input_ids):
        raise self.error


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "CUDA out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "can't allocate memory"),
        (RuntimeError("[gloo/tcp/pair.cc:525] Connection closed by peer"), "closed by peer"),
        (RuntimeError("CUDA error: an illegal memory access"), "an illegal memory access"),
        # Heads that are not split: of Falcon, of Bloom, of Recurrent Gemma, and of others.
        (RuntimeError("shape '[1, 2, 4, 4]' is invalid for input of size 24"), NOT_SPLIT),
        (RuntimeError("The expanded size of the tensor (2) must match"), NOT_SPLIT),
        (RuntimeError("Given groups=32, weight of size [32, 1, 4], expected input"), NOT_SPLIT),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), NOT_SPLIT),
    ],
)
def test_only_heads_that_are_not_split_are_blamed_on_tensor_parallelism(error, found):
    kind = UserError if found == NOT_SPLIT else type(error)
    with pytest.raises(kind, match=found):
        check_that_it_runs(_Failing(error))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel=3 does not divide 4 ranks"),
        ({"tensor_parallel": 2, "partition_size": 1}, "partition_size and peft.kind=prefix need"),
        ({"tensor_parallel": 2, "peft": {"kind": "prefix"}}, "peft.kind=prefix need ZeRO-3"),
        ({"tensor_parallel": 2, "deepspeed": "zero3_cpu_offload"}, "offloads them; fix: set"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, text):
    values = {"run_dir": "r", "model": {"path": "m", "dtype": "bf16"}, "train": {"steps": 1}}
    config = config_from_dict(values | changes, "the test")
    with pytest.raises(UserError, match=text):
        ds_config_of(config, 4)


@pytest.mark.parametrize("zero", [{"stage": 3, "overlap_comm": True}, {"stage": 0}])
def test_the_key_replaces_what_the_json_says_of_sharding_and_leaves_the_rest(zero):
    monitor = {"enabled": True, "output_path": "x"}
    ds_config = {"zero_optimization": zero, "csv_monitor": monitor}
    split = load_ds_config(ds_config, "fp32", 4, 2, tensor_parallel=2)
    assert split["zero_optimization"] == {"stage": 0}
    assert (split["tensor_parallel"], split["csv_monitor"]) == ({"autotp_size": 2}, monitor)


def test_a_run_is_read_by_one_rank_goes_on_under_zero_3_and_is_exported(tmp_path):
    recipe, run_dir = write_recipe(tmp_path), tmp_path / "run"
    command = ["--config", recipe, f"run_dir={run_dir}", "train.eval_every=2"]
    command += ["train.snapshot_every=2"]
    split = ["train.steps=4", "deepspeed=null", "tensor_parallel=2"]
    run_forked_well([*command, *split], num_ranks=2)
    header = read_journal(run_dir / "journal.jsonl").header
    assert header.arithmetic["tensor_parallel"] == "2"
    assert header.config["tensor_parallel"] == 2
    read, shown = ["--run", run_dir, "--step", "4"], tmp_path / "data" / "validation.jsonl"
    said = run_forked_well([*read, "--out", tmp_path / "exported"], program="export")
    assert "the same as in the run" in said.err
    run_forked_well([*read, shown, "--out", tmp_path / "labelled.jsonl"], program="predict")
    run_forked_well(read, program="evaluate", num_ranks=2)
    messages = run_forked_well([*command, "train.steps=6"])
    assert num_steps(run_dir) == 6
    assert "tensor_parallel was '2'" in str(messages)
    assert results_of(run_dir)["finished"]
