from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import FAMILIES, NUM_BLOCKS, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from lezo_ds.errors import UserError
from lezo_ds.forward.blocks import BlockLayout, find_blocks, largest_module, part_sizes
from lezo_ds.model.checkpoint import refuse_separate_experts


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
    with pytest.raises(UserError, match=r"each expert of Module .* got: blocks\.0\.experts with 20"):
        refuse_separate_experts(model, find_blocks(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_has_experts_that_run_only_if_they_are_chosen(family):
    model = tiny_model(family)
    refuse_separate_experts(model, find_blocks(model))


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
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight.numel() if is_tied else 0
    # A tied embedding stays gathered in a pass, and counts on its own.
    assert part_sizes(model, layout) == (block if is_tied else head, tied)
