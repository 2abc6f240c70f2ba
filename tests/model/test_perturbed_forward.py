from __future__ import annotations

import copy

import pytest
import torch
from operators import Operators
from tiny_models import FAMILIES, MIXTURES, NUM_BLOCKS, VOCABULARY, tiny_model
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput
from transformers.pytorch_utils import Conv1D

from lezo_ds.errors import UserError
from lezo_ds.forward.batch import LogitSelection, MicroBatch
from lezo_ds.forward.blocks import find_blocks
from lezo_ds.forward.perturbed_forward import KeyedProbe, Perturbation, PerturbedForward
from lezo_ds.noise import noise_backend
from lezo_ds.noise.cpu import CpuNoise
from lezo_ds.sharding.parameters import NamedParameter, parameter_ids

CPU = torch.device("cpu")
NOISE = noise_backend(CPU)
SEED = 0x0123456789ABCDEF
SCALE = 0.05
ROWS, TOKENS = 3, 10


def tunable(model, only=None):
    """All parameters that require a gradient (and are in `only`), as the engine would name them."""
    layout = find_blocks(model)
    ids = parameter_ids(name for name, _ in model.named_parameters())
    return {
        parameter: NamedParameter(name, ids[name], layout.block_of(name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (only is None or name in only)
    }


PLUS, MINUS, BOTH = (1,), (-1,), (1, -1)


def perturbation(signs, dropped=(), scale=SCALE, key=SEED):
    return Perturbation(tuple(KeyedProbe(key, sign * scale) for sign in signs), frozenset(dropped))


def reference(model, trainable, change, dtype=torch.float32):
    """A copy whose active parameters hold theta + mu z, in `dtype`; independent of the code under test.

    Matrices are rounded to the model's own dtype first, and vectors are not: those are used in float32.
    """
    # A copy of a wrapped model would run the original's modules.
    assert not any("forward" in vars(module) for module in model.modules())
    (probe,) = change.probes
    names = {named.name: named for named in trainable.values()}
    perturbed = copy.deepcopy(model).to(dtype)
    originals = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in perturbed.named_parameters():
            if name not in names or names[name].block in change.dropped_layers:
                continue
            theta = originals[name]
            z = NOISE.draw(probe.key, names[name].parameter_id, 0, theta.numel(), CPU)
            value = theta.float() + probe.scale * z.view_as(theta)
            parameter.copy_(value if theta.dim() == 1 else value.to(theta.dtype))
    return perturbed


def token_batch(selection=None, attention_mask=None, rows=ROWS):
    ids = torch.randint(3, VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(5))
    inputs = {"input_ids": ids}
    if attention_mask is not None:
        inputs["attention_mask"] = attention_mask
    return MicroBatch(inputs, rows, selection=selection)


@torch.no_grad()
def plain_logits(model, batch):
    return model(**batch.inputs).logits


@torch.no_grad()
def run(perturbed, model, batch, change=None):
    return perturbed(batch, change, model)


def bits(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_weights(model, expected):
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, nn.Parameter), name
        assert torch.equal(parameter, expected[name]), name


def assert_equal_to_rounding(actual, expected):
    """Equal but for the order of sums in float32."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6 * float(expected.abs().max().clamp(min=1)))


def both_references(model, trainable, batch, dropped):
    """The reference's logits at theta + mu z and at theta - mu z."""
    return [
        plain_logits(reference(model, trainable, perturbation(sign, dropped)), batch)
        for sign in (PLUS, MINUS)
    ]


def two_ways(model, trainable, batch, dropped):
    """(dual forward, two single-sign forwards): each the logits at theta + mu z and at theta - mu z."""
    perturbed = PerturbedForward(model, trainable, NOISE)
    dual = run(perturbed, model, batch, perturbation(BOTH, dropped))
    singles = [run(perturbed, model, batch, perturbation(sign, dropped)) for sign in (PLUS, MINUS)]
    assert [len(single) for single in singles] == [1, 1]
    return dual, tuple(single[0] for single in singles)


@pytest.mark.parametrize("dropped", [(), (1,), tuple(range(NUM_BLOCKS))])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_dual_forward_and_two_single_ones_equal_a_model_with_perturbed_weights(family, dropped):
    model = tiny_model(family)
    trainable, batch, before = tunable(model), token_batch(), bits(model)
    expected = both_references(model, trainable, batch, dropped)
    plain = plain_logits(model, batch)
    for logits in two_ways(model, trainable, batch, dropped):
        for found, wanted in zip(logits, expected, strict=True):
            assert_equal_to_rounding(found, wanted)
            assert (found - plain).abs().max() > 1e-2
    assert_same_weights(model, before)


class CountedNoise(CpuNoise):
    """Counts its calls for whole parameters."""

    num_calls = 0

    def perturb(self, weights, *arguments):
        self.num_calls += weights[0].rows is None
        return super().perturb(weights, *arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_perturbed_at_once_gives_the_same_bits_with_one_call(family, dtype):
    change, batch = perturbation(BOTH, dropped=(1,)), token_batch()
    found = []
    for is_at_once in (False, True):
        model, noise = tiny_model(family).to(dtype), CountedNoise()
        blocks = list(model.get_submodule(find_blocks(model).path).children())
        inside = {named.name for named in tunable(model).values() if named.block is not None}
        perturbed = PerturbedForward(
            model, tunable(model, only=inside), noise, at_once=blocks if is_at_once else ()
        )
        found.append(run(perturbed, model, batch, change))
        if is_at_once:
            num_experts = sum(
                isinstance(module, nn.ModuleList) for block in blocks for module in block.modules()
            )
            assert noise.num_calls == NUM_BLOCKS - 1 or num_experts
            one_by_one = perturbation(BOTH * 2, dropped=(1,))  # more probes than copies at once
            run(perturbed, model, batch, one_by_one)
            assert noise.num_calls > 4 * NUM_BLOCKS
    for one_by_one, at_once in zip(*found, strict=True):
        assert torch.equal(one_by_one, at_once)


def test_a_perturbed_block_in_16_bits_launches_33_kernels_and_one_addition_of_biases_for_each_product():
    num_launches = []
    for num_layers in (1, 2):
        config, _ = FAMILIES["opt"]
        config = type(config)(**{**config.to_dict(), "num_hidden_layers": num_layers})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        perturbed = PerturbedForward(model, tunable(model), NOISE)
        run(perturbed, model, token_batch(), perturbation(BOTH))
        with Operators() as operators:
            run(perturbed, model, token_batch(), perturbation(BOTH))
        num_launches.append(operators.count)
    num_stacked = 6  # of biases; their copies lie next to each other where a block is perturbed at once
    assert num_launches[1] - num_launches[0] == 33 + num_stacked


@pytest.mark.parametrize("family", ["opt", "llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("selected", [False, True])
def test_a_pass_runs_any_list_of_probes_and_each_as_if_alone(family, selected):
    model = tiny_model(family)
    selection = SELECTIONS["some entries"] if selected else None
    trainable, batch = tunable(model), token_batch(selection)
    probes = [
        KeyedProbe(7, 0.03),
        KeyedProbe(8, -0.05),
        KeyedProbe(7, -0.03),
        KeyedProbe(9, 0.0),
        KeyedProbe(8, 0.1),
    ]
    singles = [Perturbation((probe,), frozenset({1})) for probe in probes]
    expected = [plain_logits(reference(model, trainable, single), batch) for single in singles]
    if selected:
        expected = [select(logits, selection) for logits in expected]
    perturbed = PerturbedForward(model, trainable, NOISE)
    found = run(perturbed, model, batch, Perturbation(tuple(probes), frozenset({1})))
    assert len(found) == len(probes)
    for logits, wanted in zip(found, expected, strict=True):
        assert_equal_to_rounding(logits, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_of_any_number_of_pairs_gives_the_bits_of_passes_of_one_pair(family, dtype):
    model = tiny_model(family, dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "up_proj" not in name and "fc1" not in name
    perturbed = PerturbedForward(model, tunable(model), NOISE)
    probes = tuple(KeyedProbe(key, sign * SCALE) for key in range(4) for sign in (1, -1))
    dropped = frozenset({1})
    for selection in (None, *SELECTIONS.values()):
        batch = token_batch(selection)
        expected = [
            logits
            for start in range(0, 8, 2)
            for logits in run(perturbed, model, batch, Perturbation(probes[start : start + 2], dropped))
        ]
        for num_probes in (3, 4, 8):
            found = run(perturbed, model, batch, Perturbation(probes[:num_probes], dropped))
            assert len(found) == num_probes
            in_pairs = num_probes // 2 * 2  # the last of 3 runs alone
            assert list(map(torch.equal, found[:in_pairs], expected[:in_pairs])) == [True] * in_pairs


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_perturbation_the_model_gives_its_own_logits_bit_for_bit(family):
    model, batch = tiny_model(family), token_batch()
    expected = plain_logits(model, batch)
    perturbed = PerturbedForward(model, tunable(model), NOISE)
    run(perturbed, model, batch, perturbation(BOTH))
    assert torch.equal(plain_logits(model, batch), expected)
    (logits,) = run(perturbed, model, batch)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in MIXTURES])
def test_in_16_bits_the_perturbed_model_is_met_as_closely_as_a_plain_16_bit_forward_meets_it(family, dtype):
    model = tiny_model(family, dtype)
    trainable, batch, before = tunable(model), token_batch(), bits(model)
    plain = plain_logits(copy.deepcopy(model).float(), batch)
    exact = [reference(model, trainable, perturbation(sign, (1,))) for sign in (PLUS, MINUS)]
    ways = two_ways(model, trainable, batch, (1,))
    for side, exact_model in enumerate(exact):
        expected = plain_logits(exact_model, batch)
        rounded = plain_logits(exact_model.to(dtype), batch).float()
        rounding = (rounded - expected).pow(2).mean().sqrt()
        assert (expected - plain).pow(2).mean().sqrt() > 5 * rounding
        for logits in ways:
            assert logits[side].dtype == dtype
            assert (logits[side].float() - expected).pow(2).mean().sqrt() < 1.5 * rounding
    assert_same_weights(model, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_single_parameter_is_perturbed_wherever_it_is_used(family):
    batch = token_batch()
    untouched = tiny_model(family)
    plain = plain_logits(untouched, batch)
    for name, _ in untouched.named_parameters():
        model = tiny_model(family)
        trainable = tunable(model, only={name})
        change = perturbation(PLUS)
        expected = plain_logits(reference(model, trainable, change), batch)
        plus, minus = run(PerturbedForward(model, trainable, NOISE), model, batch, perturbation(BOTH))
        assert_equal_to_rounding(plus, expected)
        if not name.endswith("k_proj.bias"):  # shifts all of a query's scores alike, which softmax ignores
            assert (plus - plain).abs().max() > 1e-5, name
            assert (plus - minus).abs().max() > 1e-5, name


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_parameters_are_not_perturbed(family):
    model = tiny_model(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "norm" not in name and not name.endswith("bias")
    trainable, batch = tunable(model), token_batch()
    expected = plain_logits(reference(model, trainable, perturbation(MINUS)), batch)
    _, minus = run(PerturbedForward(model, trainable, NOISE), model, batch, perturbation(BOTH))
    assert_equal_to_rounding(minus, expected)


def test_with_all_blocks_dropped_and_nothing_outside_them_tunable_the_logits_do_not_move():
    model, batch = tiny_model("opt"), token_batch()
    blocks = {name for name, _ in model.named_parameters() if ".layers." in name}
    plain = plain_logits(model, batch)
    perturbed = PerturbedForward(model, tunable(model, only=blocks), NOISE)
    all_dropped = range(NUM_BLOCKS)
    (single,) = run(perturbed, model, batch, perturbation(PLUS, all_dropped))
    assert torch.equal(single, plain)
    for logits in run(perturbed, model, batch, perturbation(BOTH, all_dropped)):
        assert_equal_to_rounding(logits, plain)


def blocks_of(model):
    return list(model.get_submodule(find_blocks(model).path).children())


def in_blocks(model):
    """The names of the parameters in the blocks."""
    layout = find_blocks(model)
    return {name for name, _ in model.named_parameters() if layout.block_of(name) is not None}


def rows_of_blocks(model):
    """A list to which each block adds the number of rows that it gives."""
    rows = []
    for block in blocks_of(model):
        block.register_forward_hook(
            lambda _module, _inputs, output: rows.append(
                len(output if isinstance(output, torch.Tensor) else output[0])
            )
        )
    return rows


@pytest.mark.parametrize(("dropped", "first"), [((), 0), ((1,), 0), ((0,), 1), ((0, 1), 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_before_the_first_perturbed_one_run_on_one_copy_and_the_logits_stay(family, dropped, first):
    model, batch = tiny_model(family), token_batch()
    trainable = tunable(model, in_blocks(model))
    expected = both_references(model, trainable, batch, dropped)
    rows = rows_of_blocks(model)
    perturbed = PerturbedForward(model, trainable, NOISE, blocks=blocks_of(model))
    found = run(perturbed, model, batch, perturbation(BOTH, dropped))
    assert rows == [ROWS if block < first else 2 * ROWS for block in range(NUM_BLOCKS)]
    for logits, wanted in zip(found, expected, strict=True):
        assert_equal_to_rounding(logits, wanted)
    assert_equal_to_rounding(run(perturbed, model, batch)[0], plain_logits(model, batch))


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_masks_and_selections_fit_copies_that_are_made_at_a_block(family, rows):
    model = tiny_model(family)
    mask = torch.ones(rows, TOKENS, dtype=torch.int64)
    mask[0, :4] = 0
    selection = LogitSelection(torch.tensor([0, rows - 1, 0]), torch.tensor([9, 6, 5]), torch.tensor([40, 3]))
    trainable = tunable(model, in_blocks(model))
    probes = (KeyedProbe(7, SCALE), KeyedProbe(8, -SCALE), KeyedProbe(8, 0.0))
    plain_batch = token_batch(attention_mask=mask, rows=rows)
    singles = [Perturbation((probe,), frozenset({0})) for probe in probes]
    expected = [plain_logits(reference(model, trainable, single), plain_batch) for single in singles]
    perturbed = PerturbedForward(model, trainable, NOISE, blocks=blocks_of(model))
    batch = token_batch(selection, mask, rows)
    found = run(perturbed, model, batch, Perturbation(probes, frozenset({0})))
    for logits, wanted in zip(found, expected, strict=True):
        assert_equal_to_rounding(logits, select(wanted, selection))


def test_with_as_many_rows_as_tokens_only_what_belongs_to_rows_is_copied():
    for family in FAMILIES:
        model, batch = tiny_model(family), token_batch(rows=TOKENS)
        trainable = tunable(model, in_blocks(model))
        expected = both_references(model, trainable, batch, (0,))
        perturbed = PerturbedForward(model, trainable, NOISE, blocks=blocks_of(model))
        found = run(perturbed, model, batch, perturbation(BOTH, (0,)))
        for logits, wanted in zip(found, expected, strict=True):
            assert_equal_to_rounding(logits, wanted)


@pytest.mark.parametrize("family", ["opt", "gpt2", "llama", "gpt_neox", "gemma"])
def test_left_padded_batches_with_a_mask_run_dual_too(family):
    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    mask[0, :4], mask[2, :1] = 0, 0
    model, batch = tiny_model(family), token_batch(attention_mask=mask)
    trainable = tunable(model)
    expected = both_references(model, trainable, batch, (0,))
    for logits in two_ways(model, trainable, batch, (0,)):
        for found, wanted in zip(logits, expected, strict=True):
            assert_equal_to_rounding(found[mask.bool()], wanted[mask.bool()])


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_batches_of_any_number_of_rows_are_halved_right(rows):
    for family in ("opt", "gpt2"):
        model, batch = tiny_model(family), token_batch(rows=rows)
        trainable = tunable(model)
        expected = plain_logits(reference(model, trainable, perturbation(MINUS)), batch)
        _, minus = run(PerturbedForward(model, trainable, NOISE), model, batch, perturbation(BOTH))
        assert minus.shape == (rows, TOKENS, VOCABULARY)
        assert_equal_to_rounding(minus, expected)


SELECTIONS = {
    "all entries": LogitSelection(torch.tensor([0, 0, 2, 1]), torch.tensor([9, 3, 0, 3])),
    "some entries": LogitSelection(
        torch.tensor([0, 1, 2, 2, 2]), torch.tensor([9, 3, 0, 0, 5]), torch.tensor([40, 3, 47, 3])
    ),
}


def select(logits, selection):
    rows = logits[selection.rows, selection.positions]
    return rows if selection.vocabulary is None else rows[:, selection.vocabulary]


@pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS)
@pytest.mark.parametrize("tuned", ["all", "none of the head", "bias only"])
@pytest.mark.parametrize("family", FAMILIES)
def test_selected_logits_are_the_full_ones_indexed(family, tuned, selection):
    model = tiny_model(family)
    names = {name for name, _ in model.named_parameters()}
    head = {name for name in names if "lm_head" in name or "embed" in name or "wte" in name}
    only = {"all": names, "none of the head": names - head, "bias only": {"lm_head.bias"} & names}[tuned]
    perturbed = PerturbedForward(model, tunable(model, only), NOISE)
    changes = [None, *(perturbation(sign, (2,)) for sign in (PLUS, MINUS, BOTH))]
    for change in changes:
        full = run(perturbed, model, token_batch(), change)
        selected = run(perturbed, model, token_batch(selection), change)
        for wanted, found in zip(full, selected, strict=True):
            assert_equal_to_rounding(found, select(wanted, selection))


@pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS)
@pytest.mark.parametrize("family", ["opt", "phi", "gemma2"])
def test_selected_logits_are_the_full_ones_indexed_in_bfloat16(family, selection):
    model = tiny_model(family, torch.bfloat16)
    perturbed = PerturbedForward(model, tunable(model), NOISE)
    for change in [None, *(perturbation(sign, (2,)) for sign in (PLUS, MINUS, BOTH))]:
        full = run(perturbed, model, token_batch(), change)
        selected = run(perturbed, model, token_batch(selection), change)
        for wanted, found in zip(full, selected, strict=True):
            expected = select(wanted, selection).float()
            # Two roundings to 8 bits, of the product and of the sum, stand against one or two.
            torch.testing.assert_close(found.float(), expected, rtol=2**-6, atol=2**-6)


def test_a_selection_from_a_model_without_a_head_is_refused():
    model = nn.Sequential(nn.Linear(2, 2))
    perturbed = PerturbedForward(model, {}, NOISE)
    with pytest.raises(UserError, match="Sequential names no output head"):
        run(perturbed, model, token_batch(SELECTIONS["all entries"]))


def test_adapters_from_peft_are_perturbed_and_the_model_under_them_is_not():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model("opt"), config, autocast_adapter_dtype=False).eval()
    trainable, batch = tunable(model), token_batch()
    assert {named.block for named in trainable.values()} == set(range(NUM_BLOCKS))
    expected = plain_logits(reference(model, trainable, perturbation(PLUS, (1,))), batch)
    plain = plain_logits(model, batch)
    plus, _ = run(PerturbedForward(model, trainable, NOISE), model, batch, perturbation(BOTH, (1,)))
    assert (plus - plain).abs().max() > 1e-4
    assert_equal_to_rounding(plus, expected)


class Mixer(nn.Module):
    """Owns parameters and has children that own some; its bias is not added last."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(width, width))
        self.bias = nn.Parameter(0.3 * torch.randn(width))
        self.inner = nn.Linear(width, width)
        self.fail = False

    def forward(self, hidden, *, mask):
        mixed = torch.tanh(F.linear(self.inner(hidden), self.weight) + self.bias)
        if self.fail:
            raise RuntimeError("broken in the middle")
        return hidden + mixed * mask


class ToyModel(nn.Module):
    """The root owns a parameter too, so that even the head runs inside one half of the batch."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.temperature = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(Mixer(8) for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY)
        self.to(dtype)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        mask = (torch.arange(input_ids.shape[1]) % 3 > 0).to(hidden)[None, :, None]
        for block in self.blocks:
            hidden = block(hidden, mask=mask)
        return CausalLMOutput(logits=self.head(hidden) * self.temperature)


@pytest.mark.parametrize("only", [None, {"blocks.0.weight", "blocks.0.bias", "blocks.0.inner.weight"}])
@pytest.mark.parametrize("selection", [None, *SELECTIONS.values()])
def test_a_module_and_its_children_that_own_parameters_get_each_half_right(only, selection):
    model, batch = ToyModel(), token_batch(selection)
    trainable = tunable(model, only)
    expected = both_references(model, trainable, batch, (1,))
    if selection is not None:
        expected = [select(logits, selection) for logits in expected]
    for logits in two_ways(model, trainable, batch, (1,)):
        for found, wanted in zip(logits, expected, strict=True):
            assert_equal_to_rounding(found, wanted)


def test_in_16_bits_a_module_with_children_or_with_a_bias_of_its_own_kind_is_perturbed_in_its_own_dtype():
    model, batch = ToyModel(torch.bfloat16), token_batch()
    trainable = tunable(model)
    expected = both_references(model, trainable, batch, ())
    for logits in two_ways(model, trainable, batch, ()):
        for found, wanted in zip(logits, expected, strict=True):
            torch.testing.assert_close(found.float(), wanted, rtol=0, atol=0.03)


@pytest.mark.parametrize("sign", [PLUS, MINUS, BOTH])
def test_an_exception_in_a_forward_leaves_the_parameters_and_the_next_run_as_they_were(sign):
    model, batch = ToyModel(), token_batch(SELECTIONS["some entries"])
    before = bits(model)
    perturbed = PerturbedForward(model, tunable(model), NOISE)
    expected = run(perturbed, model, batch, perturbation(sign))
    plain = run(perturbed, model, batch)
    model.blocks[1].fail = True
    with pytest.raises(RuntimeError, match="broken in the middle"):
        run(perturbed, model, batch, perturbation(sign))
    model.blocks[1].fail = False
    assert_same_weights(model, before)
    assert torch.equal(select(plain_logits(model, batch), batch.selection), plain[0])
    again = run(perturbed, model, batch, perturbation(sign))
    assert all(torch.equal(*pair) for pair in zip(again, expected, strict=True))


class OneTable(nn.Module):
    """Gives its one tunable module whatever `positions` makes."""

    def __init__(self, positions):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, 4)
        self.positions = positions

    def forward(self, input_ids):
        table = self.table(self.positions(input_ids))
        return CausalLMOutput(logits=table.expand(*input_ids.shape, 4))


def run_table(positions, sign):
    model = OneTable(positions)
    trainable = {model.table.weight: NamedParameter("table.weight", 1, None)}
    return run(PerturbedForward(model, trainable, NOISE), model, token_batch(), perturbation(sign))


@pytest.mark.parametrize(
    "positions",
    [
        lambda ids: torch.arange(ids.shape[1]),
        lambda ids: torch.arange(2 * ROWS),  # as long as the doubled batch, and still no batch
        lambda ids: torch.zeros(1, dtype=torch.int64),
        lambda ids: torch.zeros(7, 4, dtype=torch.int64),
    ],
)
def test_a_tensor_without_a_batch_dimension_is_refused_in_the_dual_forward_with_the_way_out(positions):
    with pytest.raises(UserError, match=r"without a batch dimension.*zo\.probes_per_pass=1"):
        run_table(positions, BOTH)


def test_a_tensor_without_a_batch_dimension_is_fine_in_single_forwards():
    (logits,) = run_table(lambda ids: torch.arange(ids.shape[1]), PLUS)
    assert torch.equal(logits[0], logits[2])


def test_a_tensor_shared_by_all_rows_is_repeated_for_each_half():
    plus, minus = run_table(lambda ids: torch.arange(ids.shape[1])[None], BOTH)
    single = run_table(lambda ids: torch.arange(ids.shape[1])[None], MINUS)[0]
    assert torch.equal(minus, single)
    assert not torch.equal(plus, minus)


class HeadTwice(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        return CausalLMOutput(logits=self.head(hidden) + self.head(2 * hidden))


def test_a_head_that_is_called_twice_selects_the_same_rows_each_time():
    model = HeadTwice()
    trainable = {
        model.embed.weight: NamedParameter("embed.weight", 1, None),
        model.head.weight: NamedParameter("head.weight", 2, None),
    }
    perturbed = PerturbedForward(model, trainable, NOISE)
    selection = SELECTIONS["some entries"]
    full = run(perturbed, model, token_batch(), perturbation(BOTH))
    selected = run(perturbed, model, token_batch(selection), perturbation(BOTH))
    for wanted, found in zip(full, selected, strict=True):
        assert_equal_to_rounding(found, select(wanted, selection))


class OneModule(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, hidden):
        return CausalLMOutput(logits=self.module(hidden))


def run_module(module, hidden, only=("weight", "bias"), scale=1e-3):
    """Output of one bfloat16 module at theta + mu z, and theta + mu z itself in float32."""
    module = module.to(torch.bfloat16)
    ids = {"weight": 1, "bias": 2}
    trainable = {getattr(module, name): NamedParameter(name, ids[name], None) for name in only}
    model = OneModule(module)
    batch = MicroBatch({"hidden": hidden}, len(hidden))
    change = perturbation(BOTH, scale=scale)
    (plus, _) = run(PerturbedForward(model, trainable, NOISE), model, batch, change)
    exact = {}
    for parameter, named in trainable.items():
        z = NOISE.draw(SEED, named.parameter_id, 0, parameter.numel(), CPU).view_as(parameter)
        exact[named.name] = parameter.detach().float() + scale * z
    return plus, exact


HIDDEN = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_a_16_bit_norm_is_computed_with_float32_weights_that_keep_the_perturbation():
    plus, exact = run_module(nn.LayerNorm(16), HIDDEN)
    expected = F.layer_norm(HIDDEN.float(), (16,), exact["weight"], exact["bias"]).bfloat16()
    assert torch.equal(plus, expected)
    assert (exact["weight"].bfloat16() == 1).float().mean() > 0.5  # what 16 bits would have lost


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_16_bit_norm_of_which_one_vector_is_frozen_still_runs_in_float32(name):
    plus, exact = run_module(nn.LayerNorm(16), HIDDEN, only=(name,))
    vectors = {"weight": torch.ones(16), "bias": torch.zeros(16)} | {name: exact[name]}
    assert torch.equal(plus, F.layer_norm(HIDDEN.float(), (16,), **vectors).bfloat16())


def test_a_16_bit_linear_module_adds_its_bias_in_float32():
    plus, exact = run_module(nn.Linear(16, 6), HIDDEN)
    expected = F.linear(HIDDEN, exact["weight"].bfloat16()).float() + exact["bias"]
    assert torch.equal(plus, expected.bfloat16())


def test_a_16_bit_conv1d_of_gpt2_adds_its_bias_in_float32():
    plus, exact = run_module(Conv1D(6, 16), HIDDEN)
    expected = (HIDDEN.view(-1, 16) @ exact["weight"].bfloat16()).float() + exact["bias"]
    assert torch.equal(plus, expected.bfloat16().view(4, 5, 6))


class Scaled(nn.Module):
    """Owns a vector only, and a child that owns a matrix."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.inner = nn.Linear(16, 6)

    def forward(self, hidden):
        return self.inner(hidden) * self.weight


def test_a_16_bit_module_whose_children_need_16_bits_is_not_run_in_float32():
    module = Scaled()
    plus, exact = run_module(module, HIDDEN, only=("weight",), scale=0.1)
    assert torch.equal(plus, module.inner(HIDDEN) * exact["weight"].bfloat16())


def gradient_estimates(model, batch, dropped, num_directions):
    """Projected gradients [K], directions [K, d] over ALL parameters, and autograd's gradient [d]."""
    trainable = tunable(model)
    perturbed = PerturbedForward(model, trainable, NOISE)
    target = batch.inputs["input_ids"].roll(-1, 1)

    def loss(logits):
        return F.cross_entropy(logits.double().flatten(0, 1), target.flatten())

    gradient = torch.autograd.grad(loss(model(**batch.inputs).logits), list(trainable))
    scale, slopes, directions = 1e-3, [], []
    for seed in range(num_directions):
        change = perturbation(BOTH, dropped, scale, seed)
        plus, minus = run(perturbed, model, batch, change)
        slopes.append((loss(plus) - loss(minus)) / (2 * scale))
        z = [
            NOISE.draw(seed, named.parameter_id, 0, parameter.numel(), CPU)
            for parameter, named in trainable.items()
        ]
        directions.append(torch.cat(z))
    active = torch.cat(
        [
            torch.full((parameter.numel(),), named.block not in dropped)
            for parameter, named in trainable.items()
        ]
    )
    flat = torch.cat([part.flatten() for part in gradient]).double()
    return torch.stack(slopes).detach(), torch.stack(directions).double(), flat, active


def z_scores(samples, expected):
    """How many standard errors the mean of samples [K, ...] is away from what is expected."""
    return (samples.mean(0) - expected) / (samples.std(0) / len(samples) ** 0.5)


@pytest.fixture(scope="module")
def estimates():
    return gradient_estimates(ToyModel(), token_batch(), (1,), num_directions=2500)


def test_the_estimate_is_unbiased_on_the_active_layers(estimates):
    slopes, directions, gradient, active = estimates
    gradient = gradient * active
    # Along the gradient itself, where a bias would show first.
    along = slopes * (directions @ gradient) / gradient.dot(gradient)
    assert along.std() / len(along) ** 0.5 < 0.05
    assert abs(float(z_scores(along, 1.0))) < 4
    # And in every coordinate: squared z-scores have mean 1 if nothing but chance is in them.
    scores = z_scores(slopes[:, None] * directions[:, active], gradient[active])
    assert scores.abs().max() < 6
    assert 0.8 < scores.pow(2).mean() < 1.2


def test_the_slope_does_not_depend_on_the_noise_of_dropped_layers(estimates):
    slopes, directions, gradient, active = estimates
    assert (gradient[~active].abs() > 1e-4).any()
    scores = z_scores(slopes[:, None] * directions[:, ~active], 0.0)
    assert scores.abs().max() < 6
    assert 0.8 < scores.pow(2).mean() < 1.2


def test_the_squared_estimate_is_d_plus_2_times_the_squared_gradient(estimates):
    # For a loss that is linear at the scale of mu, E|g z'|^2 = (d' + 2) |gradient'|^2, with d' active
    # parameters. That implies lemma 2 of LeZO (Wang et al. 2024): |gradient'|^2 <= 2 E|g z'|^2 + ....
    slopes, directions, gradient, active = estimates
    squared = slopes.pow(2) * directions[:, active].pow(2).sum(1)
    squared_gradient = gradient[active].pow(2).sum()
    assert abs(float(z_scores(squared, (active.sum() + 2) * squared_gradient))) < 4
    assert squared_gradient <= 2 * squared.mean()
