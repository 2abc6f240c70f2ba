"""The README.md of an exported model, in the form of the hub's model cards.

Its header has what the hub reads (license, base model, data sets); its text says how the model was
made, its scores, and how to load, serve and share it. A journal may come from anyone, so no string
of a run acts as Markdown, HTML or YAML in a card. Cards are filled from model_card.jinja.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from lezo_ds.config import RunConfig
from lezo_ds.config.paths import public_name, split_revision

_LICENSE = ("license", "license_name", "license_link")
_LIBRARIES = {"none": "transformers", "lora": "peft", "prefix": "lezo_ds"}
_AUTO_CLASS = "AutoModelForCausalLM"
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes as the largest rank of an adapter."""


def model_card(
    config: RunConfig,
    title: str,
    made: str,
    scores: Sequence[Sequence[str]],
    weights_sha256: str,
    *,
    kind: str = "none",
    opened_by: str = _AUTO_CLASS,
    license_of: Path | None = None,
) -> str:
    """Return the README.md of an exported model.

    Args:
        config: of the run, or of the model that was opened.
        title: follows the name of the base model.
        made: how the weights were made, in sentences.
        scores: rows of a split, the weights that were scored, and their scores.
        weights_sha256: what `sha256sum *.safetensors | sha256sum` prints in the model's directory.
        kind: of the adapter that was written; "none" for a whole model.
        opened_by: the name of the class of transformers that opens the model.
        license_of: the directory of the base model, whose own card may name a license.
    """
    name, revision = split_revision(config.model.path)
    data = config.data
    source = data.train or data.path or ""
    rank = config.peft.lora_rank
    header = ModelCardData(
        library_name=_LIBRARIES[kind],
        tags=["lezo_ds"],
        base_model=_hub_name(name),
        datasets=_hub_name(source.partition(":")[0]),
        # The weights may also read images or sound, of which a run knows nothing.
        pipeline_tag="text-generation" if opened_by == _AUTO_CLASS else None,
        **_license(license_of),
    )
    card = ModelCard.from_template(
        header,
        template_path=str(Path(__file__).with_name("model_card.jinja")),
        base=plain(public_name(name)),
        revision=plain(revision or ""),
        title=plain(title),
        made=plain(made),
        scores=[[plain(cell) for cell in row] for row in scores],
        kind=kind,
        opened_by=opened_by,
        vllm_rank=next((size for size in _VLLM_RANKS if size >= rank), rank),
        is_chat=data.messages is not None,
        weights_sha256=weights_sha256,
    )
    return f"{card}\n"


def _license(directory: Path | None) -> dict[str, str]:
    """Return what the card of a model says of its license, if it has a card that says so."""
    try:
        values = ModelCard.load(Path(directory or "", "README.md")).data.to_dict()
    except Exception:  # it may come from anyone
        return {}
    return {key: str(values[key]) for key in _LICENSE if key in values}


def _hub_name(name: str) -> str | None:
    """Return OWNER/NAME if it can be on the hub. A data set's name may be followed by a config."""
    if Path(name).exists() or name.startswith("."):
        return None
    found = re.match(r"[\w-][\w.-]*/[\w-][\w.-]*(?=/[\w.-]+$|$)", name)
    return found and found[0]


def plain(value: Any) -> str:
    """Return a value as one line of text in which nothing acts as Markdown or HTML."""
    return re.sub(r"[^\w .,:;/+()=%@-]", "?", str(value))
