import copy

import pytest
from tiny_models import FAMILIES, NUM_BLOCKS, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from lezo_ds.errors import UserError
from lezo_ds.forward.blocks import BlockLayout, find_blocks, freeze_all_but
from lezo_ds.tools.memory_plan import gather_sizes


@pytest.mark.parametrize("family", FAMILIES)
def test_each_parameter_of_every_family_belongs_to_the_block_whose_module_holds_it(family):
    model = tiny_model(family)
    layout = find_blocks(model)
    assert layout == BlockLayout(FAMILIES[family][1], NUM_BLOCKS)
    blocks = enumerate(model.get_submodule(layout.path))
    expected = {parameter: index for index, block in blocks for parameter in block.parameters()}
    for name, parameter in model.named_parameters():
        assert layout.block_of(name) == expected.get(parameter, NUM_BLOCKS + 1), name
    freeze_all_but("blocks", model, layout)
    assert all(p.requires_grad == (p in expected) for p in model.parameters())


def test_names_of_blocks_are_told_apart():
    layout = BlockLayout("layers", 12)
    assert [layout.block_of(f"layers.{index}.w") for index in (1, 10)] == [1, 10]
    assert layout.block_of("layers_norm.1.w") == layout.block_of("base.layers.1.w") == 13


def test_the_list_with_the_most_parameters_is_taken_and_experts_inside_a_block_are_not():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(9, 9) for _ in range(20))

    model = nn.Module()
    model.heads = nn.ModuleList(nn.Linear(3, 3) for _ in range(30))
    model.blocks = nn.ModuleList(Block() for _ in range(2))
    assert find_blocks(model) == BlockLayout("blocks", 2)


def test_lists_of_unequal_or_empty_modules_and_those_inside_them_are_refused():
    block = nn.Module()
    block.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(2, 2), block])
    model.bare = nn.ModuleList([nn.ReLU()])
    with pytest.raises(UserError, match="no transformer blocks in Module"):
        find_blocks(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_largest_part_is_a_block_or_a_larger_module_outside(family):
    model = tiny_model(family)
    layout = find_blocks(model)
    block = sum(p.numel() for p in model.get_submodule(layout.path)[0].parameters())
    config = copy.deepcopy(FAMILIES[family][0])
    config.vocab_size = 1000
    model = AutoModelForCausalLM.from_config(config)
    weight = model.get_output_embeddings().weight
    head = sum(p.numel() for p in model.get_output_embeddings().parameters())
    assert head > block
    is_tied = weight is model.get_input_embeddings().weight
    # A tied embedding stays gathered in a pass, and counts on its own.
    expected = (block, weight.numel()) if is_tied else (head, 0)
    assert gather_sizes(model, model.get_submodule(layout.path)) == expected
