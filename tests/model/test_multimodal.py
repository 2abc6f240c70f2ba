"""Models for images and text: a run trains what text can reach, and transformers opens the rest."""

import pytest
import torch
from family_checks import Family
from family_models import NUM_LAYERS
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_models import VOCABULARY
from tiny_runs import full_weights, start_engine, train
from transformers import AutoModelForCausalLM

from lezo_ds.checkpoints.checkpoint import build_on_meta
from lezo_ds.config import PeftConfig
from lezo_ds.forward.blocks import find_blocks, modules_of_text
from lezo_ds.tools.memory_plan import gather_sizes

FAMILIES = ("gemma3", "qwen3_5", "git")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The models, by family, as their publishers save them."""
    root = tmp_path_factory.mktemp("published")
    return {family: Family(family, root / family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_trained_is_what_has_a_gradient_after_a_text(family, published):
    model = AutoModelForCausalLM.from_pretrained(published[family].directory).eval()
    model(input_ids=torch.tensor([[0, 11, 12, 13]])).logits.sum().backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None}
    built = build_on_meta(model.config, torch.float32)
    assert {name for name, p in built.named_parameters() if p.requires_grad} == reached
    layout = find_blocks(built)
    assert layout.num_blocks == NUM_LAYERS
    assert all(p.requires_grad for p in built.get_submodule(layout.path).parameters())
    num_reached = sum(model.get_parameter(name).numel() for name in reached)
    assert gather_sizes(built, built.get_submodule(layout.path))[0] < num_reached


def _train(directory, root):
    """Return the weights before and after two steps, and the directory of a snapshot."""
    engine = start_engine(directory, sparsity=0.0)
    before = full_weights(engine)
    train(engine, 2, vocabulary=VOCABULARY)
    return before, full_weights(engine), engine.save_checkpoint(root)


@pytest.mark.distributed
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_training_on_text_leaves_the_rest_alone_and_saves_it(family, published, tmp_path):
    settings = published[family].directory, tmp_path / "saved"
    ((before, after, snapshot),) = run_ranks(_train, 1, *settings)
    model = published[family].opened_whole(snapshot)
    of_text = {
        f"{name}.{own}" if name else own
        for name, module in modules_of_text(model).items()
        for own, _ in module.named_parameters(recurse=False)
    }
    for name, value in after.items():
        assert torch.equal(value, before[name]) == (name not in of_text), name
    parameters = dict(model.named_parameters())
    assert parameters.keys() == after.keys()
    assert all(torch.equal(parameters[name], value) for name, value in after.items())


def test_an_adapter_has_no_part_in_the_vision_tower(published, tmp_path):
    """`q_proj` is a name of modules in both."""
    peft = PeftConfig(kind="lora", lora_rank=2, lora_targets="q_proj,up_proj")
    engine = start_engine(published["gemma3"].directory, peft=peft)
    tensors = load_file(engine.save_checkpoint(tmp_path) / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * NUM_LAYERS
    assert all(".language_model.layers." in name for name in tensors)
