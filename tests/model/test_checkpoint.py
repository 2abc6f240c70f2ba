"""Models on disk: which tensors are read as which parameter, and which checkpoints are refused."""

import copy
import json
import os
import shutil
import socket
import time
from functools import partial

import pytest
import torch
import transformers
from assets import change_json
from family_models import small_config
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, MIXTURES, tiny_model
from tiny_runs import start_engine
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from lezo_ds.checkpoints import checkpoint
from lezo_ds.checkpoints.checkpoint import (
    build_checked,
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
EMBEDDING = "model.decoder.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


def assert_reads(directory, model):
    """Check that all parameters of a model are read from a directory, in slices, bit for bit."""
    checkpoint.check_files(model, directory)
    files = checkpoint.open_weights(model, directory)
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    stored = files.find(parameter_names(model), shapes)
    assert stored.keys() == parameters.keys()
    for name, tensors in stored.items():
        flat = parameters[name].detach().flatten()
        middle = len(flat) // 3
        regions = Region.run(0, middle), Region.run(middle, len(flat) - middle)
        parts = [files.read(tensors, region) for region in regions]
        assert torch.equal(torch.cat(parts), flat), name


def assert_opened_alike(directory, model):
    """Check that transformers opens the weights of a model there, and that we read the same."""
    opened = AutoModelForCausalLM.from_pretrained(directory)
    assert torch.equal(opened.lm_head.weight, model.lm_head.weight)
    assert_reads(resolve_model(str(directory)), opened)
    return opened


def exported(engine, directory):
    """Return the tensors of an export, which transformers opens, and the model that it opens."""
    engine.write_model(directory)
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    return load_file(directory / "model-00001.safetensors"), model


@pytest.fixture(scope="module")
def model():
    return tiny_model("opt", torch.bfloat16)


@pytest.fixture
def single(model, tmp_path):
    model.save_pretrained(tmp_path / "single")
    return tmp_path / "single"


@pytest.fixture
def sharded(model, tmp_path):
    model.save_pretrained(tmp_path / "sharded", max_shard_size="4KB")
    return tmp_path / "sharded"


@pytest.fixture
def changed(single):
    """A function that changes the config and the tensors of the model."""

    def change_both(change):
        config = json.loads((single / "config.json").read_text())
        tensors = load_file(single / "model.safetensors")
        change(config, tensors)
        (single / "config.json").write_text(json.dumps(config))
        save_file(tensors, single / "model.safetensors")
        return single

    return change_both


@pytest.mark.parametrize("family", FAMILIES)
def test_the_checkpoints_of_every_family_are_read(family, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    assert_reads(tmp_path, model)


def test_the_files_that_transformers_would_read_are_read(model, sharded, tmp_path):
    """Saving a model again as one file may leave the old shards and their index in place."""
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert_reads(sharded, model)
    index = "model.safetensors.index.json"
    newer = tiny_model("opt", torch.bfloat16, seed=1)
    newer.save_pretrained(tmp_path / "newer")
    shutil.copy(tmp_path / "newer/model.safetensors", sharded)
    assert_opened_alike(sharded, newer)
    (sharded / index).rename(sharded / f"best.{index}")
    change_json(sharded / "config.json", transformers_weights=f"best.{index}")
    opened = assert_opened_alike(sharded, model)
    assert "transformers_weights" not in saved_config(opened, sharded)
    for name in ("lost.safetensors", "../newer/model.safetensors", 3):
        change_json(sharded / "config.json", transformers_weights=name)
        with pytest.raises(UserError, match=r"transformers_weights=.* is not a file"):
            resolve_model(str(sharded))


def test_an_index_says_which_file_has_a_tensor_and_files_may_be_in_folders(model, sharded):
    files = sorted(sharded.glob("*.safetensors"))
    first = load_file(files[0])
    others = {name: torch.zeros_like(tensor) for name, tensor in first.items()}
    save_file(load_file(files[-1]) | others, files[-1])
    (sharded / "parts").mkdir()
    for file in files:
        file.rename(sharded / "parts" / file.name)
    index = sharded / "model.safetensors.index.json"
    places = {name: f"parts/{file}" for name, file in change_json(index)["weight_map"].items()}
    change_json(index, weight_map=places)
    assert_reads(resolve_model(str(sharded)), model)
    change_json(index, weight_map=places | dict.fromkeys(first, "parts/none"))
    with pytest.raises(UserError, match="parts/none cannot be read"):
        build_checked(sharded, "bf16")


def test_files_of_torch_are_read_as_by_transformers_where_there_are_no_others(single, tmp_path):
    """OPT is on the hub as pytorch_model.bin, or as several files and an index."""
    saved = tiny_model("opt", torch.bfloat16, seed=2)
    shutil.copy(single / "config.json", tmp_path)
    tensors = {name: tensor.clone() for name, tensor in saved.state_dict().items()}
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    for held in (tensors, bare):
        torch.save(held, tmp_path / "pytorch_model.bin")
        assert_opened_alike(tmp_path, saved)
    torch.save({"state_dict": tensors}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="such as under state_dict; fix: load it with torch"):
        build_checked(tmp_path, "bf16")
    (tmp_path / "pytorch_model.bin").unlink()
    names = sorted(tensors)
    index = {}
    for number, part in enumerate((names[:9], names[9:])):
        index |= dict.fromkeys(part, f"pytorch_model-{number}.bin")
        torch.save({name: tensors[name] for name in part}, tmp_path / index[part[0]])
    path = tmp_path / "pytorch_model.bin.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    assert_opened_alike(tmp_path, saved)
    shutil.copy(single / "model.safetensors", tmp_path)
    assert_reads(tmp_path, AutoModelForCausalLM.from_pretrained(single))


UNREADABLE = {
    "the format before torch 1.6": {},
    "cut short": {},
    "sparse": {"x": torch.zeros(4).to_sparse()},
    "meta": {"x": torch.zeros(4, device="meta")},
    "numbers as names": {3: torch.zeros(4)},
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_file_of_torch_that_cannot_be_mapped_is_refused(kind, model, single):
    (single / "model.safetensors").unlink()
    file = single / "pytorch_model.bin"
    tensors = model.state_dict() | UNREADABLE[kind]
    torch.save(tensors, file, _use_new_zipfile_serialization="before" not in kind)
    if kind == "cut short":
        file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(UserError, match=r"pytorch_model.bin cannot be read .*; fix: .* convert it"):
        assert_reads(single, model)


def test_a_tied_parameter_is_read_under_whichever_of_its_names_it_is_stored(model, changed):
    assert parameter_names(model)[EMBEDDING] == (EMBEDDING, LM_HEAD)
    assert_reads(changed(lambda _, held: held.update({LM_HEAD: held.pop(EMBEDDING)})), model)


@pytest.mark.parametrize("are_alike", [True, False])
def test_a_tied_head_is_its_own_if_the_checkpoint_has_another(changed, are_alike):
    def add_head(_, tensors):
        values = tensors[EMBEDDING]
        tensors[LM_HEAD] = values.clone() if are_alike else values.flip(0)

    directory = changed(add_head)
    opened = AutoModelForCausalLM.from_pretrained(directory)
    built, _ = build_checked(directory, "bf16")
    assert parameter_names(built) == parameter_names(opened)
    assert (LM_HEAD in parameter_names(built)) is not are_alike
    assert_reads(directory, opened)
    assert saved_config(built, directory)["tie_word_embeddings"] is are_alike


METHOD = {"quant_method": "compressed-tensors"}
MXFP4 = {"quant_method": "mxfp4"}
FP8 = {"quant_method": "fp8", "weight_block_size": [0, 1]}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tie_word_embeddings": False}, r"lacks 1 of .* parameters, such as lm_head\.weight"),
        ({"text_config": {"quantization_config": METHOD}}, "are quantized: compressed-tensors"),
        ({"compression_config": METHOD}, "are quantized: compressed"),
        ({"quantization": {"bits": 4}}, "are quantized: .*'bits': 4"),
        ({"quantization_config": {"quant_method": "fp8"}}, "are quantized: fp8, and only FP8"),
        ({"quantization_config": FP8}, "are quantized: fp8, and only FP8"),
        ({"quantization_config": MXFP4}, r"mxfp4.*; fix: .*Mxfp4Config\(dequantize=True\)"),
        ({"attn_implementation": "someone/kernel"}, "names code on the hub"),
        (
            {"return_dict": False},
            r"return_dict=False in .*config\.json: .*; fix: remove return_dict",
        ),
        ({"attn_implementation": "flash_attention_2"}, "fix: .* remove attn_implementation"),
    ],
)
def test_a_config_of_other_weights_is_refused_before_loading(changed, config, message):
    with pytest.raises(UserError, match=message):
        build_checked(changed(lambda values, _: values.update(config)), "fp32")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({BIAS: torch.zeros(64)}, r"shape \(64,\), .* needs \(24,\)"),
        ({BIAS: torch.zeros(24, dtype=torch.int8)}, f"{BIAS} in .* is I8, and a weight is a float"),
        ({BIAS: torch.zeros(24, dtype=torch.complex64)}, f"{BIAS} in .* is C64"),
        ({f"{BIAS}_scale": torch.ones(24, 1)}, f"quantized: {BIAS}_scale says what the values of"),
        ({"score.weight": torch.ones(2, 16)}, "alone: it has score.weight, as a classifier"),
        ({"x.fc1.lora_A.weight": torch.ones(2, 16)}, "an adapter that is not merged"),
    ],
)
def test_tensors_that_are_no_weights_of_the_model_are_refused(changed, tensors, message):
    with pytest.raises(UserError, match=message):
        build_checked(changed(lambda _, held: held.update(tensors)), "fp32")


def test_tensors_that_no_parameter_has_are_named_and_their_layers_not_counted(changed, caplog):
    def add(config, tensors):
        config["num_hidden_layers"] = 1
        config["num_nextn_predict_layers"] = 2
        tensors["model.decoder.mtp.0.weight"] = torch.ones(2)

    directory = changed(add)
    built, _ = build_checked(directory, "bf16")
    num_stored = len(load_file(directory / "model.safetensors"))
    num_unread = num_stored - len(parameter_names(built))
    assert f"{num_unread} of {num_stored} tensors in {directory} are not read" in caplog.text
    assert "model.decoder.layers.1.fc1.bias, " in caplog.text
    assert saved_config(built, directory)["num_nextn_predict_layers"] == 0


def test_a_weight_that_is_not_finite_is_refused_by_its_name(changed):
    directory = changed(lambda _, held: held[BIAS].fill_(torch.inf))
    model, _ = build_checked(directory, "fp32")
    with pytest.raises(UserError, match=f"{BIAS} in {directory} has a value that is not finite"):
        checkpoint.open_weights(model, directory).read([BIAS], Region.run(0, 24))


def test_a_list_of_more_tensors_than_a_model_can_have_is_not_read(single):
    header = json.dumps({"x" * 2_000_000: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})
    size = len(header).to_bytes(8, "little")
    (single / "model.safetensors").write_bytes(size + header.encode())
    with pytest.raises(UserError, match=r"its list of tensors has 2\d{6} bytes, and .* at most 1"):
        build_checked(single, "fp32")


def test_a_config_of_several_models_says_the_dtype_of_its_text_model_and_what_is_not_there(single):
    transformers.Gemma3Config(text_config={"num_hidden_layers": 1}).save_pretrained(single)
    path = single / "config.json"
    text_config = change_json(path)["text_config"] | {"dtype": "bfloat16"}
    change_json(path, dtype=None, text_config=text_config)
    assert checkpoint.stored_dtype(single) == "bf16"
    transformers.Gemma4Config(audio_config=None).save_pretrained(single)
    assert checkpoint.load_model_config(single).audio_config is None


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}, 64),
        ({"rope_type": "dynamic", "factor": 2.0}, 128),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}, 64),
    ],
)
def test_scaled_positions_go_further_than_the_model_before_it_was_scaled(rope, expected):
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if "llama3" in str(rope) else {}
    parameters = {"rope_type": "default", "rope_theta": 1e4} | rope | bounds
    config = LlamaConfig(max_position_embeddings=64, rope_parameters=parameters)
    assert checkpoint.num_positions(config) == expected


@pytest.mark.parametrize("family", MIXTURES)
def test_an_export_has_the_names_of_its_base_and_no_file_that_is_not_there(family, tmp_path):
    """Other loaders know the published names, with a tensor for each expert."""
    tiny_model(family).save_pretrained(tmp_path / "base")
    code = {"auto_map": {"AutoConfig": "configuration_x.XConfig"}}
    older = {"torch_dtype": "float16", "architectures": ["AnotherModel"]}
    architectures = change_json(tmp_path / "base/config.json")["architectures"]
    change_json(tmp_path / "base/config.json", **code, **older)
    (tmp_path / "base/tokenizer_config.json").write_text(json.dumps(code | {"x": "ä"}))
    base = load_file(tmp_path / "base/model.safetensors")
    tensors, _ = exported(start_engine(tmp_path / "base"), tmp_path / "exported")
    assert tensors.keys() == base.keys()
    assert all(torch.equal(tensors[name], base[name]) for name in base)
    written = change_json(tmp_path / "exported/config.json")
    assert not {"auto_map", "torch_dtype"}.intersection(written)
    assert (written["architectures"], written["dtype"]) == (architectures, "float32")
    assert change_json(tmp_path / "exported/tokenizer_config.json") == {"x": "ä"}


def test_a_cut_or_missing_file_of_weights_is_refused_with_its_name(sharded):
    victim = sorted(sharded.glob("*.safetensors"))[1]
    for damage in (lambda: victim.write_bytes(victim.read_bytes()[:-10]), victim.unlink):
        damage()
        with pytest.raises(UserError, match=f"{victim.name} cannot be read"):
            WeightFiles(sharded)


def test_a_file_larger_than_memory_is_listed_and_read_only_if_it_can_be_mapped(tmp_path):
    numel = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # two bytes each
    header = {"a": {"dtype": "BF16", "shape": [numel], "data_offsets": [0, 2 * numel]}}
    listed = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(listed).to_bytes(8, "little") + listed)
        file.truncate(8 + len(listed) + 2 * numel)  # sparse: it takes no space
    weights = WeightFiles(tmp_path)
    assert weights.tensors["a"].shape == (numel,)
    try:  # a machine may allow such a mapping
        values = weights.read(["a"], Region.run(5, 3)).tolist()
    except UserError as error:
        assert "model.safetensors cannot be mapped into memory" in str(error)
    else:
        assert values == [0, 0, 0]


def test_an_index_that_names_anything_but_files_in_its_directory_is_refused(tmp_path):
    for index in ('{"weight_map": {"a": "../model.safetensors"}}', "[]", "{broken", "[" * 9000):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(UserError, match=r"\.index\.json cannot be read: \w+Error"):
            WeightFiles(tmp_path)


@pytest.mark.parametrize(
    ("config_class", "causal", "both_ways", "message"),
    [
        (transformers.BertConfig, {"is_decoder": True}, {}, "has an encoder"),
        (transformers.Qwen2Config, {}, {"is_causal": False}, "reads texts in both directions"),
        (Gemma3TextConfig, {}, {"use_bidirectional_attention": True}, "in both directions"),
    ],
)
def test_a_model_whose_tokens_see_the_answer_is_refused(config_class, causal, both_ways, message):
    """As models of embeddings are, such as EmbeddingGemma. Padding would be seen, too."""
    checkpoint.build_on_meta(config_class(num_hidden_layers=1, **causal), torch.float32)
    with pytest.raises(UserError, match=message):
        checkpoint.build_on_meta(config_class(num_hidden_layers=1, **both_ways), torch.float32)
    for always in (transformers.BertGenerationConfig(), transformers.CpmAntConfig()):
        with pytest.raises(UserError, match="has an encoder"):
            checkpoint.build_on_meta(always, torch.float32)


def test_no_loss_that_balances_experts_is_asked_for():
    """Some fine-tuned models ask for it. It fails where the rows of a mask are not the model's."""
    config = copy.deepcopy(FAMILIES["mixtral"][0])
    config.output_router_logits = True
    model = checkpoint.build_on_meta(config, torch.float32).to_empty(device="cpu")
    output = model(input_ids=torch.ones(2, 3, dtype=torch.int64))
    assert output.aux_loss is None and output.router_logits is None
    assert config.output_router_logits  # as an export has it


def test_a_bare_decoder_is_read_and_its_export_has_the_names_of_the_whole_model(tmp_path):
    model = tiny_model("qwen2")
    model.model.save_pretrained(tmp_path / "base")
    assert_reads(tmp_path / "base", model)
    tensors, _ = exported(start_engine(tmp_path / "base"), tmp_path / "exported")
    assert set(tensors) == model.state_dict().keys() - {LM_HEAD}


@pytest.mark.parametrize("family", ["deepseek_v3", "exaone_moe"])
def test_buffers_are_those_of_transformers(tmp_path, family):
    """Routers correct scores by a buffer in single precision. EXAONE has another name for it."""
    model = AutoModelForCausalLM.from_config(small_config(family))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    values = torch.tensor([4.01, 4.02, 4.03, 4.04])  # in bf16, all but one would be 4.03125
    model.get_buffer(name).copy_(values)
    model.save_pretrained(tmp_path / "model")
    engine = start_engine(tmp_path / "model", "bf16")
    assert torch.equal(engine.module.get_buffer(name), values)
    model.get_buffer(name)[0] += 1
    model.save_pretrained(tmp_path / "other")
    other = start_engine(tmp_path / "other", "bf16")
    assert other.base.fingerprint != engine.base.fingerprint
    _, opened = exported(engine, tmp_path / "exported")
    assert torch.equal(opened.get_buffer(name), values)


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
    files = {"gguf/model.gguf", "lora/adapter_config.json", "models/smollm2/config.json"}
    files |= {"both/config.json", "both/model.safetensors", "both/adapter_config.json"}
    files |= {"variant/config.json", "variant/model.fp16.safetensors", "prefix/prefix_config.json"}
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    for name, message in (
        ("variant", r"it has model\.fp16\.safetensors; fix: .* give a file .* one of these names"),
        ("both", "holds an adapter.*; or, if it is merged, remove adapter_config.json"),
        ("gguf", "as GGUF.*; fix: set model.path to the model that it was made from"),
        ("gguf/model.gguf", "as GGUF.*; fix: set model.path"),
        ("lora", "holds an adapter, not a base model; fix: merge it once"),
        ("prefix", "holds a prefix, not a base model; fix: set model.path to the base model"),
        ("models", "models has no config.json"),
        ("models/smolm2", r"fix: did you mean smollm2\?"),
        ("models/other", "fix: check the name"),
    ):
        with pytest.raises(UserError, match=message) as error:
            resolve_model(name)
        assert error.type is UserError  # a dry run does not go on
    with pytest.raises(HubError):
        resolve_model("facebook/opt-1.3b")


TEXTS = {"config.json", "generation_config.json", "processor_config.json", "tokenizer.json"}
TEXTS |= {"merges.txt", "tokenizer.model", "chat_template.jinja"}
TEXTS |= {"additional_chat_templates/x.jinja"}
INDEXED = {"model.safetensors.index.json", "w/1.safetensors", "w/2.safetensors"}
IN_FOLDERS = json.dumps({"weight_map": {"a": "w/1.safetensors", "b": "w/2.safetensors"}})


@pytest.mark.parametrize(
    ("index", "read", "other"),
    [
        ("{}", {"model.safetensors"}, {"pytorch_model.bin", "original/model.safetensors", "a.py"}),
        ("{}", {"pytorch_model.bin", "model.fp16.safetensors"}, {"pytorch_model.fp16.bin"}),
        (IN_FOLDERS, INDEXED, {"w/3.safetensors", "consolidated.safetensors", "pytorch_model.bin"}),
    ],
)
def test_no_second_copy_of_the_weights_is_downloaded(index, read, other, tmp_path, monkeypatch):
    asked = set()

    def download(name, revision, allow_patterns, ignore_patterns=None, **_):
        asked.add((name, revision))
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        for file in filter_repo_objects(TEXTS | read | other, **patterns):
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(index if file.endswith("index.json") else "{}")
        return str(tmp_path)

    monkeypatch.setattr("lezo_ds.checkpoints.checkpoint.snapshot_download", download)
    for model in ("owner/name", "owner/name@v1.2"):
        assert resolve_model(model) == tmp_path
    assert asked == {("owner/name", None), ("owner/name", "v1.2")}
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    assert found == TEXTS | read


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
    read = partial(read_hub, "nyu-mll/glue", "sst2", "train")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for port in (silent.getsockname()[1], 9):
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
            checkpoint.hub_problem.cache_clear()
            start = time.perf_counter()
            for ask in (partial(resolve_model, "facebook/opt-1.3b"), read):
                with pytest.raises(HubError, match=f"127.0.0.1:{port} does not answer within 2 s"):
                    list(ask())
            assert time.perf_counter() - start < 5
    checkpoint.hub_problem.cache_clear()
