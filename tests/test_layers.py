from __future__ import annotations

import copy
from collections import Counter
from itertools import combinations

import pytest
import torch
from tiny_models import FAMILIES, NUM_BLOCKS, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from lezo_ds.config import num_dropped_from_sparsity
from lezo_ds.errors import UserError
from lezo_ds.model.blocks import (
    BlockLayout,
    draw_dropped_layers,
    find_blocks,
    largest_module,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_blocks_of_every_family_are_found(family):
    assert find_blocks(tiny_model(family)) == BlockLayout(FAMILIES[family][1], NUM_BLOCKS)


@pytest.mark.parametrize("family", FAMILIES)
def test_block_of_agrees_with_the_modules_that_hold_the_parameters(family):
    model = tiny_model(family)
    layout = find_blocks(model)
    expected = {
        id(parameter): index
        for index, block in enumerate(model.get_submodule(layout.path))
        for parameter in block.parameters()
    }
    for name, parameter in model.named_parameters():
        assert layout.block_of(name) == expected.get(id(parameter)), name


def test_an_adapter_around_the_model_only_lengthens_the_path():
    adapted = nn.Module()
    adapted.base_model = nn.Module()
    adapted.base_model.model = tiny_model("opt")
    adapted.prompt = nn.Embedding(5, 16)
    layout = find_blocks(adapted)
    assert layout == BlockLayout("base_model.model.model.decoder.layers", NUM_BLOCKS)
    assert layout.block_of("base_model.model.model.decoder.layers.2.fc1.weight") == 2
    assert layout.block_of("prompt.weight") is None


def test_lora_from_peft_leaves_the_blocks_where_they_are():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    layout = find_blocks(peft.get_peft_model(tiny_model("opt"), config))
    assert layout == BlockLayout("base_model.model.model.decoder.layers", NUM_BLOCKS)


def test_ten_and_more_blocks_are_told_apart():
    layout = BlockLayout("layers", 12)
    assert [layout.block_of(f"layers.{index}.w") for index in (1, 10, 11)] == [1, 10, 11]
    assert layout.block_of("layers_norm.1.w") is None


def test_the_list_with_the_most_parameters_is_taken_and_experts_inside_a_block_are_not():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(9, 9) for _ in range(20))

    model = nn.Module()
    model.heads = nn.ModuleList(nn.Linear(3, 3) for _ in range(30))
    model.blocks = nn.ModuleList(Block() for _ in range(2))
    assert find_blocks(model) == BlockLayout("blocks", 2)


def test_sharded_parameters_count_with_their_full_size():
    model = nn.Module()
    model.small = nn.ModuleList([nn.Linear(2, 2)])
    model.sharded = nn.ModuleList([nn.Linear(2, 2)])
    for parameter in model.sharded.parameters():
        parameter.data, parameter.ds_numel = torch.empty(0), 1000
    assert find_blocks(model).path == "sharded"


def test_a_model_without_blocks_is_refused():
    with pytest.raises(UserError, match="no transformer blocks found in Linear; got: no module lists"):
        find_blocks(nn.Linear(2, 2))


def test_lists_of_unequal_or_empty_modules_are_refused_and_named():
    model = nn.Module()
    model.mixed = nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)])
    model.bare = nn.ModuleList([nn.ReLU()])
    with pytest.raises(UserError, match=r"got: mixed \(2\), bare \(1\)"):
        find_blocks(model)


def test_a_list_inside_unequal_blocks_does_not_pass_for_the_blocks():
    block = nn.Module()
    block.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(2, 2), block])
    with pytest.raises(UserError, match=r"got: blocks \(2\), blocks\.1\.experts \(2\)"):
        find_blocks(model)


def test_sparsity_of_the_paper_gives_the_papers_numbers_of_layers():
    drops = [num_dropped_from_sparsity(0.75, num_blocks) for num_blocks in (24, 40, 48)]
    assert drops == [18, 30, 36]
    assert [num_dropped_from_sparsity(share, 40) for share in (0.0, 0.5, 1.0)] == [0, 20, 40]


@pytest.mark.parametrize(
    ("seed", "step", "num_blocks", "kept"),
    [
        (0, 0, 24, (0, 3, 5, 9, 16, 18)),
        (0, 1, 24, (1, 4, 9, 17, 19, 20)),
        (7, 19_999, 48, (1, 3, 4, 5, 9, 12, 16, 17, 19, 22, 31, 39)),
    ],
)
def test_draws_are_the_recorded_ones(seed, step, num_blocks, kept):
    dropped = draw_dropped_layers(seed, step, num_blocks, num_blocks - len(kept))
    assert dropped == tuple(block for block in range(num_blocks) if block not in kept)


@pytest.mark.parametrize("num_dropped", range(6))
def test_a_draw_has_exactly_n_sorted_blocks_of_the_model(num_dropped):
    for step in range(50):
        drawn = draw_dropped_layers(3, step, 5, num_dropped)
        assert len(set(drawn)) == num_dropped
        assert list(drawn) == sorted(drawn)
        assert set(drawn) <= set(range(5))


def test_dropping_none_and_dropping_all_leave_no_choice():
    assert draw_dropped_layers(0, 0, 4, 0) == ()
    assert draw_dropped_layers(0, 0, 4, 4) == (0, 1, 2, 3)


@pytest.mark.parametrize("num_dropped", [-1, 5])
def test_an_impossible_number_of_dropped_blocks_is_our_own_bug(num_dropped):
    with pytest.raises(ValueError, match="is not in"):
        draw_dropped_layers(0, 0, 4, num_dropped)


def chi_square(counts, num_cells, num_draws):
    expected = num_draws / num_cells
    return sum((count - expected) ** 2 / expected for count in counts)


def test_every_subset_is_equally_likely():
    num_draws = 6000
    counts = Counter(draw_dropped_layers(11, step, 5, 2) for step in range(num_draws))
    assert set(counts) == set(combinations(range(5), 2))
    # 9 degrees of freedom: above 27.9 once in a thousand times.
    assert chi_square(counts.values(), 10, num_draws) < 27.9


def test_draws_of_neighbouring_seeds_and_steps_are_independent():
    num_draws = 6000
    for other in (lambda step: (11, step + 1), lambda step: (12, step)):
        pairs = Counter(
            draw_dropped_layers(11, step, 3, 1) + draw_dropped_layers(*other(step), 3, 1)
            for step in range(num_draws)
        )
        # 8 degrees of freedom: above 26.1 once in a thousand times.
        assert chi_square(pairs.values(), 9, num_draws) < 26.1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_largest_module_is_a_block_or_what_is_larger_outside(family):
    model = tiny_model(family)
    layout = find_blocks(model)
    block = sum(p.numel() for p in model.get_submodule(layout.path)[0].parameters())
    assert largest_module(model, layout) == block
    config = copy.deepcopy(FAMILIES[family][0])
    config.vocab_size = 1000
    model = AutoModelForCausalLM.from_config(config)
    head = sum(p.numel() for p in model.get_output_embeddings().parameters())
    assert largest_module(model, layout) == head > block
