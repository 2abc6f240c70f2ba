"""Fast noise is refused where it is not, or not the same, by the real commands: one line, exit code 2."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
from assets import REPOSITORY, write_recipe_without_weights
from commands import assert_refused, python, run_well

from lezo_ds.engine.agreement import check_same_noise
from lezo_ds.errors import UserError
from lezo_ds.journal import Journal, read_journal
from lezo_ds.noise import NOISE_VERSION, noise_backend, noise_version
from lezo_ds.noise.gpu import TritonNoise

CPU = torch.device("cpu")
H200 = "1 fast, NVIDIA H200, Triton 3.7.1"
A100 = "1 fast, NVIDIA A100-SXM4-40GB, Triton 3.7.1"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A recipe with its data, a whole model, and the same one without weights, which the recipe names."""
    directory = tmp_path_factory.mktemp("inputs")
    write_recipe_without_weights(directory)
    return directory


def command(inputs, run_dir, *overrides):
    return python("--config", inputs / "recipe.yaml", f"run_dir={run_dir}", *overrides)


@pytest.fixture(scope="module")
def fast_run(inputs):
    """A run whose journal says that it was made with fast noise on another machine."""
    path = inputs / "run"
    run_well(command(inputs, path, f"model.path={inputs / 'whole_model'}"))
    header, records = read_journal(path / "journal.jsonl")
    (path / "journal.jsonl").unlink()
    config = {**header.config, "zo": {**header.config["zo"], "noise": "fast"}}
    with Journal.create(
        path / "journal.jsonl", replace(header, noise_version=H200, config=config)
    ) as journal:
        for record in records:
            journal.append(record)
    return path


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["run", "dry_run"])
def test_fast_noise_without_a_gpu_is_refused_before_weights_load(more, inputs, tmp_path):
    arguments = command(inputs, tmp_path / "run", "zo.noise=fast", *more)
    assert_refused(arguments, "zo.noise=fast needs a GPU", "got: device cpu", "set zo.noise=exact")


def test_a_gpu_on_which_triton_cannot_build_is_refused_before_weights_load(monkeypatch):
    def fails(*_):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(TritonNoise, "_normal", fails)
    with pytest.raises(UserError, match=r"Triton cannot run .* got: RuntimeError: Failed to find C compiler"):
        noise_backend(torch.device("cuda"))


def test_an_unknown_noise_is_refused(inputs, tmp_path):
    arguments = command(inputs, tmp_path / "run", "zo.noise=quick")
    assert_refused(arguments, "zo.noise", "got: 'quick'", "one of exact, fast")


def test_fast_noise_with_offloaded_weights_is_refused(inputs, tmp_path):
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
    arguments = command(inputs, tmp_path / "run", "zo.noise=fast", f"deepspeed={tmp_path / 'ds.json'}")
    assert_refused(arguments, "offloaded", "got: offload_param to cpu", "set zo.noise=exact")


def test_what_perturbs_nothing_takes_no_notice_of_the_noise(inputs, tmp_path):
    run_well(
        command(
            *(inputs, tmp_path / "run", "zo.noise=fast", "method=zero_shot"),
            f"model.path={inputs / 'whole_model'}",
        )
    )


def test_a_run_with_fast_noise_goes_on_only_where_it_was_begun(inputs, fast_run):
    arguments = command(inputs, fast_run, "zo.noise=fast")
    ours = "got: '1 fast, no GPU'"
    assert_refused(arguments, "the noise version differs from the journal's", ours, f"expected: '{H200}'")


def test_a_run_with_fast_noise_does_not_go_on_with_exact_noise(inputs, fast_run):
    arguments = command(inputs, fast_run)
    assert_refused(arguments, "the noise version differs", "got: 1;", f"expected: '{H200}'")


def test_a_run_with_fast_noise_is_exported_only_where_it_was_made(fast_run, tmp_path):
    export = [sys.executable, str(REPOSITORY / "launch" / "export.py")]
    arguments = [*export, "--run", str(fast_run), "--step", "3", "--out", str(tmp_path / "model")]
    assert_refused(arguments, "another noise", f"got: version {H200}", "expected: version 1 fast, no GPU")
    assert not (tmp_path / "model").exists()


def test_ranks_on_other_gpus_are_refused_by_name():
    check_same_noise([H200, H200])
    with pytest.raises(UserError) as caught:
        check_same_noise([H200, H200, A100])
    assert f"got: rank 2: {A100}; expected: rank 0's: {H200}; fix: " in str(caught.value)


def test_exact_noise_has_one_version_everywhere():
    assert noise_version(CPU) == noise_version(torch.device("cuda"), "exact") == NOISE_VERSION


def test_there_is_no_fast_backend_for_a_cpu():
    with pytest.raises(UserError, match="needs a GPU"):
        noise_backend(CPU, "fast")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_version_of_fast_noise_names_gpu_and_triton():
    import triton

    version = noise_version(torch.device("cuda"), "fast")
    assert version == f"1 fast, {torch.cuda.get_device_name()}, Triton {triton.__version__}"
