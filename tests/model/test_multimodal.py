"""Models for images and text: a run trains what text can reach, and transformers opens the rest."""

from __future__ import annotations

import pytest
import torch
import transformers
from family_checks import Family
from family_models import NUM_LAYERS, VOCABULARY
from peft import PeftModel
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_adapters import start_engine as start_adapter_engine
from tiny_runs import full_weights, make_batch, start_engine, train
from transformers import AutoModelForCausalLM

from lezo_ds.checkpoints.checkpoint import build_on_meta
from lezo_ds.config import PeftConfig
from lezo_ds.forward.blocks import find_blocks, gather_sizes, modules_of_text

FAMILIES = ("gemma3", "qwen3_5", "git")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The directories of the models, by family, as their publishers save them."""
    root = tmp_path_factory.mktemp("published")
    return {family: Family(family, root / family).directory for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_trained_is_what_has_a_gradient_after_a_text(family, published):
    model = AutoModelForCausalLM.from_pretrained(published[family]).eval()
    model(input_ids=torch.tensor([[0, 11, 12, 13]])).logits.sum().backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None}
    built = build_on_meta(model.config, torch.float32)
    assert {name for name, p in built.named_parameters() if p.requires_grad} == reached
    layout = find_blocks(built)
    assert layout.num_blocks == NUM_LAYERS
    assert all(p.requires_grad for p in built.get_submodule(layout.path).parameters())
    assert gather_sizes(built, layout).largest < sum(
        model.get_parameter(n).numel() for n in reached
    )


def _train(directory, root):
    """Return the weights before and after two steps, and the directory of a snapshot."""
    engine = start_engine(directory, sparsity=0.0)
    before = full_weights(engine)
    train(engine, 2, vocabulary=VOCABULARY)
    return before, full_weights(engine), engine.save_checkpoint(root)


@pytest.mark.distributed
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_training_on_text_leaves_the_rest_alone_and_its_snapshot_lacks_nothing(
    family, published, tmp_path
):
    ((before, after, snapshot),) = run_ranks(_train, 1, published[family], tmp_path / "saved")
    model, report = AutoModelForCausalLM.from_pretrained(snapshot, output_loading_info=True)
    of_text = {
        f"{name}.{own}" if name else own
        for name, module in modules_of_text(model).items()
        for own, _ in module.named_parameters(recurse=False)
    }
    for name, value in after.items():
        assert torch.equal(value, before[name]) == (name not in of_text), name
    own_class = getattr(transformers, model.config.architectures[0])
    same, own_report = own_class.from_pretrained(snapshot, output_loading_info=True)
    for each in (report, own_report):
        assert not any(each.values()), each
    parameters = dict(same.named_parameters())
    assert parameters.keys() == after.keys()
    assert all(torch.equal(parameters[name], value) for name, value in after.items())


def _adapt(directory, peft, root):
    engine = start_adapter_engine(directory, peft)
    train(engine, 1, 2, VOCABULARY)
    (batch,) = make_batch(0, num_micro_batches=1, vocabulary=VOCABULARY)
    return engine.forward(batch), engine.save_checkpoint(root)


@pytest.mark.distributed
def test_an_adapter_has_no_part_in_the_vision_tower_and_peft_opens_it(published, tmp_path):
    """`q_proj` is a name of modules in both."""
    directory = published["gemma3"]
    peft = PeftConfig(kind="lora", lora_rank=2, lora_targets="q_proj,up_proj")
    ((logits, snapshot),) = run_ranks(_adapt, 1, directory, peft, tmp_path / "saved")
    tensors = load_file(snapshot / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * NUM_LAYERS
    assert all(".language_model.layers." in name for name in tensors)
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(directory), snapshot)
    (batch,) = make_batch(0, num_micro_batches=1, vocabulary=VOCABULARY)
    selection = batch.selection
    with torch.no_grad():
        found = opened.eval()(**batch.inputs).logits[selection.rows, selection.positions]
    torch.testing.assert_close(found[:, selection.vocabulary], logits, rtol=1e-4, atol=1e-4)
