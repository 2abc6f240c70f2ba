"""DeepSpeed's JSON: what is completed, what is refused, and the shipped files, which DeepSpeed accepts."""

from __future__ import annotations

import json

import pytest
from assets import REPOSITORY
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, get_zero_config
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig

from lezo_ds.config.deepspeed import (
    _HOST_STALLS,
    _KEYS,
    _ONLY_WITH_GRADIENTS,
    _ONLY_WITH_HOOKS,
    load_ds_config,
    warn_of_host_stalls,
    warn_of_idle_keys,
)
from lezo_ds.errors import UserError

DS_CONFIGS = sorted((REPOSITORY / "ds_configs").glob("*.json"))


def write_json(tmp_path, **sections):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}} | sections))
    return path


def refusal(path, dtype="bf16"):
    """Return the error's message, which names the file, and has all its parts."""
    with pytest.raises(UserError) as caught:
        load_ds_config(path, dtype, 2, 8)
    message = str(caught.value)
    assert str(path) in message
    assert [part in message for part in ("; got: ", "; expected: ", "; fix: ")] == [True] * 3
    return message


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_bare_stage_3_is_completed(dtype, tmp_path):
    path = write_json(tmp_path, csv_monitor={"enabled": True, "output_path": "x"})
    expected = {
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "memory_efficient_linear": False,
            "allgather_sequential": True,
        },
        "csv_monitor": {"enabled": True, "output_path": "x"},
        "train_micro_batch_size_per_gpu": 8,
    }
    if dtype != "fp32":
        expected[dtype] = {"enabled": True}
    assert load_ds_config(path, dtype, 2, 8) == expected


def test_what_agrees_with_the_recipe_is_taken_and_the_rest_of_a_dtypes_section_kept(tmp_path):
    path = write_json(
        tmp_path,
        train_micro_batch_size_per_gpu=8,
        train_batch_size=16,
        gradient_accumulation_steps=1,
        bf16={"enabled": True, "check_grad_overflow": False},
        fp16={"enabled": False},
    )
    assert load_ds_config(path, "bf16", 2, 8)["bf16"] == {"enabled": True, "check_grad_overflow": False}


def test_keys_that_begin_with_an_underscore_are_comments_at_any_depth(tmp_path):
    path = write_json(tmp_path, _comment=["a"], zero_optimization={"stage": 3, "_why": "b"})
    assert load_ds_config(path, "fp32", 1, 1) == load_ds_config(write_json(tmp_path), "fp32", 1, 1)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"zero_optimization": {"stage": 2}}, "does not use ZeRO stage 3"),
        ({"zero_optimization": True}, "zero_optimization in"),
        ({"zero_optimization": {}}, "does not use ZeRO stage 3"),
        ({"optimizer": {"type": "AdamW"}}, "LeZO is the optimizer; fix: remove it (optimizer)"),
        ({"scheduler": {"type": "WarmupLR"}}, "fix: remove it (scheduler)"),
        ({"gradient_accumulation_steps": 2}, "got: 2; expected: 1"),
        ({"train_micro_batch_size_per_gpu": 4}, "got: 4; expected: 8"),
        ({"train_micro_batch_size_per_gpu": "auto"}, "auto is not supported"),
        ({"train_batch_size": 8}, "got: 8; expected: 16"),
        ({"fp16": {"enabled": "auto"}}, "fp16.enabled"),
        ({"fp16": {"enabled": True}}, 'got: "fp16": {"enabled": true} and model.dtype bf16'),
        ({"bf16": {"enabled": False}}, 'got: "bf16": {"enabled": false} and model.dtype bf16'),
        ({"bfloat16": {"enabled": False}}, "remove bfloat16 from the JSON"),
        ({"fp16": True}, "expected: a section"),
        ({"torch_autocast": {"enabled": True}}, "use model.dtype"),
    ],
)
def test_a_section_that_does_not_fit_is_refused(sections, expected, tmp_path):
    assert expected in refusal(write_json(tmp_path, **sections))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("stage3_param_persistence_threshold", 100000),
        ("param_persistence_threshold", 100000),
        ("memory_efficient_linear", True),
        ("allgather_sequential", False),
        ("zero_hpz_partition_size", 2),
        ("zero_quantized_weights", True),
        ("zero_quantized_nontrainable_weights", True),
    ],
)
def test_a_zero_setting_that_would_spoil_the_weights_is_refused(key, value, tmp_path):
    message = refusal(write_json(tmp_path, zero_optimization={"stage": 3, key: value}))
    assert f"fix: remove it (zero_optimization.{key})" in message
    assert f"got: {json.dumps(value)}" in message


@pytest.mark.parametrize(
    ("sections", "got", "fix"),
    [
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation", "did you mean zero_optimization?"),
        ({"gradient_cliping": 1.0}, "gradient_cliping", "did you mean gradient_clipping?"),
        ({"xyzzy": 1}, "xyzzy", "remove it"),
        ({"curriculum_learning": {}}, "curriculum_learning", ""),  # DeepSpeed has removed it
        (
            {"zero_optimization": {"stage": 3, "ofload_param": {}}},
            "zero_optimization.ofload_param",
            "offload_",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"devise": "cpu"}}},
            "zero_optimization.offload_param.devise",
            "did you mean zero_optimization.offload_param.device?",
        ),
        ({"tensorboard": {"enable": True}}, "tensorboard.enable", "did you mean tensorboard.enabled?"),
        ({"bf16": {"enabled": True, "x": 1}}, "bf16.x", "remove it"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_named(sections, got, fix, tmp_path):
    message = refusal(write_json(tmp_path, **sections))
    assert message.startswith("unknown key in ")
    assert f"; got: {got}; " in message
    assert fix in message.partition("; fix: ")[2]


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"zero_optimization": {"stage": "3"}}, "a number"),
        ({"zero_optimization": {"stage": 3, "overlap_comm": "yes"}}, "true or false"),
        ({"zero_optimization": {"stage": 3, "sub_group_size": [1]}}, "a number"),
        ({"zero_optimization": {"stage": 3, "offload_param": "cpu"}}, "a section"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": 1}}}, "text"),
        ({"zero_optimization": {"stage": 3, "offload_param": None}}, "a section"),
        ({"zero_optimization": {"stage": True}}, "a number"),
        ({"csv_monitor": []}, "a section"),
        ({"wall_clock_breakdown": 1}, "true or false"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(sections, expected, tmp_path):
    assert f"; expected: {expected}; " in refusal(write_json(tmp_path, **sections))


def keys_of(model):
    return set(model.model_fields) | {f.alias for f in model.model_fields.values() if f.alias is not None}


def test_the_known_keys_are_those_of_the_installed_deepspeed():
    known = {
        section: {key for keys in kinds.values() for key in keys.split()} for section, kinds in _KEYS.items()
    }
    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "tensorboard": TensorBoardConfig,
        "csv_monitor": CSVConfig,
        "wandb": WandbConfig,
        "comms_logger": CommsLoggerConfig,
    }
    assert {section: keys_of(model) for section, model in models.items()} == {
        section: known[section] for section in models
    }
    assert set(AIO_DEFAULT_DICT) == known["aio"]
    assert known.keys() == models.keys() | {"", "aio"}
    assert all(set(keys.split()) <= known[section] for section, keys in _ONLY_WITH_GRADIENTS.items())
    assert known["zero_optimization"] >= _ONLY_WITH_HOOKS


def test_keys_without_an_effect_are_named_in_one_warning(tmp_path, caplog):
    path = write_json(
        tmp_path,
        gradient_clipping=1.0,
        steps_per_print=10,
        zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
        bf16={"enabled": True, "check_grad_overflow": False},
    )
    warn_of_idle_keys(load_ds_config(path, "bf16", 2, 8))
    assert [record.message for record in caplog.records] == [
        "keys in the DeepSpeed JSON without effect, because this method computes no gradients: "
        "gradient_clipping, steps_per_print, zero_optimization.offload_optimizer, bf16.check_grad_overflow"
    ]


def test_keys_of_deepspeeds_hooks_have_no_effect_where_whole_blocks_are_gathered(tmp_path, caplog):
    zero = {"stage": 3, "stage3_max_reuse_distance": 10, "overlap_comm": False}
    path = write_json(tmp_path, zero_optimization=zero)
    warn_of_idle_keys(load_ds_config(path, "bf16", 2, 8))
    warn_of_host_stalls(load_ds_config(path, "bf16", 2, 8), has_gradients=False)
    assert [record.message for record in caplog.records] == [
        "keys in the DeepSpeed JSON without effect, because whole blocks are gathered, without DeepSpeed's "
        "hooks: zero_optimization.stage3_max_reuse_distance"
    ]
    caplog.clear()
    path = write_json(
        tmp_path, zero_optimization={**zero, "offload_param": {"device": "nvme", "nvme_path": "."}}
    )
    warn_of_idle_keys(load_ds_config(path, "bf16", 2, 8))
    assert caplog.records == []
    warn_of_host_stalls(load_ds_config(path, "bf16", 2, 8), has_gradients=False)
    assert "overlap_comm false" in caplog.records[0].message


@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_json_has_no_key_without_an_effect(path, caplog):
    warn_of_idle_keys(load_ds_config(path, "fp16" if "fp16" in path.stem else "bf16", 2, 8))
    assert caplog.records == []


def test_keys_that_make_the_host_wait_are_named_with_what_it_waits_for(tmp_path, caplog):
    path = write_json(
        tmp_path,
        zero_optimization={"stage": 3, "overlap_comm": False, "offload_param": {"device": "cpu"}},
        comms_logger={"enabled": True},
        wall_clock_breakdown=False,
    )
    warn_of_host_stalls(load_ds_config(path, "bf16", 2, 8), has_gradients=False)
    assert [record.message for record in caplog.records] == [
        "keys in the DeepSpeed JSON that make the host wait, and a step slower: "
        "zero_optimization.overlap_comm false (a gather waits for the computation before it); "
        "zero_optimization.offload_param.pin_memory false (each copy from the host is waited for); "
        "comms_logger.enabled true (each message is waited for)"
    ]


@pytest.mark.parametrize("path", [path for path in DS_CONFIGS if path.stem != "zero3_cpu"], ids=str)
def test_a_shipped_json_for_gpus_makes_no_host_wait(path, caplog):
    warn_of_host_stalls(
        load_ds_config(path, "fp16" if "fp16" in path.stem else "bf16", 2, 8), has_gradients=True
    )
    warn_of_host_stalls(load_ds_config(None, "bf16", 2, 8), has_gradients=True)
    assert caplog.records == []


def test_keys_that_make_the_host_wait_are_deepspeeds():
    for key, _, _ in _HOST_STALLS:
        section, _, name = key.rpartition(".")
        if section in _KEYS:
            assert any(name in names.split() for names in _KEYS[section].values()), key


DEEP = '{"csv_monitor": ' + "[" * 200_000 + "]" * 200_000 + "}"


@pytest.mark.parametrize("text", ["{", "[1]", "", '{"a": 1, "a": 2}', "null", DEEP], ids=range(6))
def test_a_broken_json_is_refused(text, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(text)
    assert "is not a valid JSON object" in refusal(path)


def test_a_json_that_is_not_there_is_refused(tmp_path):
    assert "set deepspeed to a file or to one of zero3_bf16, zero3_cpu, " in refusal(tmp_path / "absent.json")


@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_deepspeed_json_is_found_from_any_folder_by_its_name_and_path(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dtype = "fp16" if "fp16" in path.stem else "bf16"
    (tmp_path / path.stem).mkdir()  # a folder of that name is no file
    for name in (path.stem, f"ds_configs/{path.name}"):
        assert load_ds_config(name, dtype, 2, 8) == load_ds_config(path, dtype, 2, 8)


def test_the_working_directory_comes_before_the_shipped_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "ds_configs" / "zero3_cpu.json"
    own.parent.mkdir()
    own.write_text('{"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 7}}')
    for name in ("zero3_cpu", "ds_configs/zero3_cpu.json"):
        zero = load_ds_config(name, "bf16", 2, 8)["zero_optimization"]
        assert zero["stage3_prefetch_bucket_size"] == 7


@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_deepspeed_json_is_valid_and_says_what_was_not_run(path):
    dtype = "fp16" if "fp16" in path.stem else "bf16"
    zero = get_zero_config(load_ds_config(path, dtype, 2, 8))
    assert (zero.stage, zero.param_persistence_threshold, zero.memory_efficient_linear) == (3, 0, False)
    assert next(iter(json.loads(path.read_text()))) == "_comment"
    assert "NOT run" in " ".join(json.loads(path.read_text())["_comment"])
