"""A forward pass at perturbed weights equals that of a model whose weights hold theta + mu z."""

import copy
from dataclasses import replace

import pytest
import tiny_models
import torch
from eager_noise import draw
from family_models import small_config
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, MIXTURES, NUM_BLOCKS, VOCABULARY, tiny_model, tunable
from torch import nn
from torch.nn import functional as F

from lezo_ds.forward.batch import LogitSelection, MicroBatch
from lezo_ds.forward.blocks import find_blocks
from lezo_ds.forward.dense import DenseDirections
from lezo_ds.forward.perturbed_forward import PerturbedForward
from lezo_ds.forward.probes import AT_THETA, Perturbation, TrainedParameter, is_norm
from lezo_ds.noise import Elements
from lezo_ds.noise.cpu import CpuKernels
from lezo_ds.zo.laws import DenseLaw
from lezo_ds.zo.passes import KeyedProbe

CPU = torch.device("cpu")
DIRECTIONS = DenseDirections(DenseLaw())
SEED = 0x0123456789ABCDEF
SCALE = 0.05
ROWS, TOKENS = 3, 10
PLUS, MINUS, BOTH = (1,), (-1,), (1, -1)


def record_rows(block, rows):
    """Append how many sequences the first module with weights gets, whenever a block runs."""
    first = next(module for module in block.modules() if hasattr(module, "weight"))
    first.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))


def blocks_of(model):
    return list(model.get_submodule(find_blocks(model).path).children())


def in_blocks(model):
    layout = find_blocks(model)
    names = [name for name, _ in model.named_parameters()]
    return {name for name in names if layout.block_of(name) < layout.num_blocks}


def perturbation(signs, dropped=(), scale=SCALE, key=SEED):
    probes = tuple(KeyedProbe((key,), sign * scale) for sign in signs)
    return Perturbation(probes, frozenset(dropped))


def reference(model, trainable, change, dtype=torch.float32):
    """A copy whose active parameters hold theta + mu z, rounded as the model's but for norms."""
    # A copy of a wrapped model would run the original's modules.
    assert not any("forward" in vars(module) for module in model.modules())
    (probe,) = change.probes
    names = {n: e for n, p in model.named_parameters() for e in trainable if e.parameter is p}
    norms = {path for path, module in model.named_modules() if is_norm(module)}
    perturbed = copy.deepcopy(model).to(dtype)
    with torch.no_grad():
        for name, (theta, block, elements) in names.items():
            if block not in change.dropped_layers:
                z = draw("normal", probe.key, elements.parameter_id, 0, theta.numel())
                value = theta.float() + probe.scale * z.view_as(theta)
                is_wide = name.rpartition(".")[0] in norms
                perturbed.get_parameter(name).copy_(value if is_wide else value.to(theta.dtype))
    return perturbed


def token_batch(selection=None, attention_mask=None, rows=ROWS):
    ids = torch.randint(3, VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(5))
    inputs = {"input_ids": ids}
    if attention_mask is not None:
        inputs["attention_mask"] = attention_mask
    return MicroBatch(inputs, rows, selection=selection)


@torch.no_grad()
def plain_logits(model, batch):
    logits, selection = model(**batch.inputs).logits, batch.selection
    if selection is None:
        return logits
    return logits[selection.rows, selection.positions][:, selection.vocabulary]


@torch.no_grad()
def run(perturbed, model, batch, change=AT_THETA):
    return perturbed(batch, change, model)


def expected_logits(model, trainable, batch, change):
    singles = [replace(change, probes=(probe,)) for probe in change.probes]
    return [plain_logits(reference(model, trainable, single), batch) for single in singles]


def assert_equal_to_rounding(actual, expected):
    """Equal but for the order of sums in float32."""
    for mine, theirs in zip(actual, expected, strict=True):
        near = 1e-6 * float(theirs.abs().max().clamp(min=1))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=near)


def bits(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_weights(model, expected):
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter and torch.equal(parameter, expected[name]), name


def wrapped(model, trainable, **options):
    return PerturbedForward(model, trainable, blocks_of(model), directions=DIRECTIONS, **options)


def both_ways(model, trainable, batch, dropped):
    """Return the logits at theta + mu z and theta - mu z, by one pass and by a pass for each."""
    perturbed = wrapped(model, trainable)
    singles = [run(perturbed, model, batch, perturbation(sign, dropped)) for sign in (PLUS, MINUS)]
    return run(perturbed, model, batch, perturbation(BOTH, dropped)), [plus for (plus,) in singles]


@pytest.mark.parametrize("family", [*FAMILIES, "opt with LoRA"])
def test_both_probes_at_once_and_each_alone_equal_a_model_with_perturbed_weights(family):
    model, batch = tiny_model(family.split()[0]), token_batch()
    if family == "opt with LoRA":
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(model, config, autocast_adapter_dtype=False).eval()
    trainable, before = tunable(model), bits(model)
    plain = plain_logits(model, batch)
    expected = expected_logits(model, trainable, batch, perturbation(BOTH, (1,)))
    for logits in both_ways(model, trainable, batch, (1,)):
        assert_equal_to_rounding(logits, expected)
        assert all((found - plain).abs().max() > 1e-2 for found in logits)
    assert_same_weights(model, before)
    (again,) = run(wrapped(model, trainable), model, batch)
    assert torch.equal(again, plain)


def test_a_block_is_perturbed_by_one_call_a_pair_in_memory_that_stays(monkeypatch):
    model, addresses, perturb = tiny_model("llama"), [], CpuKernels.perturb

    def noting(*arguments):
        copies = perturb(*arguments)
        addresses.append([copy.data_ptr() for copy in copies[0]])
        return copies

    monkeypatch.setattr(CpuKernels, "perturb", noting)
    perturbed = wrapped(model, tunable(model, in_blocks(model)))
    run(perturbed, model, token_batch(), perturbation(BOTH * 2, dropped=(1,)))
    assert addresses == addresses[:1] * 2 * (NUM_BLOCKS - 1)


def distance(some, others):
    return (some.float() - others.float()).pow(2).mean().sqrt()


IN_16_BITS = [(family, torch.bfloat16) for family in FAMILIES if family not in MIXTURES]


@pytest.mark.parametrize(("family", "dtype"), [*IN_16_BITS, ("opt", torch.float16)])
def test_in_16_bits_errors_are_those_of_a_plain_16_bit_forward(family, dtype):
    model, batch = tiny_model(family, dtype), token_batch()
    trainable, before = tunable(model), bits(model)
    plain = plain_logits(copy.deepcopy(model).float(), batch)
    exact = [reference(model, trainable, perturbation(sign, (1,))) for sign in (PLUS, MINUS)]
    ways = both_ways(model, trainable, batch, (1,))
    for side, exact_model in enumerate(exact):
        expected = plain_logits(exact_model, batch)
        rounding = distance(plain_logits(exact_model.to(dtype), batch), expected)
        assert distance(expected, plain) > 5 * rounding
        for logits in ways:
            assert logits[side].dtype == dtype
            assert distance(logits[side], expected) < 1.5 * rounding
    assert_same_weights(model, before)


SOME_FAMILIES = ("opt_projected", "gpt2", "llama", "gpt_neox", "phi", "mixtral", "gemma2")


@pytest.mark.parametrize(("dropped", "first"), [((1,), 0), ((0, 1), 2), ((0, 1, 2), 0)])
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_blocks_before_the_first_perturbed_one_run_on_one_copy(family, dropped, first):
    model, batch, rows = tiny_model(family), token_batch(), []
    trainable = tunable(model, in_blocks(model))
    expected = expected_logits(model, trainable, batch, perturbation(BOTH, dropped))
    for block in blocks_of(model):
        record_rows(block, rows)
    perturbed = wrapped(model, trainable, shares_start=True)
    assert_equal_to_rounding(run(perturbed, model, batch, perturbation(BOTH, dropped)), expected)
    at_first_blocks = [ROWS] * first
    of_others = [[2 * ROWS] if block in dropped else [ROWS] * 2 for block in range(NUM_BLOCKS)]
    assert rows == sum(of_others[first:], start=at_first_blocks)
    assert_equal_to_rounding(run(perturbed, model, batch), [plain_logits(model, batch)])


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("rows", [1, 2, TOKENS])
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_masks_and_selections_fit_the_copies_of_the_batch(family, rows, is_shared):
    model = tiny_model(family)
    mask = torch.ones(rows, TOKENS, dtype=torch.int64)
    mask[0, :4] = 0
    places = torch.tensor([0, rows - 1, 0]), torch.tensor([9, 6, 5])
    selection = LogitSelection(*places, torch.tensor([40, 3]))
    trainable = tunable(model, in_blocks(model) if is_shared else None)
    probes = (KeyedProbe((7,), SCALE), KeyedProbe((8,), -SCALE), KeyedProbe((8,), 0.0))
    change = Perturbation(probes, frozenset({0}))
    batch = token_batch(selection, mask, rows)
    expected = expected_logits(model, trainable, batch, change)
    perturbed = wrapped(model, trainable, shares_start=is_shared)
    assert_equal_to_rounding(run(perturbed, model, batch, change), expected)


@pytest.mark.parametrize("rows", [1, 2, 4, TOKENS // 2, TOKENS])
@pytest.mark.parametrize("family", ["bart", "blenderbot", "gptj", "mpt", "mpt of short texts"])
def test_what_heads_or_positions_have_is_not_cut_for_rows(family, rows):
    config = small_config(family.split()[0])
    if family == "mpt of short texts":
        config.max_seq_len = TOKENS  # its bias has one position for each token
    model, batch = tiny_models.random_model(config), token_batch(rows=rows)
    model.config.use_cache = False
    assert_equal_to_rounding(*both_ways(model, tunable(model), batch, dropped=()))


def test_an_exception_in_a_forward_leaves_the_parameters_and_the_next_run_as_they_were():
    model, batch = tiny_model("opt"), token_batch()
    before = bits(model)
    perturbed = wrapped(model, tunable(model))
    changes = [AT_THETA, perturbation(MINUS), perturbation(BOTH)]
    expected = [run(perturbed, model, batch, change) for change in changes]

    def fail(*_):
        raise RuntimeError("broken in the middle")

    for change in changes:
        hook = blocks_of(model)[1].fc2.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="broken in the middle"):
            run(perturbed, model, batch, change)
        hook.remove()
        assert_same_weights(model, before)
        assert_equal_to_rounding([plain_logits(model, batch)], expected[0])
        for again, logits in zip(changes, expected, strict=True):
            assert all(map(torch.equal, run(perturbed, model, batch, again), logits))


HIDDEN = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_a_16_bit_norm_is_computed_with_float32_vectors_that_keep_the_perturbation():
    norm = nn.LayerNorm(16).bfloat16()
    vectors = {"weight": torch.ones(16), "bias": torch.zeros(16)}
    trainable = []
    for parameter_id, name in enumerate(vectors):
        elements = Elements.all_of(parameter_id, (16,))
        trainable.append(TrainedParameter(getattr(norm, name), 99, elements))
        vectors[name] += 1e-3 * draw("normal", SEED, parameter_id, 0, 16)
    model, batch = nn.Sequential(norm), MicroBatch({"input": HIDDEN}, len(HIDDEN))
    model.config, model.get_output_embeddings = FAMILIES["llama"][0], lambda: None
    perturbed = PerturbedForward(model, trainable, directions=DIRECTIONS)
    plus, _ = run(perturbed, model, batch, perturbation(BOTH, scale=1e-3))
    assert torch.equal(plus, F.layer_norm(HIDDEN.float(), (16,), **vectors).bfloat16())
    assert (vectors["weight"].bfloat16() == 1).float().mean() > 0.5  # 16 bits would lose these
