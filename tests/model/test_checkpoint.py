"""Models on disk: which tensors are read as which parameter, and which checkpoints are refused."""

from __future__ import annotations

import copy
import json
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, tiny_model
from tiny_runs import start_engine
from transformers import (
    CONFIG_MAPPING,
    ApertusConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertGenerationConfig,
    CpmAntConfig,
    DeepseekV3Config,
    ExaoneMoeConfig,
    Gemma4Config,
    LlamaConfig,
    LlamaForCausalLM,
)

from lezo_ds.checkpoints.checkpoint import (
    _HUB_PATTERNS,
    _NOT_READ,
    build_checked,
    build_on_meta,
    check_files,
    hub_problem,
    load_model_config,
    open_weights,
    parameter_names,
    resolve_model,
    saved_config,
)
from lezo_ds.config import PeftConfig
from lezo_ds.data.records import read_hub
from lezo_ds.errors import HubError, UserError
from lezo_ds.forward.adapters import make_adapter, read_adapter
from lezo_ds.noise import Region
from lezo_ds.sharding.files import WeightFiles

BIAS = "model.decoder.layers.0.fc1.bias"


def assert_reads(directory, model):
    """Check that all parameters of a model are read from a directory, in slices, bit for bit."""
    check_files(model, directory)
    files = open_weights(model, directory)
    parameters = dict(model.named_parameters())
    stored = files.find(
        parameter_names(model), {name: tuple(p.shape) for name, p in parameters.items()}
    )
    assert stored.keys() == parameters.keys()
    for name, tensors in stored.items():
        flat = parameters[name].detach().flatten()
        middle = len(flat) // 3
        parts = (
            files.read(tensors, Region.run(0, middle)),
            files.read(tensors, Region.run(middle, len(flat) - middle)),
        )
        assert torch.equal(torch.cat(parts), flat), name


def assert_opened_alike(directory, model=None):
    """Check that transformers opens the weights of a model there, and that we read the same."""
    opened = AutoModelForCausalLM.from_pretrained(directory)
    if model is not None:
        assert torch.equal(opened.lm_head.weight, model.lm_head.weight)
    assert_reads(resolve_model(str(directory)), opened)
    return opened


@pytest.fixture(scope="module")
def model():
    return tiny_model("opt", torch.bfloat16)


@pytest.fixture(scope="module")
def single(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("single")
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def sharded(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("sharded")
    model.save_pretrained(directory, max_shard_size="4KB")
    return directory


@pytest.fixture
def changed(single, tmp_path):
    """A function that copies the model and changes its config and its tensors."""

    def copy(change):
        directory = shutil.copytree(single, tmp_path / "model")
        config = json.loads((directory / "config.json").read_text())
        tensors = load_file(directory / "model.safetensors")
        change(config, tensors)
        (directory / "config.json").write_text(json.dumps(config))
        save_file(tensors, directory / "model.safetensors")
        return directory

    return copy


@pytest.mark.parametrize("family", FAMILIES)
def test_the_checkpoints_of_every_family_are_read(family, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    assert_reads(tmp_path, model)


def test_weights_in_several_files_or_of_the_base_model_alone_are_read(model, sharded, tmp_path):
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert_reads(sharded, model)
    model.model.save_pretrained(tmp_path)
    assert_reads(tmp_path, model)


def test_a_single_file_comes_before_an_index_beside_it_as_in_transformers(model, sharded, tmp_path):
    """Saving a model again as one file may leave the old shards and their index in place."""
    directory = shutil.copytree(sharded, tmp_path / "model")
    newer = tiny_model("opt", torch.bfloat16, seed=1)
    newer.save_pretrained(tmp_path / "newer")
    shutil.copy(tmp_path / "newer/model.safetensors", directory)
    assert_opened_alike(directory, newer)
    sorted(directory.glob("model-*.safetensors"))[0].unlink()  # nor is a lack among them one
    assert_reads(directory, newer)


def test_the_file_that_a_config_names_is_read_as_in_transformers(sharded, single, tmp_path):
    directory = shutil.copytree(single, tmp_path / "model")
    named = tiny_model("opt", torch.bfloat16, seed=1)
    named.save_pretrained(tmp_path / "named")
    shutil.copy(tmp_path / "named/model.safetensors", directory / "best.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["transformers_weights"] = "best.safetensors"
    (directory / "config.json").write_text(json.dumps(config))
    opened = assert_opened_alike(directory, named)
    assert "transformers_weights" not in saved_config(opened, directory)
    # An index may have any name, too.
    index = "model.safetensors.index.json"
    directory = shutil.copytree(sharded, tmp_path / "parts")
    (directory / index).rename(directory / f"best.{index}")
    config["transformers_weights"] = f"best.{index}"
    (directory / "config.json").write_text(json.dumps(config))
    assert_opened_alike(directory)


def test_files_of_torch_are_read_as_by_transformers_where_there_are_no_others(single, tmp_path):
    """OPT is on the hub as pytorch_model.bin, or as several files and an index."""
    saved = tiny_model("opt", torch.bfloat16, seed=2)
    tensors = {name: tensor.clone() for name, tensor in saved.state_dict().items()}
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    names = sorted(tensors)
    index = {name: f"pytorch_model-{1 + (name > names[9])}.bin" for name in names}
    parts = {
        file: {name: tensors[name] for name in names if index[name] == file}
        for file in set(index.values())
    }
    whole = {"pytorch_model.bin": tensors}
    kinds = {"whole": whole, "bare": {"pytorch_model.bin": bare}, "parts": parts}
    for title, files in kinds.items():
        directory = tmp_path / title
        directory.mkdir()
        shutil.copy(single / "config.json", directory)
        for name, held in files.items():
            torch.save(held, directory / name)
        if len(files) > 1:
            path = directory / "pytorch_model.bin.index.json"
            path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
        assert_opened_alike(directory, saved)
    shutil.copy(single / "model.safetensors", tmp_path / "parts")
    assert_reads(tmp_path / "parts", AutoModelForCausalLM.from_pretrained(single))


class Pickled:
    def __reduce__(self):
        return Path.touch, (Path("code-ran"),)


@pytest.mark.parametrize("kind", ["code", "the format before torch 1.6", "cut short"])
def test_a_file_of_torch_that_cannot_be_mapped_or_runs_code_is_refused(
    kind, model, single, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copy(single / "config.json", tmp_path)
    file = tmp_path / "pytorch_model.bin"
    tensors = model.state_dict()
    if kind == "code":
        tensors["code"] = Pickled()
    torch.save(tensors, file, _use_new_zipfile_serialization=kind != "the format before torch 1.6")
    if kind == "cut short":
        file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(UserError, match=r"pytorch_model.bin cannot be read .*; fix: .* convert it"):
        assert_reads(tmp_path, model)
    assert not (tmp_path / "code-ran").exists()


@pytest.mark.parametrize("name", ["lost.safetensors", "../model.safetensors", 3])
def test_a_config_that_names_no_file_of_its_directory_is_refused(single, tmp_path, name):
    directory = shutil.copytree(single, tmp_path / "model")
    shutil.copy(single / "model.safetensors", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"transformers_weights": name}))
    with pytest.raises(UserError, match=r"transformers_weights=.* is no file there"):
        resolve_model(str(directory))


def test_a_tied_parameter_is_read_under_whichever_of_its_names_it_is_stored(model, changed):
    embedding, head = "model.decoder.embed_tokens.weight", "lm_head.weight"
    assert parameter_names(model)[embedding] == (embedding, head)
    assert_reads(changed(lambda _, tensors: tensors.update({head: tensors.pop(embedding)})), model)


@pytest.mark.parametrize("are_alike", [True, False])
def test_a_head_that_the_config_ties_is_its_own_if_the_checkpoint_has_another_as_in_transformers(
    changed, are_alike
):
    embedding, head = "model.decoder.embed_tokens.weight", "lm_head.weight"

    def add_head(_, tensors):
        values = tensors[embedding]
        tensors[head] = values.clone() if are_alike else values.flip(0)

    directory = changed(add_head)
    opened = AutoModelForCausalLM.from_pretrained(directory)
    built, _ = build_checked(directory, "bf16")
    assert parameter_names(built) == parameter_names(opened)
    assert (head in parameter_names(built)) is not are_alike
    assert_reads(directory, opened)
    config = saved_config(built, directory)
    assert config["tie_word_embeddings"] is are_alike


def test_a_saved_config_names_the_class_of_the_weights_and_one_dtype(changed, model):
    older = {"torch_dtype": "float16", "architectures": ["OPTModel"]}
    directory = changed(lambda config, _: config.update(older))
    config = saved_config(model, directory)
    assert config["architectures"] == ["OPTForCausalLM"]
    assert "torch_dtype" not in config


def test_a_model_without_a_head_is_refused_if_its_config_does_not_tie_one(changed):
    directory = changed(lambda config, _: config.update(tie_word_embeddings=False))
    with pytest.raises(UserError, match=r"lacks 1 of .* parameters, such as lm_head\.weight"):
        build_checked(directory, "fp32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda _, tensors: tensors.pop(BIAS),
            rf"lacks 1 of the model's \d+ parameters, such as {BIAS}",
        ),
        (
            lambda _, tensors: tensors.update({BIAS: torch.zeros(64)}),
            r"shape \(64,\), .* needs \(24,\)",
        ),
        (
            lambda config, _: config.update(quantization_config={"quant_method": "fp8"}),
            "are quantized: fp8",
        ),
        (
            lambda config, _: config.update(attn_implementation="someone/kernel"),
            "names code on the hub",
        ),
    ],
)
def test_a_checkpoint_that_is_not_the_models_weights_is_refused_before_loading(
    changed, change, message
):
    with pytest.raises(UserError, match=message):
        build_checked(changed(change), "fp32")


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_cut_or_missing_file_of_weights_is_refused_with_its_name(sharded, tmp_path, damage):
    directory = shutil.copytree(sharded, tmp_path / "model")
    victim = sorted(directory.glob("*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:-10]) if damage == "cut" else victim.unlink()
    with pytest.raises(UserError, match=f"{victim.name} cannot be read"):
        WeightFiles(directory)


BROKEN = ('{"weight_map": {"a": "../other/model.safetensors"}}', "[]", "{broken", "[" * 9000)


@pytest.mark.parametrize("index", BROKEN)
def test_an_index_that_names_anything_but_files_in_its_directory_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(
        UserError, match=r"model\.safetensors\.index\.json cannot be read: \w+Error"
    ):
        WeightFiles(tmp_path)


def test_an_encoder_is_refused_because_its_tokens_see_the_answer():
    config = BertConfig(vocab_size=40, hidden_size=8, num_attention_heads=2, num_hidden_layers=2)
    with pytest.raises(UserError, match="has an encoder"):
        build_on_meta(config, torch.float32)
    config.is_decoder = True
    build_on_meta(config, torch.float32)
    sizes = {"vocab_size": 40, "hidden_size": 8, "num_attention_heads": 2}
    for config in (BertGenerationConfig(**sizes), CpmAntConfig(**sizes, dim_head=4)):
        with pytest.raises(UserError, match="has an encoder"):
            build_on_meta(config, torch.float32)


@pytest.mark.parametrize(
    ("family", "both_ways"),
    [("qwen2", {"is_causal": False}), ("gemma3_text", {"use_bidirectional_attention": True})],
)
def test_a_decoder_that_reads_texts_in_both_directions_is_refused(family, both_ways):
    """Models of embeddings are, such as EmbeddingGemma. Padding would be seen."""
    build_on_meta(CONFIG_MAPPING[family](num_hidden_layers=1), torch.float32)
    with pytest.raises(UserError, match="reads texts in both directions"):
        build_on_meta(CONFIG_MAPPING[family](num_hidden_layers=1, **both_ways), torch.float32)


def test_no_loss_that_balances_experts_is_asked_for():
    """Some fine-tuned models ask for it. It fails where the rows of a mask are not the model's."""
    config = copy.deepcopy(FAMILIES["mixtral"][0])
    config.output_router_logits = True
    model = build_on_meta(config, torch.float32).to_empty(device="cpu")
    output = model(input_ids=torch.ones(2, 3, dtype=torch.int64))
    assert output.aux_loss is None and output.router_logits is None
    assert config.output_router_logits  # as an export has it


def test_an_export_has_the_buffers_that_a_model_stores(tmp_path):
    config = ApertusConfig(
        vocab_size=40,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    start_engine(tmp_path / "model").write_model(tmp_path / "exported")
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(info.values()), info


def test_a_part_that_a_multimodal_model_does_not_have_is_none(tmp_path):
    Gemma4Config(audio_config=None).save_pretrained(tmp_path)
    assert load_model_config(tmp_path).audio_config is None


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (DeepseekV3Config, {"n_routed_experts": 4, "n_group": 2, "topk_group": 1}),
        (ExaoneMoeConfig, {"num_experts": 4, "n_group": 2, "topk_group": 1}),
    ],
)
def test_buffers_are_those_of_transformers(tmp_path, kind, sizes):
    """Routers correct their scores by a buffer that stays in single precision.

    EXAONE stores it by another name.
    """
    sizes |= dict.fromkeys(["hidden_size", "intermediate_size", "moe_intermediate_size"], 16)
    sizes |= dict.fromkeys(["kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim"], 4)
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 4}
    sizes |= {"num_experts_per_tok": 1, "first_k_dense_replace": 1}
    model = AutoModelForCausalLM.from_config(kind(vocab_size=40, num_hidden_layers=2, **sizes))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    expected = torch.tensor([4.01, 4.02, 4.03, 4.04])  # in bf16, all but one would be 4.03125
    model.get_buffer(name).copy_(expected)
    model.save_pretrained(tmp_path / "model")
    engine = start_engine(tmp_path / "model", "bf16")
    assert torch.equal(engine.module.get_buffer(name), expected)
    model.get_buffer(name)[0] += 1
    model.save_pretrained(tmp_path / "other")
    other = start_engine(tmp_path / "other", "bf16")
    assert other.base.fingerprint != engine.base.fingerprint
    engine.write_model(tmp_path / "exported")
    exported, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", output_loading_info=True
    )
    assert not any(info.values()), info
    assert torch.equal(exported.get_buffer(name), expected)


def test_parameters_have_the_precisions_of_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["0.*.up_proj", "norm"])
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=40, num_hidden_layers=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ours, _ = build_checked(tmp_path, "bf16")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = {name: each.dtype for name, each in theirs.named_parameters()}
    assert {name: each.dtype for name, each in ours.named_parameters()} == expected
    assert list(expected.values()).count(torch.float32) == 1 + 5


def test_what_is_no_model_is_refused_with_what_to_name_instead(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gguf/model.gguf", "lora/adapter_config.json", "models/smollm2/config.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    for name in ("config.json", "model.safetensors", "adapter_config.json"):
        (tmp_path / "both").mkdir(exist_ok=True)
        (tmp_path / "both" / name).touch()
    for name, message in (
        ("both", "has an adapter.*; or, if it is merged already, remove adapter_config.json"),
        ("gguf", "as GGUF.*; fix: set model.path to the model that it was made from"),
        ("gguf/model.gguf", "as GGUF.*; fix: set model.path to the model that it was made from"),
        ("lora", "has an adapter, which is not its base model; fix: merge it once"),
        ("models", "models has no config.json"),
        ("models/smolm2", r"fix: did you mean smollm2\?"),
        ("models/other", "fix: check the name"),
        ("ggfu", r"fix: did you mean gguf\?"),
    ):
        with pytest.raises(UserError, match=message) as error:
            resolve_model(name)
        assert error.type is UserError  # a dry run does not go on
    with pytest.raises(HubError):
        resolve_model("facebook/opt-1.3b")


def test_attention_of_a_package_that_is_not_installed_is_refused_with_its_key():
    with pytest.raises(UserError, match=r"FlashAttention.*; fix: .* remove attn_implementation"):
        build_on_meta(LlamaConfig(attn_implementation="flash_attention_2"), torch.float32)


def test_all_that_transformers_reads_is_downloaded_and_no_second_copy_of_the_weights():
    read = [
        *("config.json", "generation_config.json", "processor_config.json", "tokenizer.json"),
        *("merges.txt", "vocab.json", "tokenizer.model", "spiece.model", "chat_template.jinja"),
        *("additional_chat_templates/rag.jinja", "model-00001-of-00002.safetensors"),
        "model.safetensors.index.json",
    ]
    other = ["pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors", "a.py"]
    patterns = {"allow_patterns": _HUB_PATTERNS, "ignore_patterns": _NOT_READ}
    assert list(filter_repo_objects([*read, *other], **patterns)) == read


@pytest.mark.parametrize(
    ("model", "asked"),
    [("owner/name", ("owner/name", None)), ("owner/name@v1.2", ("owner/name", "v1.2"))],
)
def test_a_revision_of_a_model_on_the_hub_is_downloaded(model, asked, tmp_path, monkeypatch):
    seen = []

    def download(name, revision, **_):
        seen.append((name, revision))
        return str(tmp_path)

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr("lezo_ds.checkpoints.checkpoint.snapshot_download", download)
    assert resolve_model(model) == tmp_path
    assert seen == [asked]


def test_an_adapter_of_a_revision_names_it_as_peft_does(tmp_path):
    adapter = make_adapter(PeftConfig(kind="lora", lora_targets="q_proj"))
    adapter.write_config(tmp_path, "owner/name@v1.2")
    written = LoraConfig.from_pretrained(tmp_path)
    assert (written.base_model_name_or_path, written.revision) == ("owner/name", "v1.2")
    weights = {"base_model.model.q_proj.lora_A.weight": torch.zeros(2, 4)}
    save_file(weights, tmp_path / "adapter_model.safetensors")
    assert read_adapter(tmp_path)["model"]["path"] == "owner/name@v1.2"


def test_a_hub_that_does_not_answer_is_given_up_within_seconds(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for port in (silent.getsockname()[1], 9):
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
            hub_problem.cache_clear()
            start = time.perf_counter()
            with pytest.raises(HubError, match=f"127.0.0.1:{port} does not answer within 2 s"):
                resolve_model("facebook/opt-1.3b")
            with pytest.raises(HubError, match=f"127.0.0.1:{port} does not answer within 2 s"):
                list(read_hub("nyu-mll/glue", "sst2", "train"))
            assert time.perf_counter() - start < 5
    hub_problem.cache_clear()
