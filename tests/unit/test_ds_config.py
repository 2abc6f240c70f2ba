"""DeepSpeed's JSON: what is completed, what is refused, and the shipped files."""

import json
from pathlib import Path

import pytest
from assets import REPOSITORY

from lezo_ds.config import load_config
from lezo_ds.config.deepspeed import load_ds_config
from lezo_ds.errors import UserError


def write_json(tmp_path, **sections):
    path = tmp_path / "ds.json"
    text = json.dumps({"zero_optimization": {"stage": 3}} | sections)
    path.write_text(text, encoding="utf-8-sig")  # as Windows programs write it
    return path


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_bare_stage_3_is_completed_and_the_rest_passed_on(dtype, tmp_path):
    monitor = {"csv_monitor": {"enabled": True, "output_path": "x"}}
    path = write_json(tmp_path, _comment=["a"], train_batch_size=16, **monitor)
    zero = {"stage": 3, "memory_efficient_linear": False, "allgather_sequential": True}
    zero["stage3_param_persistence_threshold"] = 0
    expected = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 8}
    expected |= {"train_batch_size": 16, **monitor}
    if dtype != "fp32":
        expected[dtype] = {"enabled": True}
    assert load_ds_config(path, dtype, 2, 8) == expected


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"zero_optimization": {"stage": 2}}, "stage=2 in .*; fix: set zero_opt.*.stage to 3"),
        ({"tensor_parallel": 2}, "tensor_parallel in .* is not an object; fix: write it like"),
        ({"tensor_parallel": {"autotp_size": "2"}}, 'autotp_size="2" in .* is not an integer'),
        ({"gradient_accumulation_steps": 2}, "ation_steps=2 .* use train.batch_size"),
        ({"train_batch_size": 8}, "train_batch_size=8 .* contradicts the recipe"),
        ({"fp16": {"enabled": True}}, "fp16.enabled=true .*; fix: set deepspeed=null, or model"),
        ({"tensorboard": {"enable": True}}, "DeepSpeed refuses .* tensorboard.enable Extra inputs"),
    ],
)
def test_a_section_that_does_not_fit_is_refused(sections, expected, tmp_path):
    path = write_json(tmp_path, **sections)
    with pytest.raises(UserError, match=expected) as caught:
        load_ds_config(path, "bf16", 2, 8)
    assert str(path) in str(caught.value) and "; fix: " in str(caught.value)


ZERO = {"stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto"}
ZERO |= {"stage3_gather_16bit_weights_on_model_save": True}
ZERO |= {"stage3_param_persistence_threshold": "auto"}
FOR_TRAINER = {
    "zero_optimization": ZERO,
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
"""The usual JSON for the Trainer of transformers."""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_json_for_the_trainer_is_completed_and_its_optimizer_is_left_out(dtype, tmp_path, caplog):
    completed = load_ds_config(write_json(tmp_path, **FOR_TRAINER), dtype, 2, 8)
    enabled = {name: completed[name].get("enabled", False) for name in ("bf16", "fp16")}
    assert enabled == {name: name == dtype for name in ("bf16", "fp16")}
    zero = completed["zero_optimization"]
    assert (zero["overlap_comm"], zero["stage3_param_persistence_threshold"]) == (True, 0)
    assert completed["train_micro_batch_size_per_gpu"] == 8
    assert "auto" not in json.dumps(completed)
    (message,) = caplog.messages
    assert "left out, since the recipe's keys decide" in message


SPOILING = {"stage3_param_persistence_threshold": 100000, "memory_efficient_linear": True}
SPOILING |= {"allgather_sequential": False, "zero_hpz_partition_size": 2}
SPOILING |= {"zero_quantized_weights": True, "offload_param": {"device": "nvme"}}
SPOILING |= {"hybrid_engine.enabled": True}


@pytest.mark.parametrize(("key", "value"), SPOILING.items())
def test_a_setting_that_would_spoil_the_weights_is_refused(key, value, tmp_path):
    section, _, name = ("zero_optimization." * ("." not in key) + key).partition(".")
    path = write_json(tmp_path, **{section: {"stage": 3, name: value}})
    with pytest.raises(UserError, match=f"fix: remove {section}.{name}"):
        load_ds_config(path, "bf16", 2, 8)


@pytest.mark.parametrize("text", ["[" * 9000, "[1]", '{"a": 1, "a": 2}'])
def test_a_broken_json_is_refused(text, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(UserError, match="is not a valid JSON object"):
        load_ds_config(path, "bf16", 2, 8)


def test_a_shipped_json_is_valid_and_read_from_any_folder_by_name_and_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (REPOSITORY / "ds_configs").glob("*.json"):
        dtype = "fp16" if "fp16" in path.stem else "bf16"
        (tmp_path / path.stem).mkdir()  # a folder of that name is no file
        for name in (path.stem, f"ds_configs/{path.name}"):
            assert load_ds_config(name, dtype, 4, 8) == load_ds_config(path, dtype, 4, 8)
        command, _, not_run = json.loads(path.read_text())["_comment"]
        _, recipe, *keys = command.partition("launch/train.py ")[2].split()
        assert Path(load_config(recipe, keys).deepspeed).stem == path.stem
        assert "NOT run" in not_run
    with pytest.raises(UserError, match=r"to one of tensor_parallel_bf16, zero3_bf16, "):
        load_ds_config("absent", "bf16", 2, 8)
