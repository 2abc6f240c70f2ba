from __future__ import annotations

import copy
import logging
import os
import pickle
import re
import shutil
import socket

import pytest
import torch
from faults import small_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, tiny_model
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping

from lezo_ds.errors import LezoError, UserError
from lezo_ds.model.checkpoint import check_files, open_weights, parameter_names
from lezo_ds.sharding import checkpoint_files
from lezo_ds.sharding.checkpoint_files import WeightFiles, build_on_meta, load_model_config
from lezo_ds.sharding.stored_parameters import StoredParameter, stored_parameters


def assert_holds_all_weights(directory, model):
    check_files(model, directory)
    files = open_weights(model, directory)
    parameters = dict(model.named_parameters())
    found = files.find(parameter_names(model))
    assert set(found) == set(parameters)
    for name, stored in found.items():
        expected = parameters[name]
        assert files.parameter_shape(stored) == tuple(expected.shape)
        assert torch.equal(files.read_parameter(stored, 0, expected.numel()), expected.flatten()), name
    files.close()


@pytest.fixture(scope="module")
def model():
    return tiny_model("opt", torch.bfloat16)


@pytest.fixture(scope="module")
def single(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("single")
    model.save_pretrained(directory)
    assert (directory / "model.safetensors").is_file()
    return directory


@pytest.fixture(scope="module")
def sharded(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("sharded")
    model.save_pretrained(directory, max_shard_size="4KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache, empty."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    return directory


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_every_parameter_is_found_and_read_bit_for_bit(model, layout, request):
    assert_holds_all_weights(request.getfixturevalue(layout), model)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_checkpoints_of_every_family_are_read(family, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    assert_holds_all_weights(tmp_path, model)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_range_read_is_the_slice_of_the_flattened_tensor(tensors, data):
    directory, expected = tensors
    files = WeightFiles(directory)
    name = data.draw(st.sampled_from(sorted(expected)))
    flat = expected[name].flatten()
    start = data.draw(st.integers(0, len(flat)))
    stop = data.draw(st.integers(start, len(flat)))
    found = files.read_range(name, start, stop)
    files.close()
    assert found.dtype == flat.dtype
    assert torch.equal(found, flat[start:stop])


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tensors")
    shapes = {
        "scalar": (),
        "vector": (17,),
        "matrix": (7, 5),
        "row": (1, 9),
        "column": (9, 1),
        "cube": (4, 3, 5),
    }
    generator = torch.Generator().manual_seed(0)
    made = {
        f"{name}.{dtype}": torch.randn(shape, generator=generator).to(dtype)
        for name, shape in shapes.items()
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    save_file(made, directory / "model.safetensors")
    return directory, made


def test_a_tied_parameter_is_found_under_whichever_of_its_names_it_is_stored(single, model, tmp_path):
    stored = load_file(single / "model.safetensors")
    embedding, head = "model.decoder.embed_tokens.weight", "lm_head.weight"
    assert parameter_names(model)[embedding] == (embedding, head)
    stored[head] = stored.pop(embedding)
    save_file(stored, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path, prefix="model")
    assert files.find(parameter_names(model))[embedding] == StoredParameter((head,))
    assert_holds_all_weights(tmp_path, model)


def test_a_checkpoint_of_the_bare_decoder_is_read(single, model, tmp_path):
    stored = load_file(single / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    assert all(name.startswith("decoder.") for name in bare)
    save_file(bare, tmp_path / "model.safetensors")
    assert_holds_all_weights(tmp_path, model)


def test_a_checkpoint_saved_from_the_base_model_is_read(model, tmp_path):
    model.model.save_pretrained(tmp_path)
    assert_holds_all_weights(tmp_path, model)


def test_names_on_disk_that_transformers_renames_are_found_and_the_models_own_come_first(tmp_path):
    model = tiny_model("gpt_neox")
    names = parameter_names(model)
    conversions = get_model_conversion_mapping(model)
    renamed = stored_parameters(["embed_out.weight"], conversions)
    assert renamed["lm_head.weight"] == StoredParameter(("embed_out.weight",))
    save_file({name: torch.zeros(1) for name in [*names, "embed_out.weight"]}, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path, prefix="gpt_neox", conversions=conversions)
    assert files.find(names)["lm_head.weight"] == StoredParameter(("lm_head.weight",))


def test_missing_tensors_are_named(single, model, tmp_path):
    stored = load_file(single / "model.safetensors")
    del stored["model.decoder.layers.1.fc1.bias"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(
        UserError, match=r"lacks 1 of the model's \d+ .*no tensor for model.decoder.layers.1.fc1.bias"
    ):
        WeightFiles(tmp_path, prefix="model").find(parameter_names(model))


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_cut_or_missing_weights_file_is_refused_with_its_name(sharded, model, tmp_path, damage):
    directory = tmp_path / "model"
    shutil.copytree(sharded, directory)
    victim = sorted(directory.glob("*.safetensors"))[1]
    if damage == "cut":
        victim.write_bytes(victim.read_bytes()[:-10])
    else:
        victim.unlink()
    files = WeightFiles(directory, prefix="model")
    with pytest.raises(UserError, match=f"{victim.name} cannot be read"):
        for stored in files.find(parameter_names(model)).values():
            files.read_parameter(stored, 0, 1)


def bin_directory(tmp_path, tensors, legacy=False):
    directory = tmp_path / "bin"
    directory.mkdir()
    half = len(tensors) // 2
    parts = [dict(list(tensors.items())[:half]), dict(list(tensors.items())[half:])]
    for number, part in enumerate(parts):
        path = directory / f"pytorch_model-{number + 1:05d}-of-00002.bin"
        torch.save(part, path, _use_new_zipfile_serialization=not legacy)
    return directory


@pytest.mark.parametrize("legacy", [False, True])
def test_bin_files_are_converted_once(model, tmp_path, cache, caplog, legacy):
    # A state dict holds tied weights twice, on the same memory.
    directory = bin_directory(tmp_path, model.state_dict(), legacy)
    with caplog.at_level(logging.WARNING, "lezo_ds"):
        assert_holds_all_weights(directory, model)
        assert_holds_all_weights(directory, model)
    assert caplog.text.count("converting 2 .bin file(s)") == 1
    (converted,) = (cache / "lezo_ds" / "converted").iterdir()
    assert {path.name for path in converted.iterdir()} == {
        "model-00001.safetensors",
        "model-00002.safetensors",
        "model.safetensors.index.json",
    }
    assert not list(directory.glob("*.safetensors"))


def test_views_and_transposed_tensors_in_a_bin_file_keep_their_values(tmp_path, cache):
    base = torch.arange(12.0).view(3, 4)
    made = {"a": base, "b": base.t(), "c": base[1], "d": base.clone().t()}
    torch.save(made, tmp_path / "pytorch_model.bin")
    files = WeightFiles(tmp_path)
    for name, tensor in made.items():
        assert files.shape(name) == tuple(tensor.shape)
        assert torch.equal(files.read_range(name, 0, tensor.numel()), tensor.flatten())


def test_a_changed_bin_file_is_converted_again(tmp_path, cache):
    directory = bin_directory(tmp_path, {"a": torch.zeros(3), "b": torch.zeros(4)})
    assert WeightFiles(directory).read_range("a", 0, 3).tolist() == [0, 0, 0]
    torch.save({"a": torch.ones(3)}, directory / "pytorch_model-00001-of-00002.bin")
    os.utime(directory / "pytorch_model-00001-of-00002.bin", (1, 1))
    assert WeightFiles(directory).read_range("a", 0, 3).tolist() == [1, 1, 1]


def test_a_conversion_that_was_cut_off_is_done_again(tmp_path, cache):
    directory = bin_directory(tmp_path, {"a": torch.arange(3.0), "b": torch.zeros(4)})
    WeightFiles(directory)
    (converted,) = (cache / "lezo_ds" / "converted").iterdir()
    (converted / "model.safetensors.index.json").unlink()
    (converted / "model-00001.safetensors").write_bytes(b"half")
    assert WeightFiles(directory).read_range("a", 0, 3).tolist() == [0, 1, 2]


class Payload:
    """Unpickling it would make a directory."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("container", ["torch", "pickle"])
def test_a_pickle_with_a_payload_is_refused_and_never_executed(tmp_path, cache, container):
    target = tmp_path / "executed"
    content = {"weight": torch.zeros(2), "extra": Payload(target)}
    path = tmp_path / "pytorch_model.bin"
    if container == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(UserError, match=r"pytorch_model.bin cannot be read as plain tensors.*safetensors"):
        WeightFiles(tmp_path)
    assert not target.exists()
    assert not list(cache.rglob("*.safetensors"))
    pickle.loads(pickle.dumps(Payload(target)))
    assert target.exists()  # so it would have been seen


@pytest.mark.parametrize("version", ["1.13.1", "2.5.1+cu121", "2.9.1"])
def test_a_bin_file_is_not_opened_by_a_torch_that_could_run_code_in_it(tmp_path, cache, version, monkeypatch):
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(UserError, match=rf"is not opened.*got: torch {re.escape(version)}.*safetensors"):
        WeightFiles(tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.10.0+cpu")
    assert WeightFiles(tmp_path).shape("a") == (2,)


@pytest.mark.parametrize(
    "index",
    [
        '{"weight_map": {"a": "../other/model.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": ["a"]}',
        "{}",
        "[]",
        "{broken",
    ],
)
def test_an_index_that_names_anything_but_files_in_its_directory_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json cannot be read; got: \w+Error: "):
        WeightFiles(tmp_path)


def test_a_conversion_for_which_there_is_no_room_is_an_error_and_leaves_nothing(tmp_path, cache):
    directory = bin_directory(tmp_path, {"a": torch.zeros(40_000), "b": torch.zeros(4)})
    cache.mkdir(exist_ok=True)
    with small_disk(cache, "64k"):
        with pytest.raises(LezoError, match=r"model-00001\.safetensors cannot be written.*No space left"):
            WeightFiles(directory)
        assert not [path for path in cache.rglob("*") if path.is_file()]


def test_a_conversion_is_synced_file_by_file_before_its_index_appears(tmp_path, cache, monkeypatch):
    synced = []
    sync = checkpoint_files.sync
    monkeypatch.setattr(checkpoint_files, "sync", lambda p: (synced.append(p.name), sync(p)))
    WeightFiles(bin_directory(tmp_path, {"a": torch.zeros(3), "b": torch.zeros(4)}))
    own_part = rf"^\.|\.{re.escape(socket.gethostname())}\.\d+$"
    files = [re.sub(own_part, "", name) for name in synced if ".safetensors" in name]
    assert files == ["model-00001.safetensors", "model-00002.safetensors", "model.safetensors.index.json"]


@pytest.mark.parametrize("content", [{"a": 3}, [torch.zeros(2)], {"state_dict": {"a": torch.zeros(2)}}])
def test_a_bin_file_of_anything_but_tensors_by_name_is_refused(tmp_path, cache, content):
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="not a mapping of names to tensors"):
        WeightFiles(tmp_path)


def test_a_broken_bin_file_is_refused(tmp_path, cache):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="cannot be read as plain tensors"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize(
    "text", ['{"model_type": "no_such_type"}', "{}", "{broken", '["a list"]', '{"model_type": 3}']
)
def test_a_config_of_an_unknown_type_or_a_broken_one_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="cannot be read"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_on_the_meta_device_has_no_parameter_memory_its_ties_and_real_buffers(family, dtype):
    config = FAMILIES[family][0]
    built = build_on_meta(config, dtype)
    usual = AutoModelForCausalLM.from_config(config, dtype=dtype)
    assert not built.training
    assert built.config.use_cache is False
    assert {parameter.device.type for parameter in built.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in built.parameters()} == {dtype}
    assert parameter_names(built) == parameter_names(usual)
    buffers, expected = dict(built.named_buffers()), dict(usual.named_buffers())
    assert set(buffers) == set(expected)
    for name, buffer in buffers.items():
        assert buffer.dtype == expected[name].dtype
        assert torch.equal(buffer, expected[name]), name


def test_building_leaves_the_config_as_it_was():
    config = copy.deepcopy(FAMILIES["opt"][0])
    config.use_cache = True
    before = config.to_dict()
    build_on_meta(config, torch.float32)
    assert config.to_dict() == before
