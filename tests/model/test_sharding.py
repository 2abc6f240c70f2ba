"""Weights in shards: loading, gathering, updating and comparing them, on any number of ranks."""

import copy
import gc
import json
import math
from pathlib import Path

import deepspeed
import pytest
import tiny_runs
import torch
from deepspeed.accelerator import get_accelerator
from eager_noise import draw, join_master
from family_checks import Family
from own_memory import forget_peak, needs_peak, peak_memory
from peft import LoraConfig
from ranks import run_ranks
from safetensors.torch import load_file
from thorough import thorough
from tiny_adapters import peft_config
from tiny_models import FAMILIES, MIXTURES
from tiny_runs import NUM_BLOCKS, full_weights, start_engine, train, write_model
from torch import nn
from transformers import AutoModelForCausalLM, OPTConfig

import lezo_ds
from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import DTYPES, build_checked, open_weights, parameter_names
from lezo_ds.config import ZoConfig
from lezo_ds.data.generation import prompt_batch
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import GenerationSettings
from lezo_ds.forward.dense import DenseDirections
from lezo_ds.forward.probes import Perturbation
from lezo_ds.sharding import zero3
from lezo_ds.sharding.gather import Bundle, GatherAhead
from lezo_ds.sharding.parameters import parameter_ids
from lezo_ds.sharding.shards import FlatShard
from lezo_ds.sharding.weights import ShardedWeights
from lezo_ds.zo.laws import DenseLaw
from lezo_ds.zo.passes import KeyedProbe
from lezo_ds.zo.records import StepRecord
from lezo_ds.zo.updates import step_updates

pytestmark = pytest.mark.distributed


JSON = json.loads(tiny_runs.DS_CONFIG.read_text()) | {"train_micro_batch_size_per_gpu": 1}
DIRECTIONS = DenseDirections(DenseLaw())
SHAPES = {"matrix": (7, 3), "vector": (5,), "single": (1,), "even": (4, 6)}


class _Holder(nn.Module):
    """Parameters that the ranks do not divide; one is tied, one frozen, one in 16 bits."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            dtype = torch.bfloat16 if name == "even" else torch.float32
            setattr(self, name, nn.Parameter(torch.empty(shape, device="meta", dtype=dtype)))
        self.vector.requires_grad_(False)
        self.inner = nn.Linear(3, 7, bias=False, device="meta")
        self.inner.weight = self.matrix
        self.register_buffer("table", torch.arange(3.0))


def _describe_shards(num_ranks):
    distributed.init_distributed()
    model = _Holder()
    zero3.shard_model(model, JSON)
    parameters = [FlatShard(p, n, 99, 0) for n, p in model.named_parameters()]
    for p in parameters:
        stored, numbers = p.parameter.ds_tensor, torch.arange(p.numel, dtype=torch.int16)
        stored.data.fill_(float("nan"))  # the padding keeps it
        size = math.ceil(p.numel / num_ranks)
        own = range(p.numel)[distributed.rank() * size :][:size]
        p.fill(numbers[own])
        assert (stored.shape, stored.dtype) == ((size,), p.parameter.dtype)  # flat
        assert (p.count, p.elements.region.start) == (len(own), own.start)
        assert p.stored().shape == (p.count,)
        assert p.parameter.data.numel() == 0  # nothing stays gathered
        assert torch.isnan(stored[p.count :]).all()
        with deepspeed.zero.GatheredParameters([p.parameter]):
            # DeepSpeed builds the row-major parameter from the slices, and drops the padding.
            full = p.parameter.data.clone()
        assert torch.equal(full.float(), numbers.view(p.shape).float())
        assert torch.equal(p.gather(), full)
        assert torch.equal(p.gather_like(numbers[own]), numbers.view(p.shape))
    assert model.inner.weight is model.matrix
    assert torch.equal(model.table, torch.arange(3.0))
    return [(p.name, p.shape, p.parameter.requires_grad) for p in parameters]


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_shards_are_flat_slices_and_their_padding_is_never_read(num_ranks):
    expected = [(name, shape, name != "vector") for name, shape in SHAPES.items()]
    assert run_ranks(_describe_shards, num_ranks, num_ranks) == [expected] * num_ranks


def _count_gathers(directory):
    """Return what each of two passes gathered, when, the most at once, and what stays gathered."""
    started, waited, most = [], [], 0
    start, wait, gather = Bundle.start, Bundle.wait, GatherAhead.gather

    def counted_start(self):
        before = self._message
        start(self)
        if self._message is not before:
            started.append(sum(p.ds_numel for p in self._parameters))

    def counted_wait(self):
        nonlocal most
        wait(self)
        most = max(most, sum(p.parameter.numel() for p in engine.weights.shards))

    def counted_gather(self, parts, *_):
        gather(self, parts)
        waited.append(len(started))

    Bundle.start = counted_start
    Bundle.wait = counted_wait
    GatherAhead.gather = counted_gather
    engine = start_engine(directory)
    passes = []
    for _ in range(2):
        train(engine, 1, num_micro_batches=distributed.world_size())
        passes.append((list(started), list(waited)))
        started.clear()
        waited.clear()
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in engine.module.modules())
    held = [p.name for p in engine.weights.shards if p.parameter.numel()]
    return passes, hooks, held, most, {p.name: p.numel for p in engine.weights.shards}


def test_a_block_is_one_message_every_weight_is_gathered_once_a_pass_and_one_block_ahead(
    opt_directory,
):
    for passes, num_hooks, held, most, sizes in run_ranks(_count_gathers, 2, opt_directory):
        for started, waited in passes:
            # Blocks, both embeddings and the last norm; the head is tied.
            assert (len(started), len(waited)) == (NUM_BLOCKS + 3, NUM_BLOCKS + 4)
            assert sum(started) == sum(sizes.values())
        first, second = (waited for _, waited in passes)
        assert first[:5] == [1, 2, 3, 4, 5]
        assert second[:5] == [2, 3, 4, 5, 6]
        assert (num_hooks, held) == (2 * (NUM_BLOCKS + 4) + 3, [])  # three are the root's own
        block = sum(size for name, size in sizes.items() if ".layers.0." in name)
        assert block < most <= 2 * block + sizes["model.decoder.embed_tokens.weight"]


def _gather_between_steps(directory):
    """Train two steps, and look at the weights between them as programs with DeepSpeed do."""
    engine = start_engine(directory)
    records = train(engine, 1, vocabulary=SMALLEST)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        seen = {name: p.data.clone() for name, p in engine.module.named_parameters()}
    exact = full_weights(engine)
    assert all(torch.equal(seen[name], exact[name]) for name in seen)
    return records + train(engine, 1, vocabulary=SMALLEST)


def _whole_weights_of_answers(directory):
    """Return how many blocks are whole at each token that the last block writes."""
    engine = start_engine(directory, num_ranks=2, sparsity=0.0)
    blocks = engine.module.get_submodule(engine.layout.path)
    shape = blocks[0].fc1.weight.ds_shape
    counts = []

    def count(*_):
        tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
        counts.append(len({each.data_ptr() for each in tensors if each.shape == shape}))

    blocks[-1].fc2.register_forward_hook(count)
    prompts = prompt_batch([(0, 5, 6)], GenerationSettings(3, (), pad_id=1))
    with torch.no_grad():
        engine.run(prompts, Perturbation((KeyedProbe((7,), 0.0),)))
    return counts


def test_a_block_at_theta_is_released_while_answers_are_written(opt_directory):
    for counts in run_ranks(_whole_weights_of_answers, 2, opt_directory):
        assert len(counts) == 3 and max(counts) <= 2, counts


def test_weights_may_be_gathered_between_steps_where_one_rank_has_them(opt_directory):
    (records,) = run_ranks(_gather_between_steps, 1, opt_directory)
    ((expected, *_),) = run_ranks(_train, 1, opt_directory, "fp32", 1)
    assert records == expected[:2]


NUM_STEPS = 4
SMALLEST = FAMILIES["opt"][0].vocab_size


def _train(directory, dtype, num_ranks, zero=None):
    changes = {"zero_optimization": zero} if zero else {}
    engine = start_engine(directory, dtype, num_ranks, changes)
    records = train(engine, NUM_STEPS, vocabulary=SMALLEST)
    digest, weights = engine.weights.digest(), full_weights(engine)
    fresh = start_engine(directory, dtype, num_ranks, changes)
    fresh.load_checkpoint(directory / "none", records)
    return records, digest, weights, fresh.weights.digest()


def assert_equal_runs(directory, num_ranks, zero=None):
    ((records, digest, weights, replayed),) = run_ranks(_train, 1, directory, "bf16", 1)
    assert digest == replayed
    for run in run_ranks(_train, num_ranks, directory, "bf16", num_ranks, zero):
        assert (run[0], run[1], run[3]) == (records, digest, digest)
        torch.testing.assert_close(run[2], weights, rtol=0, atol=0)


def test_a_run_with_offloaded_shards_equals_one_without(opt_directory):
    assert_equal_runs(opt_directory, 2, {"stage": 3, "offload_param": {"device": "cpu"}})


@pytest.mark.parametrize("family", [MIXTURES[0], *map(thorough, MIXTURES[1:])])
def test_ranks_that_choose_experts_of_their_own_train_alike(family, tmp_path):
    config = copy.deepcopy(FAMILIES[family][0])
    # The tokens of a pass cannot choose all of them.
    config.num_local_experts = config.num_experts = 64
    config.num_experts_per_tok = 1
    assert_equal_runs(write_model(config, tmp_path, torch.bfloat16), 2)


def shard(directory, dtype, precision):
    """Return a model's shards without DeepSpeed's engine, which refuses fp16 on some CPUs."""
    torch.set_num_threads(1)
    distributed.init_distributed()
    model, layout = build_checked(Path(directory), dtype)
    aliases = parameter_names(model)
    ids = parameter_ids(aliases)
    zero3.shard_model(model, JSON)
    shards = [FlatShard(p, n, layout.block_of(n), ids[n]) for n, p in model.named_parameters()]
    weights = ShardedWeights(shards, aliases=aliases, precision=precision)
    weights.load(weights.shards, open_weights(model, Path(directory)))
    return weights


def gather(weights):
    """Return the full values in float32 as stored, by name. A collective."""
    return {
        p.name: join_master(p.gather(), tiny_runs.gathered_low_bits(weights, p))
        for p in weights.shards
    }


def _load(directory, dtype, precision):
    weights = shard(directory, dtype, precision)
    return gather(weights), {p.name: p.count for p in weights.shards}


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_ranks_together_hold_the_checkpoint_and_the_bits_beyond_16(opt_directory, dtype):
    stored = load_file(opt_directory / "model.safetensors")
    results = run_ranks(_load, 2, opt_directory, dtype, "fp32_master")
    ((rounded, *_),) = run_ranks(_load, 1, opt_directory, dtype, None)
    tolerance = 2.0**-40 if dtype == "fp16" else 0
    for name, tensor in stored.items():
        assert sum(counts[name] for _, counts in results) == tensor.numel()
        torch.testing.assert_close(results[0][0][name], tensor, rtol=0, atol=tolerance)
        assert torch.equal(rounded[name], tensor.to(DTYPES[dtype]).float())


def _peak_memory_of_loading(small, large, bits):
    """Return bytes: this process's peak above that before, its share, and the largest weight."""
    options = {"bits": bits, "peft": peft_config("lora")} if bits else {}
    start_engine(small, num_ranks=2, **options)  # what libraries take on first use
    before = forget_peak()
    shards = start_engine(large, num_ranks=2, **options).weights.shards
    peak = peak_memory() - before
    stored = sum(shard.parameter.ds_tensor.nbytes for shard in shards)
    return peak, stored, max(shard.numel for shard in shards) * 4


@needs_peak
@pytest.mark.parametrize("bits", [None, thorough(4)])
def test_no_rank_holds_more_than_its_share_while_loading(bits, tmp_path):
    shape = {"vocab_size": 2000, "max_position_embeddings": 64}
    small, large = (
        write_model(OPTConfig(**shape, num_hidden_layers=size), tmp_path / str(size))
        for size in (1, 8)
    )
    for peak, stored, largest in run_ranks(_peak_memory_of_loading, 2, small, large, bits):
        assert stored < peak < 1.2 * stored + 4 * largest


STEP = StepRecord(0, 1000, (1, 3), 1e-3, 1e-3, projected_grads=(-0.7,), loss=0.5)
SKIPPED = StepRecord(1, 1001, (), 1e-3, 1e-3, projected_grads=(), loss=None, applied=False)


def _update(directory):
    """Return the names and ids of parameters, and their values before and after two steps."""
    weights = shard(directory, "fp32", "fp32_master")
    before, ids = gather(weights), {p.name: p.elements.parameter_id for p in weights.shards}
    weights.apply(step_updates([STEP, SKIPPED], 0, 2, weight_decay=0.1), DIRECTIONS)
    return ids, before, gather(weights)


def test_an_update_is_the_formula_and_a_skipped_step_changes_nothing(opt_directory):
    ((ids, before, after),) = run_ranks(_update, 1, opt_directory)
    dropped = tuple(f"model.decoder.layers.{block}." for block in STEP.dropped_layers)
    for name, value in before.items():
        z = draw("normal", STEP.key, ids[name], 0, value.numel()).view(value.shape)
        decay = 1 - STEP.learning_rate * 0.1 if value.dim() > 1 else 1
        expected = value * decay - STEP.learning_rate * STEP.projected_grads[0] * z
        if name.startswith(dropped):
            assert torch.equal(after[name], value)
        else:
            torch.testing.assert_close(after[name], expected, rtol=1e-6, atol=1e-9)


def test_fp16_is_refused_where_the_processor_does_not_compute_in_it(monkeypatch):
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)
    monkeypatch.setattr(distributed, "init_distributed", lambda: None)  # the refusal comes first
    with pytest.raises(UserError, match="has no fp16 arithmetic; fix: use a GPU"):
        lezo_ds.initialize("model", ZoConfig(**TRAINS), None, dtype="fp16")


TRAINS = {"learning_rate": 1e-3, "sparsity": 0.5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": TRAINS | {"lr_schedule": "cosine"}}, "depends on the number of steps, which"),
        ({"config": TRAINS | {"weight_decay": 1e3}}, "zo.weight_decay=1000.0 is not below 1: a"),
        ({"config": TRAINS | {"sparsity": None}}, "training needs zo.sparsity; fix: set"),
        ({"config": TRAINS | {"rate": 1}}, "unknown key zo.rate in lezo_ds.initialize; fix: "),
        ({"config": 1e-6}, "zo=1e-06 in .* instance of ZoConfig; fix: write its keys, such as zo"),
        ({"bits": 3}, "model.bits=3 in lezo_ds.initialize: .* 4 or 8; fix: write"),
        ({"dtype": "float16"}, "dtype=float16 .*'bf16' or 'fp16'; fix: did you mean fp16"),
        ({"partition_size": 3}, "partition_size=3 does not divide 1 ranks"),
        ({"ds_config": "zero3.json"}, "cannot read the DeepSpeed configuration zero3.json"),
        ({"ds_config": {"zero_optimization": {"stage": 2}}}, "stage=2 in .*; fix: set .* to 3"),
        ({"model": ["opt"]}, "model.path=.'opt'. in .* a valid string; fix: write one text"),
        ({"peft": LoraConfig()}, "peft=LoraConfig.* in .* instance of PeftConfig; fix"),
    ],
)
def test_initialize_has_the_rules_of_a_recipe(arguments, message, monkeypatch):
    monkeypatch.setattr(distributed, "init_distributed", lambda: None)
    usual = {"model": "no model", "config": TRAINS, "ds_config": None}
    with pytest.raises(UserError, match=message):
        lezo_ds.initialize(**usual | arguments)


LAW = {"law": "own_law:EqualRows", "noise_rank": 1, "sparsity": 0.0}


def train_by_own_law(directory, num_ranks):
    engine = start_engine(directory, num_ranks=num_ranks, **LAW)
    records = train(engine, 3)
    return [record.projected_grads[0] for record in records], full_weights(engine)


def test_a_law_of_ones_own_has_the_slopes_of_plain_models(opt_directory, tmp_path):
    """A user adds a law of z in a file of their own, without a change to the package."""
    Family("opt", tmp_path).step(**LAW)
    ((slopes, weights),) = run_ranks(train_by_own_law, 1, opt_directory, 1)
    base = AutoModelForCausalLM.from_pretrained(opt_directory).state_dict()
    num_matrices = 0
    for name, trained in weights.items():
        change = trained - base[name]
        if "layers." in name and change.dim() == 2:
            num_matrices += 1
            assert change.abs().max() > 0
            assert torch.allclose(change, change[:1].expand_as(change), atol=1e-6)
        else:
            assert not change.any()
    assert num_matrices == 6 * NUM_BLOCKS
    for others in run_ranks(train_by_own_law, 2, opt_directory, 2):
        torch.testing.assert_close(others, (slopes, weights), rtol=0, atol=0)
