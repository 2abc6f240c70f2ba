"""The recipes for Llama, Qwen and Mistral: tiny checkpoints of each family, and the memory they state."""

from __future__ import annotations

import json
import re

import pytest
from assets import REPOSITORY
from commands import run_forked_well
from golden_tasks import GOLDEN
from own_data import write_byte_model
from transformers import LlamaConfig, MistralConfig, Qwen3Config

from lezo_ds.recipes import load_recipe, recipe_text
from lezo_ds.tools.planning.memory import GIB
from lezo_ds.tools.planning.options import make_plan

COMMON = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
SHAPES = {
    "llama-3.1-8b": LlamaConfig(**COMMON, intermediate_size=14336, num_hidden_layers=32, vocab_size=128256),
    "qwen3-8b": Qwen3Config(**COMMON, intermediate_size=12288, num_hidden_layers=36, vocab_size=151936),
    "mistral-7b": MistralConfig(**COMMON, intermediate_size=14336, num_hidden_layers=32, vocab_size=32768),
}
"""The sizes of the models on the hub, as far as their memory depends on them."""
TINY = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
NAMES = sorted(SHAPES)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A directory of BoolQ records."""
    directory = tmp_path_factory.mktemp("boolq")
    records = [golden.record for golden in GOLDEN if golden.task == "boolq"]
    for name in ("train", "validation"):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records * 20))
    return directory


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_checkpoint_of_the_family_passes_the_dry_run(name, data, tmp_path):
    config = type(SHAPES[name])(**COMMON | TINY)
    model = write_byte_model(tmp_path / "model", config=config)
    more = ["data.num_train=20", "data.num_dev=10", "data.num_test=10"]
    arguments = ["--config", name, "--dry-run", f"model.path={model}", f"data.path={data}", *more]
    plan = run_forked_well(arguments, directory=tmp_path).out
    assert type(config).__name__.replace("Config", "ForCausalLM") in plan
    assert "boolq, protocol clean: 20 train, 10 dev, 10 test" in plan
    assert "4 in model.layers, 3 dropped per step" in plan


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_that_a_recipe_states_is_the_plans(name, tmp_path):
    SHAPES[name].save_pretrained(tmp_path)
    config = load_recipe(str(REPOSITORY / "launch" / "recipes" / f"{name}.yaml"), [f"model.path={tmp_path}"])
    text = (REPOSITORY / "launch" / "recipes" / f"{name}.yaml").read_text()
    stated = re.search(r"Hardware: 2 GPUs of 24 GiB: ([\d.]+) GiB .*\n.* 40 GiB, .* takes ([\d.]+) GiB", text)
    for num_gpus, gigabytes, expected in ((2, 24, stated[1]), (1, 40, stated[2])):
        chosen = make_plan(config, num_gpus=num_gpus, gpu_bytes=gigabytes * GIB, length=None).chosen
        assert chosen.fits
        assert f"{chosen.memory.total / GIB:.1f}" == expected
        assert chosen.config.train.micro_batch_size == 16 // num_gpus
        assert chosen.config.zo == config.zo


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_names_its_model_on_the_hub_and_is_listed(name):
    config = load_recipe(name)
    assert re.fullmatch(r"[\w-]+/[\w.-]+", config.model.path)
    assert "has never been run" in (REPOSITORY / "launch" / "recipes" / f"{name}.yaml").read_text()
    assert config.model.path in recipe_text(name)
