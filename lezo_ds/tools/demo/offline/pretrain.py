"""The demonstration's data set and a small OPT that can read, made in a minute or two on a CPU."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

from lezo_ds.tools.demo.assets import make_assets
from lezo_ds.tools.demo.offline.corpus import Review, labelled_reviews, pretraining_texts, vocabulary
from lezo_ds.tools.demo.offline.tokenizer import MODEL_MAX_LENGTH, build_tokenizer

DEFAULT_STEPS = 1500
_IGNORED_LABEL = -100
_BATCHES_PER_BUCKET = 16
_INITIAL_DEVIATION = 0.08
"""Standard deviation of the initial weights. With OPT's 0.02, so narrow a model learns to read far later."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AssetSettings:
    """Everything that determines data and model, besides the corpus itself.

    Attributes:
        seed: seed of every random stream.
        steps: optimizer steps of pre-training, at least 1.
        batch_size: texts of one step.
        learning_rate: AdamW's peak learning rate. It rises for a tenth of the steps, then falls to 0.
        num_train: labeled reviews in train.jsonl.
        num_validation: labeled reviews in validation.jsonl, which are in no other text.
    """

    seed: int
    steps: int
    batch_size: int = 64
    learning_rate: float = 2e-3
    num_train: int = 1000
    num_validation: int = 500


@dataclass(frozen=True)
class Texts:
    """The two parts of the labeled data set, and the texts for pre-training."""

    train: list[Review]
    validation: list[Review]
    pretraining: list[str]


def make_texts(settings: AssetSettings) -> Texts:
    """Return the texts for training and testing. No review of `validation` occurs in another part."""
    rng = random.Random(settings.seed)
    validation = labelled_reviews(rng, settings.num_validation)
    held_out = {review["sentence"] for review in validation}
    train = labelled_reviews(rng, settings.num_train, excluded=held_out)
    pretraining = pretraining_texts(rng, settings.steps * settings.batch_size, excluded=held_out)
    return Texts(train, validation, pretraining)


def make_demo_assets(directory: str | Path, seed: int = 0, steps: int = DEFAULT_STEPS) -> None:
    """Write the demonstration's data set and pre-trained model, unless they exist already.

    `directory`/data gets train.jsonl and validation.jsonl in the schema of SST-2. `directory`/model gets a
    Hugging Face model (float32 safetensors) with its tokenizer. The global random states of PyTorch, NumPy
    and Python do not change.

    Args:
        directory: directory to write.
        seed: seed of every random stream.
        steps: optimizer steps of pre-training, at least 1. With far fewer than the default, the model cannot
            read.

    Raises:
        UserError: `directory` holds something other than such assets.
    """
    directory = Path(directory)
    settings = AssetSettings(seed=seed, steps=steps)
    texts = make_texts(settings)
    digest = hashlib.sha256(json.dumps(asdict(texts)).encode()).hexdigest()
    manifest = json.dumps({**asdict(settings), "sha256_of_texts": digest}, indent=2)
    make_assets(directory, manifest, lambda unfinished: _write_assets(unfinished, settings, texts))


def _write_assets(directory: Path, settings: AssetSettings, texts: Texts) -> None:
    (directory / "data").mkdir()
    for name, reviews in (("train", texts.train), ("validation", texts.validation)):
        lines = "".join(json.dumps(review) + "\n" for review in reviews)
        (directory / "data" / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    tokenizer = build_tokenizer(vocabulary())
    model = _build_model(len(tokenizer), settings.seed)
    _pretrain(model, tokenizer=tokenizer, texts=texts.pretraining, settings=settings)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")


def _build_model(vocabulary_size: int, seed: int) -> OPTForCausalLM:
    """Return a float32 OPT with 8 blocks of width 64, no dropout and OPT's special tokens.

    A generator of its own draws the weights, so that PyTorch's global random state does not change.
    """
    config = OPTConfig(
        vocab_size=vocabulary_size,
        init_std=_INITIAL_DEVIATION,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        max_position_embeddings=MODEL_MAX_LENGTH,
        dropout=0.0,
        attention_dropout=0.0,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        model = OPTForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=_INITIAL_DEVIATION, generator=generator)
    return model


def _pretrain(
    model: OPTForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], settings: AssetSettings
) -> None:
    """Train a model in place on steps * batch_size texts, each once and roughly in order.

    Padding is on the right, where causal attention never sees it, and it does not count in the loss.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=0.01, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=settings.steps + 1, pct_start=0.1, cycle_momentum=False
    )
    model.train()
    for step, input_ids in enumerate(_batches(tokenizer, texts, settings), start=1):
        labels = input_ids.masked_fill(input_ids == tokenizer.pad_token_id, _IGNORED_LABEL)
        loss = model(input_ids=input_ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == settings.steps:
            logger.info("pre-training step %d of %d, loss %.3f", step, settings.steps, loss.item())
    model.eval()


def _batches(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], settings: AssetSettings
) -> Iterator[Tensor]:
    """Yield int64 [batch_size, tokens]: texts of similar length that end with `</s>`, padded on the right."""
    rng = random.Random(settings.seed)
    rows = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(list(texts))["input_ids"]]
    bucket = settings.batch_size * _BATCHES_PER_BUCKET
    for start in range(0, len(rows), bucket):
        by_length = sorted(rows[start : start + bucket], key=len)
        starts = list(range(0, len(by_length), settings.batch_size))
        rng.shuffle(starts)
        for first in starts:
            batch = [torch.tensor(row) for row in by_length[first : first + settings.batch_size]]
            yield torch.nn.utils.rnn.pad_sequence(
                batch, batch_first=True, padding_value=tokenizer.pad_token_id
            )
