"""Fit the output head to the labels of a task, and nothing else: linear probing.

At the last token of a prompt, the head reads a vector h, and the logit of label k is w_k . h, where
w_k is the head's row for the token of the label. With all other weights fixed, these rows are those
of a logistic regression. Each example is read once, and L-BFGS does the rest:

    minimize over D    sum over examples of cross_entropy(logits + D h) + decay * |D|^2

with each element of h divided by its root mean square over the examples. The decay is the one with
the lowest loss of the validation examples. What is written is the whole model, in which D is added
to the rows of the labels. A head that was tied to the embedding is tied no more. A LoRA adapter is
merged, as `lezo-ds export --merge` does it.

A label of several tokens is answered by its first token, or if two labels begin alike, by a letter:
data.labels of the recipe that is written maps each label to this text.

Sources: MeZO (Malladi et al. 2023, Table 1) compares with linear probing. Kumar et al. 2022 (arXiv
2202.10054) combine it with fine-tuning.
"""

from __future__ import annotations

import logging
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lezo_ds import distributed
from lezo_ds.config import RunConfig, check_data
from lezo_ds.data.batches import shared_candidates
from lezo_ds.data.dataset import Examples
from lezo_ds.data.metrics import Score, load_score
from lezo_ds.data.reader import EncodedSplit, Reader
from lezo_ds.data.score import Scorer
from lezo_ds.engine import ModelEngine
from lezo_ds.errors import UserError
from lezo_ds.forward.adapters import LoraAdapter, PrefixAdapter
from lezo_ds.runs.cross_check import check_scoring
from lezo_ds.runs.export import own_texts, refuse_taken
from lezo_ds.runs.model_card import model_card
from lezo_ds.runs.opening import Opened, recipe_of

DECAYS = (1e4, 3e3, 1e3, 3e2, 1e2, 3e1, 1e1, 3.0, 1.0)
"""Strongest first: each fit starts from the one before."""
_MOST_ITERATIONS = 200  # of L-BFGS, for each decay
_MOST_SHOWN = 10  # kinds of wrong answers
_UNLIKE = 0.01
"""The share of the logits' deviation from their means that may be left besides their rounding."""

logger = logging.getLogger(__name__)


class SplitScores(NamedTuple):
    """What a fit of the head has changed on a split.

    Attributes:
        num_examples: of the split.
        before, after: the metric of the task.
        loss_before, loss_after: mean cross-entropy over labels.
    """

    num_examples: int
    before: float
    after: float
    loss_before: float
    loss_after: float


class _Split(NamedTuple):
    """A split, as the head reads it.

    Attributes:
        split: the examples.
        hidden: what the head reads before each answer, in units of logits (`_scale_of`): float64
            [examples, width].
        outputs: of the head for each label, float64 [examples, labels].
        golds: the right labels, int64 [examples].
        cap: of a model whose logits are cap * tanh(output / cap), as Gemma 2's; else None.
    """

    split: EncodedSplit
    hidden: Tensor
    outputs: Tensor
    golds: Tensor
    cap: float | None

    def logits(self, added: Tensor) -> Tensor:
        """Return the logits with `added` [labels, width] in the rows of the labels."""
        outputs = self.outputs + self.hidden @ added.t()
        return outputs if self.cap is None else self.cap * torch.tanh(outputs / self.cap)

    def loss(self, added: Tensor) -> Tensor:
        """Return the mean cross-entropy with `added` in the rows of the labels."""
        return F.cross_entropy(self.logits(added), self.golds)

    def predicted(self, added: Tensor) -> list[int]:
        """Return the predicted labels with `added` in the rows of the labels."""
        return self.logits(added).argmax(dim=1).tolist()

    def scores(self, score: Score, added: Tensor) -> SplitScores:
        """Return the scores without and with `added` in the rows of the labels."""
        nothing = torch.zeros_like(added)
        examples = self.split.examples
        return SplitScores(
            num_examples=len(examples),
            before=score(self.predicted(nothing), examples),
            after=score(self.predicted(added), examples),
            loss_before=float(self.loss(nothing)),
            loss_after=float(self.loss(added)),
        )


def fit_head(opened: Opened, target: Path) -> tuple[str, Mapping[str, SplitScores]]:
    """Fit the head of a model to the training examples of its task. A collective.

    Args:
        opened: the model, and how it reads records.
        target: the directory to write, which is missing or empty.

    Returns:
        The metric, and what changed on the splits "validation" and "test".

    Raises:
        UserError: the task has no labels, the weights have a prefix, the model changes what its
            head returns, no fit lowers the validation loss, or `target` is not empty.
        LezoError: the directory cannot be written.
    """
    opened.refuse_code("data.task", "data.metric", "train.objective")
    distributed.on_rank_zero(partial(refuse_taken, target))
    config = opened.config
    check_data(config)
    reader, encoded = _encode(config)
    tokens = _label_tokens(encoded)
    if tokens is None:
        config, reader, encoded, tokens = _with_answers(config, reader, encoded["training"])
    task = reader.task
    engine = opened.load_engine()
    adapter = engine.sharded.adapter
    if isinstance(adapter, PrefixAdapter):
        raise UserError(
            "fit-head writes a whole model, and a prefix is not part of its weights",
            fix="fit the head of the base model by --model",
        )
    if adapter is None and engine.base.bits is not None:
        raise UserError(
            f"fit-head writes the weights as they are, and model.bits={engine.base.bits} rounds "
            "them",
            fix="remove model.bits",
        )
    check_scoring(engine, reader, encoded["training"], config)
    head, rows = _head_of(engine, tokens)
    read = {}
    for name, split in encoded.items():
        scorer = Scorer(engine, reader, split, config.train.eval_batch_size)
        read[name] = _read(scorer, rows)
    scale = _scale_of(read["training"], rows, type(engine.module).__name__)
    for each in read.values():
        each.hidden.mul_(scale)
    added = distributed.on_rank_zero(lambda: _fit(read["training"], read["validation"]))
    fitted = (rows.double() + added).to(rows.dtype)
    score = load_score(task)
    assert score is not None, "a task with labels has a metric"
    stored = fitted.double() - rows.double()  # what rounding to the model's dtype leaves
    scores = {name: read[name].scores(score, stored) for name in ("validation", "test")}
    if distributed.rank() == 0:
        _show_wrong(read["test"], stored)
    made = "lezo-ds fit-head changed the rows of the output head that belong to the labels."
    if "step" in opened.source:
        made = f"These are the weights after {opened.source['step']} steps of training. {made}"
    engine.write_model(
        target,
        card=partial(
            model_card,
            config,
            "its output head fitted to labels",
            made,
            _rows_of(scores, task.metric),
            license_of=engine.base.directory,
        ),
        texts=own_texts(config),
        merge=adapter is not None,
        changes={head: partial(_with_rows, tokens, fitted)},
        recipe=recipe_of(config),
    )
    return task.metric, scores


def _encode(config: RunConfig) -> tuple[Reader, dict[str, EncodedSplit]]:
    """Return how a model reads the records of a task with labels, and the splits."""
    examples = Examples(config)
    reader = examples.reader
    task = reader.task
    if not task.has_classes:
        raise UserError(
            f"fit-head needs labels, and task {task.name} is of kind {task.kind}",
            fix="use lezo-ds train",
        )
    return reader, {
        "training": examples.split("train"),
        "validation": examples.split("dev"),
        "test": examples.split("test"),
    }


def _label_tokens(encoded: Mapping[str, EncodedSplit]) -> list[int] | None:
    """Return the token of each label, or None if a label is not a single token."""
    tokens = shared_candidates([each for split in encoded.values() for each in split.encoded])
    return tokens if tokens is not None and len(set(tokens)) == len(tokens) else None


def _with_answers(
    config: RunConfig, reader: Reader, train: EncodedSplit
) -> tuple[RunConfig, Reader, dict[str, EncodedSplit], list[int]]:
    """Return all that a fit needs, with another text of one token for each label of the recipe."""
    labels = list(config.data.labels or ())
    first = train.encoded[0]
    beginnings = []
    for ids, length in zip(first.sequences, first.option_lengths, strict=True):
        text = reader.tokenizer.decode([ids[-length]])
        beginnings.append(text.strip())
    letters = list(string.ascii_uppercase[: len(labels)])
    for texts in (beginnings, letters):
        if not labels or len(set(texts) - {""}) != len(labels):
            continue
        changed = config.with_section("data", labels=dict(zip(labels, texts, strict=True)))
        reader, encoded = _encode(changed)
        tokens = _label_tokens(encoded)
        if tokens is not None:
            logger.info("the model answers labels of several tokens by: %s", changed.data.labels)
            return changed, reader, encoded, tokens
    raise UserError(
        "fit-head needs labels that the model answers by one token each",
        fix="map each label to a word of one token in data.labels, or use lezo-ds train",
    )


def _rows_of(scores: Mapping[str, SplitScores], metric: str) -> list[tuple[str, str, str]]:
    """Return the rows of the table of scores, for the card."""
    rows = []
    for split, found in scores.items():
        name = f"{split}, {found.num_examples} examples"
        before = f"{metric} {found.before:.4f}, loss {found.loss_before:.4f}"
        after = f"{metric} {found.after:.4f}, loss {found.loss_after:.4f}"
        rows += [(name, "before", before), (name, "after", after)]
    return rows


def _show_wrong(read: _Split, added: Tensor) -> None:
    """Show the wrong predictions of a split by label, the most frequent first."""
    names = [str(text).strip() for text in read.split.examples[0].candidates]
    pairs = zip(read.golds.tolist(), read.predicted(added), strict=True)
    wrong = Counter((names[gold], names[choice]) for gold, choice in pairs if gold != choice)
    for (right, predicted), number in wrong.most_common(_MOST_SHOWN):
        logger.info("%d test examples labeled %s are predicted as %s", number, right, predicted)


def _head_of(engine: ModelEngine, tokens: Sequence[int]) -> tuple[str, Tensor]:
    """Return the name of the head's weight, and its rows [labels, width]. A collective."""
    model: Any = engine.module
    head = model.get_output_embeddings()
    (module,) = [name for name, each in model.named_modules() if each is head]
    name = f"{module}.weight"
    weights = engine.weights
    (shard,) = [shard for shard in weights.base_shards if name in weights.aliases[shard.name]]
    value = shard.gather()
    adapter = engine.sharded.adapter
    if isinstance(adapter, LoraAdapter):
        merges = adapter.merges(weights)
        if name in merges:
            value = merges[name](value)
    return name, value[list(tokens)].cpu()


def _with_rows(tokens: Sequence[int], rows: Tensor, weight: Tensor) -> Tensor:
    """Return a copy of the head with other rows of the labels."""
    places = torch.tensor(tokens, device=weight.device)
    return weight.index_copy(0, places, rows.to(weight.device))


def _read(scorer: Scorer, rows: Tensor) -> _Split:
    """Read a split by the model as it is. A collective."""
    model = scorer.engine.module
    hidden, outputs = scorer.head_states(rows.shape[1])
    if not (hidden.isfinite().all() and outputs.isfinite().all()):
        raise UserError(
            f"{type(model).__name__} computes values that are not finite",
            fix="use the weights of another step, or model.dtype=fp32",
        )
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if cap is not None:
        most = 1 - torch.finfo(rows.dtype).eps  # of a logit that is rounded to the cap
        outputs = cap * torch.atanh((outputs / cap).clamp(-most, most))
    golds = [example.gold for example in scorer.split.encoded]
    return _Split(scorer.split, hidden, outputs, torch.tensor(golds), cap)


def _scale_of(read: _Split, rows: Tensor, model: str) -> float:
    """Return what a model multiplies the output of its head by: 1 in most models.

    A bias of the head adds a constant to the logits of a label, so deviations are compared.
    """
    product = read.hidden @ rows.double().t()
    own = product - product.mean(dim=0)
    found = read.outputs - read.outputs.mean(dim=0)
    rounding = 2 * torch.finfo(rows.dtype).eps * read.outputs.norm()
    if (found - own).norm() <= rounding:  # examples may be too much alike to tell a scale
        return 1.0
    scale = float((own * found).sum() / own.square().sum().clamp_min(1e-30))
    if (found - scale * own).norm() > _UNLIKE * found.norm() + rounding:
        raise UserError(
            f"the logits of {model} are not the output of its head times a number, so no fit of "
            "the head is the best one",
            fix="use lezo-ds train",
        )
    return scale


def _fit(train: _Split, dev: _Split) -> Tensor:
    """Return D, float64 [labels, width], with the decay of the lowest validation loss."""
    size = train.hidden.square().mean(dim=0).sqrt().clamp_min(1e-12)
    normal = train._replace(hidden=train.hidden / size)
    added = torch.zeros(train.outputs.shape[1], len(size), dtype=torch.float64, requires_grad=True)
    best = torch.zeros_like(added)
    best_loss = float(dev.loss(best))
    for decay in DECAYS:
        optimizer = torch.optim.LBFGS(
            [added], max_iter=_MOST_ITERATIONS, line_search_fn="strong_wolfe"
        )

        def objective(decay: float = decay, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            penalty = decay / len(normal.hidden) * added.square().sum()
            loss = normal.loss(added) + penalty
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        with torch.enable_grad():
            optimizer.step(objective)  # type: ignore[no-untyped-call]
        found = added.detach() / size
        loss = float(dev.loss(found))
        logger.info("decay %g: validation loss %.4f", decay, loss)
        if loss < best_loss:
            best = found
            best_loss = loss
    if not best.any():
        raise UserError(
            f"no fit has a lower validation loss than the model's, {best_loss:.4f}",
            fix="raise data.num_train and data.num_dev, or use lezo-ds train",
        )
    return best.detach()
