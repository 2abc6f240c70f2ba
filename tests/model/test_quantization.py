"""Matrices in 4 and 8 bits: what is stored, that runs on them are exact, and what is refused."""

import re

import numpy as np
import pytest
import tiny_runs
import torch
from ranks import run_ranks
from thorough import thorough
from tiny_adapters import SPLIT, peft_config, start_engine, whole_batch
from tiny_models import VOCABULARY
from tiny_runs import train, write_model
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, OPTConfig

from lezo_ds.errors import UserError
from lezo_ds.sharding.quantization import GROUP, Quantization
from lezo_ds.sharding.quantized_shards import QuantizedShard

pytestmark = pytest.mark.distributed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDTH = 128  # two groups, one for each rank of two
NUM_BLOCKS = 3
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": NUM_BLOCKS}
SHAPE |= {"num_attention_heads": 4, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
OPT = OPTConfig(**SHAPE, word_embed_proj_dim=WIDTH, ffn_dim=2 * WIDTH, max_position_embeddings=62)
LLAMA = LlamaConfig(**SHAPE, intermediate_size=2 * WIDTH, num_key_value_heads=2)
GPT2 = GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=NUM_BLOCKS, n_head=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny models whose rows are whole groups, also on two ranks that split them."""
    root = tmp_path_factory.mktemp("models")
    configs = {"opt": OPT, "llama": LLAMA, "gpt2": GPT2}
    return {
        name: write_model(config, root / name, DTYPES["bf16" if name == "llama" else "fp32"])
        for name, config in configs.items()
    }


def as_documented(part, bits, num_groups):
    """Return the values of a part of bf16, read by NumPy as the module's docstring describes."""
    stored = part.view(torch.int16).numpy().view(np.uint16)
    ends = np.cumsum([num_groups * GROUP * bits // 16, num_groups])
    codes, steps, minima = np.split(stored, ends)
    codes = codes.view(np.uint8).reshape(num_groups, -1)
    if bits == 4:
        codes = np.stack([codes >> 4, codes & 15], axis=-1).reshape(num_groups, GROUP)
    steps, minima = [(field.astype(np.uint32) << 16).view(np.float32) for field in (steps, minima)]
    values = codes.astype(np.float32) * steps[:, None] + minima[:, None]
    return torch.from_numpy(values).bfloat16()


def by_page(values, bits, dtype):
    """Return the values that a matrix stands for by docs/file-formats.md."""
    groups = values.float().reshape(-1, GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).to(dtype).float()
    minimum = low.to(dtype).float()
    code = ((groups - minimum) / step.where(step != 0, 1)).round().clamp(0, 2**bits - 1)
    return (code * step + minimum).to(dtype).view(values.shape)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_bytes_and_values_are_those_of_the_page_and_parts_together_are_the_whole(bits, dtype):
    values = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0)) * 0.05
    values[1] = 0.25  # a group of equal elements
    values[2, :GROUP] = 0
    whole = Quantization(bits, dtype, (5, WIDTH), 1)
    stored = torch.empty(whole.size_of_part, dtype=dtype)
    whole.quantize_(stored, values)
    matrix = whole.matrix(stored)
    assert stored.nbytes == 10 * (GROUP * bits // 8 + 2 * stored.itemsize)
    assert torch.equal(matrix, by_page(values, bits, dtype))
    assert torch.equal(matrix[1:3, :GROUP], values[1:3, :GROUP].to(dtype))
    half_a_step = (values.max() - values.min()) / (2**bits - 1) / 2
    error = (matrix.float() - values).abs().max()
    assert 0 < error < half_a_step + torch.finfo(dtype).eps / 2
    if dtype == torch.bfloat16:  # values of a checkpoint are not rounded before
        assert torch.equal(matrix.view(-1, GROUP), as_documented(stored, bits, 10))
        assert not torch.equal(matrix, by_page(values.bfloat16(), bits, dtype))
    for num_parts in (2, 3, 4):
        shared = Quantization(bits, dtype, (5, WIDTH), num_parts)
        size = shared.groups_of_part * GROUP
        parts = torch.zeros(num_parts, shared.size_of_part, dtype=dtype)
        for part, own in zip(parts, values.view(-1).split(size), strict=True):
            shared.quantize_(part, own)
        assert torch.equal(shared.matrix(parts.view(-1)), matrix)


def run(directory, dtype, num_ranks, bits, options):
    """Train, replay, and return what must be equal on any number of ranks, and bytes."""
    options = dict(options)
    peft = peft_config(options.pop("kind", "lora"), options.pop("family", "opt"))
    engine = start_engine(directory, peft, dtype, num_ranks, bits=bits, **options)
    base = engine.base.fingerprint
    weights = {shard.name: shard.gather().cpu() for shard in engine.weights.base_shards}
    stored = sum(
        getattr(shard.parameter, "ds_tensor", shard.parameter).nbytes
        for shard in engine.weights.base_shards
        if isinstance(shard, QuantizedShard)
    )
    logits = engine.forward(whole_batch())
    records = train(engine, 3, vocabulary=VOCABULARY)
    digest = engine.weights.digest()
    fresh = start_engine(directory, peft, dtype, num_ranks, bits=bits, **options)
    fresh.load_checkpoint(directory / "none", records)
    assert fresh.weights.digest() == digest
    return base, weights, stored, logits, records, digest


def assert_same_run(result, expected):
    base, weights, _, logits, records, digest = result
    assert (base, records, digest) == (expected[0], expected[4], expected[5])
    torch.testing.assert_close(weights, expected[1], rtol=0, atol=0)
    assert torch.equal(logits, expected[3])


@pytest.mark.parametrize(
    ("family", "dtype", "bits", "kind"),
    [
        thorough("opt", "fp32", 4, "lora"),
        ("llama", "bf16", 4, "lora"),
        thorough("gpt2", "bf16", 8, "prefix"),
    ],
)
def test_a_run_has_the_dequantized_weights_on_any_number_of_ranks(
    models, family, dtype, bits, kind
):
    options = {"family": family, "kind": kind}
    alone = run_ranks(run, 1, models[family], dtype, 1, bits, options)[0]
    _, weights, stored, logits, *_ = alone
    # A plain transformers model with the same values has the same logits, bit for bit.
    plain = AutoModelForCausalLM.from_pretrained(models[family], dtype=DTYPES[dtype]).eval()
    originals = dict(plain.named_parameters())
    changed = [name for name in weights if not torch.equal(weights[name], originals[name])]
    assert all(".layers." in name or ".h." in name for name in changed)
    assert all(weights[name].dim() == 2 for name in changed)
    with torch.no_grad():
        for name, value in weights.items():
            originals[name].copy_(value)
        if kind == "lora":  # which starts at the model; a prefix does not
            assert torch.equal(plain(**whole_batch().inputs).logits, logits)
    itemsize = DTYPES[dtype].itemsize
    num_elements = sum(weights[name].numel() for name in changed)
    assert stored == num_elements // GROUP * (GROUP * bits // 8 + 2 * itemsize)
    for num_ranks, of_model, changes in ((2, 2, {}), (4, 4, {}), (2, 1, {"partition_size": 1})):
        settings = models[family], dtype, num_ranks, bits, {**options, **changes}
        for result in run_ranks(run, num_ranks, *settings):
            assert_same_run(result, alone)
            assert stored / of_model <= result[2] <= stored / of_model * 1.01 + 2000


@pytest.mark.parametrize("family", [thorough("opt"), "llama"])
def test_tensor_parallel_ranks_split_the_codes(models, family):
    own = {"family": family}
    alone = run_ranks(run, 1, models[family], "fp32", 1, 4, own)[0]
    results = run_ranks(run, 2, models[family], "fp32", 2, 4, own | {"ds_changes": SPLIT})
    for base, weights, stored, logits, records, digest in results:
        assert base == alone[0]
        assert all(torch.equal(weights[name], alone[1][name]) for name in weights)
        assert stored == alone[2] // 2
        # Sums over ranks have other last bits.
        torch.testing.assert_close(logits, alone[3], rtol=1e-4, atol=1e-4)
        assert (records, digest) == results[0][4:]


def count_bytes(directory, bits):
    """Return the bytes of weights that the messages of one forward pass bring to this rank."""
    from deepspeed import comm

    engine = start_engine(directory, peft_config("lora"), "bf16", 2, bits=bits)
    gather = comm.all_gather_into_tensor
    sizes = []

    def counted(output, own, **options):
        sizes.append(output.nbytes - own.nbytes)
        return gather(output, own, **options)

    comm.all_gather_into_tensor = counted
    engine.forward(whole_batch())
    comm.all_gather_into_tensor = gather
    held = [shard.name for shard in engine.weights.shards if shard.parameter.numel()]
    frozen = sum(s.numel for s in engine.weights.base_shards if isinstance(s, QuantizedShard))
    return sum(sizes), held, frozen


def test_codes_travel_and_the_matrix_of_a_module_is_freed_when_it_has_run(models):
    plain, quantized = (run_ranks(count_bytes, 2, models["opt"], bits) for bits in (None, 4))
    for (whole, _, _), (codes, held, frozen) in zip(plain, quantized, strict=True):
        assert held == []
        # 4.5 instead of 16 bits for each element, half of which the rank has itself.
        assert whole - codes == frozen * (16 - 4.5) / 8 / 2


def call_that_fails(directory):
    """Return whether a matrix is stored as codes again after a module has failed."""
    engine = start_engine(directory, peft_config("lora"), bits=4)
    module = engine.module.get_submodule("model.decoder.layers.1.fc1")
    stored = module.weight.data_ptr()
    with pytest.raises(RuntimeError):
        module(torch.ones(1, 3))
    are_stored = module.weight.data_ptr() == stored and module.weight.dim() == 1
    return are_stored and module(torch.ones(1, WIDTH)).shape == (1, 2 * WIDTH)


def test_a_module_that_fails_leaves_its_codes(models):
    assert run_ranks(call_that_fails, 1, models["opt"]) == [True]


def test_offloaded_codes_give_the_same_run(models):
    alone = run_ranks(run, 1, models["opt"], "bf16", 1, 4, {})[0]
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    offloaded = {"ds_changes": {"zero_optimization": zero}}
    for result in run_ranks(run, 2, models["opt"], "bf16", 2, 4, offloaded):
        assert_same_run(result, alone)


def values_of(engine):
    """Return codes, and the values of other weights, by name."""
    found = {}
    for shard in engine.weights.shards:
        codes = shard.trained_codes()
        found[shard.name] = shard.gather() if codes is None else shard.gather_like(codes)
    return found


def train_codes(directory, dtype, num_ranks, rank, options, snapshots, records=()):
    """Train or replay; return what is equal on all ranks, values, and the least share moved."""
    far = {"learning_rate": 0.02, "perturbation_scale": 1e-2, "weight_decay": 1.0}
    options = far | {"noise_rank": rank, "directions": 1 + rank, **options}
    engine = tiny_runs.start_engine(directory, dtype, num_ranks, bits=8, **options)
    start = values_of(engine)
    assert engine.weights.ends_share() < 0.04
    engine.watch_weights()
    if records:
        engine.load_checkpoint(snapshots, records)
    else:
        records = train(engine, 3, vocabulary=VOCABULARY)
        engine.check_weights()
        engine.save_checkpoint(snapshots)
        records += train(engine, 2, vocabulary=VOCABULARY)
    engine.check_weights()
    assert not engine.weights.unlike_replicas()
    values = values_of(engine)
    codes = {name: own for name, own in values.items() if own.dtype == torch.uint8}
    moved = [float((own != start[name]).float().mean()) for name, own in codes.items()]
    same = engine.base.fingerprint, records, engine.weights.ends_share(), engine.weights.digest()
    return same, values, min(moved)


@pytest.mark.parametrize(
    ("family", "dtype", "rank"),
    [("llama", "bf16", 1), ("opt", "fp32", 0), thorough("gpt2", "bf16", 0)],
)
def test_trained_codes_are_the_same_on_any_number_of_ranks(models, tmp_path, family, dtype, rank):
    settings = models[family], dtype, 1, rank, {}, tmp_path / "one"
    same, values, moved = run_ranks(train_codes, 1, *settings)[0]
    assert moved > 0.1
    records = same[1]
    # (ranks, options, folder of snapshots, records to replay)
    layouts = [(2, {}, "two", ()), (4, {}, "four", ()), (2, {"partition_size": 1}, "replicas", ())]
    layouts += [(2, {}, "one", records)]
    layouts += [(2, {"ds_changes": () if family == "gpt2" else SPLIT}, "none", records)]
    for num_ranks, options, name, replayed in layouts:
        settings = models[family], dtype, num_ranks, rank, options, tmp_path / name, replayed
        for found in run_ranks(train_codes, num_ranks, *settings):
            assert found[0] == same
            torch.testing.assert_close(found[1], values, rtol=0, atol=0)


def split_narrow(directory, width):
    with pytest.raises(UserError, match=rf"rows of {width} elements, .* needs a multiple of 64"):
        start_engine(directory, peft_config("lora"), num_ranks=2, bits=4, ds_changes=SPLIT)


# Of 129 columns, the ranks have 65 and 64. Both refuse.
@pytest.mark.parametrize(
    ("width", "sizes"),
    [(32, {"hidden_size": 64, "word_embed_proj_dim": 64}), (65, {"ffn_dim": 129})],
)
def test_ranks_that_would_split_a_group_are_refused(tmp_path, width, sizes):
    directory = write_model(OPTConfig(**(OPT.to_dict() | sizes)), tmp_path)
    run_ranks(split_narrow, 2, directory, width)


def low_bits_from_snapshot(directory, root, options):
    snapshot = tiny_runs.start_engine(directory, "bf16", **options).save_checkpoint(root)
    return tiny_runs.start_engine(snapshot, "bf16").weights.low_bits


@pytest.mark.parametrize(
    ("options", "with_low_bits"),
    [({"bits": 8}, r"(?!.*(_proj|fc.)\.weight)"), ({"only_blocks": True}, r".*\.layers\.")],
    ids=["codes", "blocks"],
)
def test_a_snapshot_of_other_trained_weights_gives_only_its_low_bits(
    models, tmp_path, options, with_low_bits
):
    (found,) = run_ranks(low_bits_from_snapshot, 1, models["opt"], tmp_path, options)
    for name, low in found.items():
        assert (low.dtype, bool(low.any())) == (torch.int16, bool(re.match(with_low_bits, name)))
