"""Real sentences with their mean rating by twenty people, from the source archive of vaderSentiment 0.5.

Hutto and Gilbert (ICWSM 2014) let people rate snippets of film reviews (from Rotten Tomatoes), of product
reviews (from Amazon), of editorials (from the New York Times) and tweets, from -4 (most negative) to 4 (most
positive). Sentences with a mean rating of at least 1, or at most -1, make a data set in the schema of SST-2.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import tempfile
import zipfile
from pathlib import Path

from lezo_ds.tools.demo.packages import Package, fetch

VADER = Package(
    name="vaderSentiment",
    version="0.5",
    sha256="5d97c37f3ef6e24eef331122e055dbedafeb6a56abfce0608b326701116ea49a",
    is_source=True,
)
SOURCES = {
    "reviews": "movieReviewSnippets",
    "products": "amazonReviewSnippets",
    "tweets": "tweets",
    "editorials": "nytEditorialSnippets",
}
"""Names of the data sets, and of their files in the archive."""

CLEAR_RATING = 1.0
"""The least absolute mean rating of a sentence that counts as positive or negative."""

NUM_VALIDATION = 500
_ARCHIVE = "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"


def write_data_sets(directory: Path) -> None:
    """Fetch the sentences and write `directory`/NAME/{train,validation}.jsonl for each name of SOURCES.

    Raises:
        CannotFetchError: see `packages.fetch`.
    """
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(fetch(VADER, Path(name))) as package:
        archive = io.BytesIO(package.read(_ARCHIVE))
    with tarfile.open(fileobj=archive) as files:
        for name, source in SOURCES.items():
            file = files.extractfile(f"hutto_ICWSM_2014/{source}_GroundTruth.txt")
            assert file is not None
            write_data_set(file.read().decode("utf-8"), directory / name)


def write_data_set(ratings: str, directory: Path) -> None:
    """Write train.jsonl and validation.jsonl: objects with sentence, label (1 is positive) and idx.

    The order is random but always the same: it follows from a hash of each sentence. The first NUM_VALIDATION
    sentences are the validation split. A sentence that occurs twice counts once.

    Args:
        ratings: lines of an id, the mean rating and the sentence, separated by tabs.
        directory: directory to create.
    """
    labels = {}
    for line in ratings.splitlines():
        if line.strip():
            _, rating, sentence = line.split("\t")
            if abs(float(rating)) >= CLEAR_RATING:
                labels[sentence.strip()] = int(float(rating) > 0)
    sentences = sorted(labels, key=lambda sentence: hashlib.sha256(sentence.encode()).digest())
    splits = {"validation": sentences[:NUM_VALIDATION], "train": sentences[NUM_VALIDATION:]}
    directory.mkdir(parents=True)
    for split, members in splits.items():
        records = [{"sentence": text, "label": labels[text], "idx": i} for i, text in enumerate(members)]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (directory / f"{split}.jsonl").write_text(lines, encoding="utf-8")
