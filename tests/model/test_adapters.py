"""LoRA and prefix tuning before training: initial values and outputs, and how peft loads them."""

import hashlib
import os
from pathlib import Path

import pytest
import torch
from family_models import small_config
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from thorough import thorough
from tiny_adapters import PREFIX_LENGTH, peft_config, start_engine, train, whole_batch
from tiny_models import FAMILIES, VOCABULARY, tiny_model
from tiny_runs import SEED, full_weights, write_model
from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig

from lezo_ds.config import PeftConfig
from lezo_ds.data.generation import prompt_batch
from lezo_ds.errors import UserError
from lezo_ds.forward.adapters import load_prefix, make_adapter, read_adapter, start_of
from lezo_ds.forward.adapters.lora import uniform
from lezo_ds.forward.adapters.prefix import PrefixAdapter, initial_ids
from lezo_ds.forward.answer_cache import cache_name
from lezo_ds.forward.batch import GenerationSettings
from lezo_ds.forward.blocks import find_blocks
from lezo_ds.sharding.files import WeightFiles
from lezo_ds.zo.keys import adapter_key

pytestmark = pytest.mark.distributed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROMPTS = [(0, 5, 9, 30), (0, 7), (0, 11, 12, 13, 14, 15, 16, 17)]
SETTINGS = GenerationSettings(max_new_tokens=6, stop_ids=(2,), pad_id=1)


def write_family(family, root):
    return write_model(FAMILIES[family][0], root / family)


def load(directory, dtype="fp32"):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype]).eval()


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["a pipe", "a folder"])
def test_what_is_no_file_of_weights_is_refused_and_not_waited_for(make, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    make(tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"does not hold an adapter: .*it is not a regular file"):
        read_adapter(tmp_path)
    with pytest.raises(UserError, match=r"cannot be read: .*it is not a regular file"):
        WeightFiles(tmp_path, single="adapter_model.safetensors")


def test_the_first_values_are_uniform_and_each_seed_and_parameter_has_its_own():
    assert initial_ids(0, 5, 50272) == [31280, 569, 31140, 33440, 12490]  # of a prefix
    assert initial_ids(1, 5, 50272)[:3] != initial_ids(0, 3, 50272) == [31280, 569, 31140]
    places = torch.arange(40_000)
    values = uniform(adapter_key(3), 7, places)
    assert values.min() >= -1 and values.max() < 1
    counts = torch.histc(values, 20, -1, 1)
    # 19 degrees of freedom, once in a thousand.
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 43.8
    for seed, parameter_id in ((4, 7), (3, 8)):
        other = uniform(adapter_key(seed), parameter_id, places)
        assert abs(float(torch.corrcoef(torch.stack([values, other]))[0, 1])) < 0.02


def _lora(directory, family, dtype, num_ranks, root):
    """Return weights and logits before 3 steps, logits after them, and a snapshot's directory."""
    peft = peft_config("lora", family)
    engine = start_engine(directory, peft, dtype, num_ranks, learning_rate=1.0)
    first, logits = full_weights(engine), engine.forward(whole_batch())
    train(engine, 3)
    return first, logits, engine.forward(whole_batch()), engine.save_checkpoint(root)


@pytest.mark.parametrize(
    ("family", "dtype", "num_ranks"), [("gpt2", "fp32", 1), ("llama", "bf16", 2)]
)
def test_lora_starts_at_the_model_and_is_opened_by_peft(family, dtype, num_ranks, tmp_path):
    directory = write_family(family, tmp_path)
    settings = (directory, family, dtype, num_ranks, tmp_path / "saved")
    *_, (first, first_logits, logits, snapshot) = run_ranks(_lora, num_ranks, *settings)
    bound = 16**-0.5  # kaiming_uniform_(a=sqrt(5)), as peft starts A
    for name, value in first.items():
        if name.endswith(".lora_A.weight"):
            assert value.shape == (2, 16)
            assert 0.7 * bound < float(value.abs().max()) <= bound
        assert not (name.endswith(".lora_B.weight") and value.any())
    batch = whole_batch().inputs
    with torch.no_grad():
        torch.testing.assert_close(first_logits, load(directory, dtype)(**batch).logits)
        base = load(directory, dtype)
        opened = PeftModel.from_pretrained(base, snapshot, autocast_adapter_dtype=False)
        assert opened.peft_config["default"].base_model_name_or_path == str(directory)
        torch.testing.assert_close(opened.eval()(**batch).logits, logits)
    assert float((logits - first_logits).abs().max()) > 0.01


@pytest.mark.parametrize("family", ["opt", "llama", "gpt2"])
def test_all_linear_adapts_the_modules_that_peft_does(family):
    ours, theirs = tiny_model(family), tiny_model(family)
    make_adapter(PeftConfig(kind="lora", lora_targets="all-linear")).attach(ours, find_blocks(ours))
    get_peft_model(theirs, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    adapted, by_peft = (
        [name for name, module in model.named_modules() if isinstance(module, LoraLayer)]
        for model in (ours, theirs)
    )
    assert adapted == by_peft != []


def _start(directory, peft):
    engine = start_engine(directory, peft, learning_rate=1.0)
    before = engine.forward(whole_batch())
    train(engine, 1)
    engine.sharded.load_initial()
    return before, engine.forward(whole_batch())


def test_a_run_starts_from_an_adapter_that_peft_has_written(tmp_path):
    directory = write_family("llama", tmp_path)
    lora = LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "up_proj"])
    theirs = get_peft_model(load(directory), lora).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    theirs.save_pretrained(tmp_path / "start")
    settings = {"lora_rank": 3, "lora_alpha": 7.0, "lora_targets": "up_proj,q_proj"}
    peft = PeftConfig(kind="lora", path=str(tmp_path / "start"), **settings)
    with torch.no_grad():
        expected = theirs(**whole_batch().inputs).logits
    for before, again in run_ranks(_start, 2, directory, peft):
        torch.testing.assert_close(before, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(before, again)
    content = (tmp_path / "start" / "adapter_model.safetensors").read_bytes()
    assert start_of(peft) == hashlib.sha256(content).hexdigest()[:32]
    for changes, message in (
        ({"lora_rank": 8}, "has lora_rank=3, not 8; fix: set peft.lora_rank=3"),
        ({"lora_targets": "q_proj"}, "has lora_targets=.*, not q_proj"),
        ({"path": str(directory)}, "does not hold a peft adapter"),
    ):
        with pytest.raises(UserError, match=message):
            make_adapter(peft.model_copy(update=changes))


def test_factors_of_an_adapter_that_the_model_lacks_are_named(tmp_path, caplog):
    """As those of the vision tower of a model that is trained on text."""
    _saved_by_peft(tmp_path / "start", target_modules=["q_proj"])
    file = tmp_path / "start" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.vision_tower.q_proj.lora_A.weight"
    save_file({**tensors, name: torch.ones(3, 4)}, file)
    settings = {"lora_rank": 3, "lora_alpha": 8.0, "lora_targets": "q_proj"}
    peft = PeftConfig(kind="lora", path=str(tmp_path / "start"), **settings)
    start_engine(write_family("llama", tmp_path), peft)
    expected = f"1 of {len(tensors) + 1} tensors are left out, such as {name}: no text"
    assert expected in caplog.text


def _saved_by_peft(root, **changes):
    """Return what `read_adapter` reads of an adapter of peft, and the adapter."""
    lora = LoraConfig(**({"r": 3, "target_modules": ["q_proj", "up_proj"]} | changes))
    theirs = get_peft_model(tiny_model("llama"), lora)
    theirs.save_pretrained(root)
    return read_adapter(root)["peft"], theirs


def test_targets_are_the_modules_that_peft_adapted_and_settings_without_effect_are_read(tmp_path):
    found, theirs = _saved_by_peft(tmp_path, target_modules=r".*\.(self_attn\.[qv]|mlp\.up)_proj")
    adapted = {name.split(".")[-4] for name in theirs.state_dict() if ".lora_A." in name}
    assert set(found["lora_targets"].split(",")) == adapted == {"q_proj", "v_proj", "up_proj"}
    plain, _ = _saved_by_peft(tmp_path)
    for setting in ({"init_lora_weights": "gaussian"}, {"modules_to_save": []}):
        assert _saved_by_peft(tmp_path, **setting)[0] == plain


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"layers_to_transform": [0]}, r"layers_to_transform=\[0\]"),
        ({"layers_to_transform": 0}, "layers_to_transform=0"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern="),
        ({"target_parameters": ["mlp.down_proj.weight"]}, "target_parameters="),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head.base_layer.weight"),
    ],
)
def test_what_peft_would_not_read_as_plain_lora_is_refused(changes, named, tmp_path):
    with pytest.raises(UserError, match=rf"{named}.* is not a plain LoRA adapter; fix: merge it"):
        _saved_by_peft(tmp_path, **changes)


def _merge(directory, peft, root):
    """Return the logits of a model with a trained adapter, and write both as a user does."""
    engine = start_engine(directory, peft, learning_rate=1.0)
    train(engine, 2)
    engine.write_model(root / "adapter", card=lambda _: "")
    engine.write_model(root / "merged", card=lambda _: "", merge=True)
    return engine.forward(whole_batch())


BERT = small_config("bert")
"""Its head has a tied bias, too."""


@pytest.mark.parametrize(
    ("config", "targets"),
    [
        (FAMILIES["gpt2"][0], "lm_head,c_attn"),
        (FAMILIES["qwen2"][0], "lm_head"),
        (FAMILIES["opt"][0], "q_proj"),
        (BERT, "cls.predictions.decoder,query"),
        (BERT, "query"),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_a_merged_adapter_of_a_tied_head_is_that_of_the_head_alone(config, targets, tmp_path):
    directory = write_model(config, tmp_path / "base")
    peft = PeftConfig(kind="lora", lora_rank=2, lora_targets=targets)
    (logits,) = run_ranks(_merge, 1, directory, peft, tmp_path)
    adapted = PeftModel.from_pretrained(load(directory), tmp_path / "adapter").eval()
    opened = tmp_path / "merged"
    merged, info = AutoModelForCausalLM.from_pretrained(opened, output_loading_info=True)
    assert not any(info.values())
    embedding = load(directory).get_input_embeddings().weight
    adapts_head = "lm_head" in targets or "decoder" in targets
    assert torch.equal(merged.get_input_embeddings().weight, embedding)
    is_tied = merged.get_output_embeddings().weight is merged.get_input_embeddings().weight
    assert is_tied is merged.config.tie_word_embeddings is (not adapts_head)
    near = 1e-4 * float(logits.abs().max())
    for model in (adapted, merged.eval()):
        with torch.no_grad():
            found = model(**whole_batch().inputs).logits
        torch.testing.assert_close(found, logits, rtol=0, atol=near)


LINEAR = "some of down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj"


@pytest.mark.parametrize(
    ("family", "targets", "problem"),
    [
        ("llama", "q_proj,nowhere", LINEAR),
        ("llama", "proj", LINEAR),
        ("llama", "embed_tokens", LINEAR),
        ("mamba", "out_proj", r"peft\.lora_targets=out_proj is not possible"),
        ("deepseek_v3", "down_proj", "would adapt the experts"),
        ("llama4_text", "router", "has no linear module .router"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused_in_one_line(family, targets, problem):
    model = AutoModelForCausalLM.from_config(small_config(family))
    adapter = make_adapter(PeftConfig(kind="lora", lora_targets=targets))
    with pytest.raises(UserError, match=problem):
        adapter.attach(model, find_blocks(model))


def _prefix(directory, family, dtype, num_ranks, root):
    """Return the first values, and after 3 steps the values, logits, new tokens and a snapshot."""
    peft = peft_config("prefix", family)
    engine = start_engine(directory, peft, dtype, num_ranks, learning_rate=3.0)

    def values():
        """Return the keys and values of each block, without low bits."""
        found = full_weights(engine)
        keys = [name for name in found if name.endswith(".prefix.key")]
        return [(found[name], found[name.removesuffix("key") + "value"]) for name in keys]

    first = values()
    train(engine, 3)
    logits, batch = engine.forward(whole_batch()), prompt_batch(PROMPTS, SETTINGS)
    return first, values(), logits, engine.forward(batch), engine.save_checkpoint(root)


def logits_by_hand(model, prefix, ids):
    """Return the logits of text behind a prefix in the cache, its positions from 0."""
    rows, tokens = ids.shape
    cache = DynamicCache(config=model.config)
    for block, (key, value) in enumerate(prefix):
        cache.update(key.expand(rows, -1, -1, -1), value.expand(rows, -1, -1, -1), block)
    inputs = {cache_name(model): cache, "position_ids": torch.arange(tokens).expand(rows, -1)}
    mask = torch.ones(rows, PREFIX_LENGTH + tokens, dtype=torch.int64)
    with torch.no_grad():
        return model(ids, attention_mask=mask, **inputs).logits


def continue_by_hand(model, prefix, prompt):
    """Write greedily, the whole text anew for each token."""
    new = []
    while len(new) < SETTINGS.max_new_tokens and 2 not in new:
        ids = torch.tensor([[*prompt, *new]])
        new.append(int(logits_by_hand(model, prefix, ids)[0, -1].argmax()))
    return new


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", thorough("opt"), thorough("qwen3")])
def test_a_prefix_equals_keys_and_values_put_before_the_text_by_hand(family, tmp_path):
    dtype, num_ranks = ("bf16", 2) if family == "llama" else ("fp32", 1)
    config = FAMILIES[family][0]
    if family == "mistral":
        config = MistralConfig(**(config.to_dict() | {"sliding_window": None}))
    directory = write_model(config, tmp_path / family)
    settings = (directory, family, dtype, num_ranks, tmp_path / "saved")
    *_, (first, prefix, logits, tokens, snapshot) = run_ranks(_prefix, num_ranks, *settings)
    model, batch = load(directory, dtype), whole_batch().inputs
    with torch.no_grad():
        cache = model(torch.tensor([initial_ids(SEED, PREFIX_LENGTH, VOCABULARY)]), use_cache=True)
    for (key, value), layer in zip(first, cache[cache_name(model)].layers, strict=True):
        torch.testing.assert_close(key, layer.keys[0])
        torch.testing.assert_close(value, layer.values[0])
    expected = logits_by_hand(model, prefix, batch["input_ids"])
    tolerance = 1e-5 if dtype == "fp32" else 0.03
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)
    before = logits_by_hand(model, first, batch["input_ids"])
    assert float((expected - before).abs().max()) > 2 * tolerance
    if dtype == "fp32":  # in bf16, the probabilities of two tokens may be the same
        for prompt, row in zip(PROMPTS, tokens.tolist(), strict=True):
            written = continue_by_hand(model, prefix, prompt)
            assert row == written + [SETTINGS.pad_id] * (len(row) - len(written))
    load_prefix(model, snapshot)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, logits)
    with pytest.raises(UserError, match="does not fit"):
        load_prefix(tiny_model("llama" if family == "opt" else "opt"), snapshot)


def test_a_prefix_longer_than_the_positions_of_a_model_is_refused():
    model = tiny_model("opt")
    with pytest.raises(UserError, match=r"peft.prefix_length=1000 is above the \d+ positions"):
        PrefixAdapter(1000).attach(model, find_blocks(model))


def _first_values_of_another_machine(directory, root):
    """Train from first values that this engine would not compute; return records and a digest."""
    engine = start_engine(directory, peft_config("prefix"), num_ranks=2)
    for parameter in engine.weights.adapter_shards:
        parameter.stored().mul_(1 + 2.0**-20)
    engine.save_checkpoint(root)
    return train(engine, 2), engine.weights.digest()


def _resumed_digests(directory, roots, records):
    digests = []
    for root in roots:
        engine = start_engine(directory, peft_config("prefix"))
        engine.load_checkpoint(root, records)
        digests.append(engine.weights.digest())
    return digests


def test_the_first_values_in_a_snapshot_count_not_those_computed_again(opt_directory, tmp_path):
    (records, digest), _ = run_ranks(_first_values_of_another_machine, 2, opt_directory, tmp_path)
    roots = [tmp_path, tmp_path / "none"]
    ((resumed, replayed),) = run_ranks(_resumed_digests, 1, opt_directory, roots, records)
    assert resumed == digest != replayed
