"""A run of release 0.4 goes on where it stopped, with the weights that it had."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from assets import write_recipe
from commands import run_forked_well
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.distributed

GOLDEN = Path(__file__).parent / "golden"
JOURNAL = GOLDEN / "journal-0.4.jsonl"
"""Written by lezo_ds 0.4.0: four steps of `write_portable_recipe`, two of four blocks dropped."""
DIGEST = (GOLDEN / "digest-0.4.txt").read_text().strip()
"""The digest of the weights after these steps, from the results.json of that run."""


def write_portable_recipe(directory):
    """Write the tests' recipe with weights that have the same bits on every machine."""
    recipe = write_recipe(directory)
    (file,) = directory.glob("**/model.safetensors")
    numbers = random.Random(4)
    tensors = {}
    for name, tensor in sorted(load_file(file).items()):
        values = [numbers.uniform(-0.2, 0.2) for _ in range(tensor.numel())]
        offset = 1.0 if "norm.weight" in name else 0.0
        tensors[name] = (torch.tensor(values, dtype=torch.float64) + offset).view(tensor.shape)
    save_file(
        {name: tensor.float() for name, tensor in tensors.items()}, file, metadata={"format": "pt"}
    )
    return recipe


def results_after(recipe, run_dir, num_steps):
    run_forked_well(["--config", recipe, f"run_dir={run_dir}", f"train.steps={num_steps}"])
    return json.loads((run_dir / "results.json").read_text())


def test_a_run_of_0_4_is_replayed_to_its_weights_and_goes_on(tmp_path):
    recipe = write_portable_recipe(tmp_path / "assets")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    shutil.copy(JOURNAL, run_dir / "journal.jsonl")
    # All steps are recorded, so that the run is over once its weights are replayed.
    assert results_after(recipe, run_dir, 4)["weights_digest"] == DIGEST
    assert results_after(recipe, run_dir, 6)["steps"] == 6
    assert (run_dir / "journal.jsonl").read_bytes().startswith(JOURNAL.read_bytes())
