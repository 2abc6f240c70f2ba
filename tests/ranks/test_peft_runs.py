"""What holds of training any adapter: only it moves, in the blocks kept; every step of it comes back."""

from __future__ import annotations

import json
import shutil
from functools import cache

import pytest
import torch
from commands import assert_one_error, run_forked, run_forked_well
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_adapters import peft_config, start_engine, train, write_families
from tiny_runs import NUM_BLOCKS, VOCABULARY, full_weights
from tiny_runs import start_engine as start_plain_engine

from lezo_ds.errors import UserError
from lezo_ds.model.snapshots import read_manifest, snapshot_path

pytestmark = pytest.mark.distributed

KINDS = ("lora", "prefix")
CASES = [
    *((kind, "bf16") for kind in KINDS),
    *(pytest.param(kind, "fp32", marks=pytest.mark.long) for kind in KINDS),  # see test_resumption
]
BLOCKS = "model.decoder.layers"
FAMILIES_TRAINED = ("opt", "llama", "mistral", "qwen2", "qwen3", "gpt_neox", "gpt2")
NUM_STEPS = 5
SAVED_AT = 2


def _bits(parameter):
    with parameter.shard() as shard:  # without the padding, which is uninitialised memory
        return shard.clone().view(torch.uint8)


def _watch_steps(directory, root, kind, dtype, num_ranks):
    """Train; return records, weights around each step, if the base is kept, and the adapter's names."""
    engine = start_engine(directory, peft_config(kind), dtype, num_ranks)
    base = engine.weights.base_parameters
    bits = [_bits(p) for p in base]
    records, weights = [], [full_weights(engine)]
    for step in range(1, NUM_STEPS + 1):
        records += train(engine, 1, VOCABULARY)
        weights.append(full_weights(engine))
        if step == SAVED_AT:
            engine.save_checkpoint(root)
    base_kept = all(torch.equal(_bits(p), old) for p, old in zip(base, bits, strict=True))
    own = [p.name for p in engine.weights.adapter_parameters]
    return records, weights, base_kept, own


@pytest.fixture(scope="module")
def watched(opt_directory, tmp_path_factory):
    """Return, for a case, the folder of its snapshots and what `_watch_steps` returned on each rank."""

    @cache
    def case(kind, dtype, num_ranks):
        root = tmp_path_factory.mktemp(kind)
        return root, run_ranks(_watch_steps, num_ranks, opt_directory, root, kind, dtype, num_ranks)

    return case


@pytest.mark.parametrize(("kind", "dtype"), CASES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_models_own_shards_keep_every_bit_and_half_of_the_blocks_adapters_move(
    watched, kind, dtype, num_ranks
):
    for records, weights, base_kept, own in watched(kind, dtype, num_ranks)[1]:
        assert base_kept
        for record, before, after in zip(records, weights, weights[1:], strict=False):
            moved = {
                name.removesuffix(".low")
                for name in before
                if not torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8))
            }
            dropped = tuple(f"{BLOCKS}.{block}." for block in record.dropped_layers)
            assert len(dropped) == NUM_BLOCKS // 2
            assert moved == {name for name in own if not name.startswith(dropped)}
            assert len(moved) == len(own) // 2


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_only_the_adapter_has_low_bits(watched, kind, dtype):
    _, ((_, weights, _, own),) = watched(kind, dtype, 1)
    low = {name.removesuffix(".low") for name in weights[0] if name.endswith(".low")}
    assert low == (set(own) if dtype == "bf16" else set())


def _bases(directory):
    adapters = [start_engine(directory, peft_config(kind)).base for kind in KINDS]
    return start_plain_engine(directory).base, adapters


def test_the_fingerprint_is_the_base_models_and_the_table_holds_the_adapters_names(opt_directory):
    ((plain, bases),) = run_ranks(_bases, 1, opt_directory)
    assert {base.fingerprint for base in bases} == {plain.fingerprint}
    assert len({plain.table_hash, *(base.table_hash for base in bases)}) == 3


# Snapshots. See test_resumption for runs that come back.


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_a_snapshot_holds_the_adapter_its_low_bits_and_no_weights_of_the_model(watched, kind, dtype):
    root, ((_, weights, _, own), _) = watched(kind, dtype, 2)
    directory = snapshot_path(root, SAVED_AT)
    config, file, prefix = {
        "lora": ("adapter_config.json", "adapter_model.safetensors", "base_model.model."),
        "prefix": ("prefix_config.json", "prefix.safetensors", ""),
    }[kind]
    low = {"low_bits/model-00001.safetensors", "low_bits/model.safetensors.index.json"}
    assert set(read_manifest(directory)["files"]) == {config, file} | (low if dtype == "bf16" else set())
    stored = load_file(directory / file)
    assert stored.keys() == {prefix + name for name in own}
    assert all(torch.equal(stored[prefix + name], weights[SAVED_AT][name]) for name in own)


def _first_values_of_another_machine(directory, root, num_ranks):
    """Train from first values that this engine itself would not compute; return records and a digest."""
    engine = start_engine(directory, peft_config("prefix"), num_ranks=num_ranks)
    for parameter in engine.weights.adapter_parameters:
        with parameter.shard(write=True) as shard:
            shard.mul_(1 + 2.0**-20)
    engine.save_checkpoint(root)
    return train(engine, 2, VOCABULARY), engine.weights.digest()


def _resume_digest(directory, root, records):
    engine = start_engine(directory, peft_config("prefix"))
    engine.load_checkpoint(root, records)
    return engine.weights.digest()


def test_the_first_values_in_a_snapshot_count_not_those_computed_again(opt_directory, tmp_path):
    (records, digest), _ = run_ranks(_first_values_of_another_machine, 2, opt_directory, tmp_path, 2)
    assert run_ranks(_resume_digest, 1, opt_directory, tmp_path, records) == [digest]
    assert run_ranks(_resume_digest, 1, opt_directory, tmp_path / "none", records) != [digest]


# Forward passes.


def _both_forwards(cases):
    return {
        case: [
            train(start_engine(*case[1:], probes_per_pass=forward, learning_rate=0.0), 3)
            for forward in (2, 1)
        ]
        for case in cases
    }


@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_dual_equals_two_pass_for_every_family(kind, tmp_path):
    directories = write_families(FAMILIES_TRAINED, tmp_path)
    cases = [
        (family, str(directory), peft_config(kind, family), dtype)
        for family, directory in directories.items()
        for dtype in ("fp32", "bf16")
    ]
    (found,) = run_ranks(_both_forwards, 1, cases)
    for (family, _, _, dtype), (dual, two_pass) in found.items():
        tolerance = 1e-5 if dtype == "fp32" else 2.0**-7
        for left, right in zip(dual, two_pass, strict=True):
            assert (left.key, left.dropped_layers) == (right.key, right.dropped_layers)
            assert left.loss == pytest.approx(right.loss, rel=tolerance), (family, dtype)
            difference = abs(left.projected_grads[0] - right.projected_grads[0]) * 2 * left.perturbation_scale
            assert difference <= 2 * tolerance * right.loss, (family, dtype)
        assert all(record.projected_grads[0] != 0 for record in dual)


def _start_or_error(directory, peft, changes):
    try:
        start_engine(directory, peft, **changes)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [{"sparsity": 1.0}])
def test_an_adapter_of_which_every_block_is_dropped_is_refused(opt_directory, kind, changes):
    (message,) = run_ranks(_start_or_error, 1, opt_directory, peft_config(kind), changes)
    assert "nothing is left to train" in message
    assert "expected: at most 3" in message


# The commands.


def export(run_dir, step, target):
    run_forked_well(["--run", run_dir, "--step", step, "--out", target], program="export.py")
    return read_manifest(target)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumed_on_two_ranks_keeps_what_it_needs_and_its_journal_rebuilds_the_adapter(
    kind, recipe, tmp_path
):
    run_dir = tmp_path / "run"
    keys = [f"peft.kind={kind}", "model.dtype=bf16", "zo.learning_rate=0.01", "train.keep_snapshots=1"]
    run_forked_well(["--config", recipe, f"run_dir={run_dir}", *keys, "train.steps=6"])
    run_forked_well(["--config", recipe, f"run_dir={run_dir}", *keys], num_ranks=2)
    results = json.loads((run_dir / "results.json").read_text())
    assert (results["peft"], results["steps"], results["finished"]) == (kind, 8, True)
    kept = {path.name for path in (run_dir / "snapshots").iterdir()}
    assert kept == {"step-00000008"} | ({"step-00000000"} if kind == "prefix" else set())
    last = read_manifest(snapshot_path(run_dir / "snapshots", 8))
    shutil.rmtree(run_dir / "snapshots")
    exported = export(run_dir, "last", tmp_path / "exported")
    assert exported["digest"] == last["digest"] != last["base"]
    assert exported["base"] == last["base"] == results["model_fingerprint"]


def test_targets_that_match_nothing_end_the_command_with_the_names_there_are(recipe, tmp_path):
    keys = [f"run_dir={tmp_path / 'run'}", "peft.kind=lora", "peft.lora_targets=query_key_value"]
    problem = "names no linear modules of OPTForCausalLM"
    names = "some of fc1, fc2, k_proj, lm_head, out_proj, q_proj, v_proj"
    assert_one_error(run_forked(["--config", recipe, *keys]), 2, problem, names)
