"""What other rules make of the demo's directions: momentum, Adam, Muon, decay, averages, more.

    python docs/studies/first_minutes.py blocks=15 learning_rate=6e-2
    python docs/studies/first_minutes.py optimizer=muon learning_rate=1e-2 steps=600 data=tweets
    python docs/studies/first_minutes.py head=1000 steps=64 tokens=answers directions=12 blocks=15
    python docs/studies/first_minutes.py steps=4 cosine=true

It is a model of `make demo`'s step in plain PyTorch, on one device, for docs/results.md (The first
minutes). Each example has `directions` random directions of rank 1, and the loss at each is
compared with their mean. With tokens=answers, directions meet the last token of a sentence alone,
after the keys and values of those before it. lezo_ds keeps no gradient: it draws the directions
again to update its shards. Here, the update of a matrix is a tensor, so any rule can be tried.
Blocks before the trained ones run once for each sentence. The last line is JSON.

`make demo` fetches the model and the sentences.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

ASSETS = Path("runs/demo/assets")
MODEL = ASSETS / "SmolLM2-135M-Instruct"
PROMPT = "{} It was"
VERDICTS = (" terrible", " great")  # a token each
MOST_TRAINING = 8000
NUM_VALIDATION = 600
ROWS = 64  # of an evaluation
HEAD_DECAY = 100.0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class ContextLayer(DynamicLayer):
    """The keys and values of contexts in a block. Each copy of the answers reads them.

    Nothing is added to them, so a block may run again.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Make a layer of the states [sequences, heads, tokens, width]."""
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys = keys
        self.values = values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the states of contexts with those of answers after them, for each row."""
        return _joined(self.keys, key_states), _joined(self.values, value_states)


def _joined(of_contexts: Tensor, of_answers: Tensor) -> Tensor:
    """Return the states of contexts, [S, heads, C, width], and of k * S answers, in one tensor."""
    copies = len(of_answers) // len(of_contexts)
    return torch.cat([of_contexts.repeat(copies, 1, 1, 1), of_answers], dim=2)


@dataclass(frozen=True)
class Settings:
    """Of one run.

    Attributes:
        data: reviews, tweets or products.
        seed: of the directions and the order of sentences.
        steps, batch_size: of the run.
        blocks: number of the last blocks that are trained.
        directions, rank: of each example.
        tokens: that meet the directions: all, or answers (the last one of each sentence).
        scale: mu of the perturbations.
        two_sided: whether each direction is measured on both sides. Differences are then not
            compared with their mean.
        learning_rate, schedule: linear and cosine fall to 0, sqrt is the root of linear.
        optimizer: of sgd, momentum, adam, adam_matrix (one second moment for each matrix) and muon.
        beta, beta2: of the moments.
        horizon: number of steps of Adam's moments; 0 for all. AdaMeZO (arXiv 2605.00650) has few.
        guided: whether the estimate is only a direction. A step follows it as far as the loss of
            the batch changes there, which two more passes measure (MeZO-GV, arXiv 2601.04710).
        guide: share of a direction's output side that follows the first moment (power iteration).
        decay: of the distance from the base weights.
        head: number of training sentences to which the rows of the verdicts are fitted before the
            first step, as `lezo-ds fit-head` does, with the decay HEAD_DECAY; 0 for none.
        average: last share of the steps whose weights are averaged.
        cosine: train nothing. Print the cosine of the gradient, and of its part that reaches the
            weights through the last token, for the batch of each step.
    """

    data: str = "reviews"
    seed: int = 0
    steps: int = 150
    batch_size: int = 16
    blocks: int = 10
    directions: int = 6
    rank: int = 1
    tokens: str = "all"
    scale: float = 3e-3
    two_sided: bool = False
    learning_rate: float = 6e-2
    schedule: str = "linear"
    optimizer: str = "sgd"
    beta: float = 0.9
    beta2: float = 0.99
    horizon: int = 0
    guided: bool = False
    guide: float = 0.0
    decay: float = 0.0
    head: int = 0
    average: float = 0.0
    cosine: bool = False


class Sentences(NamedTuple):
    """Sentences of a split.

    Attributes:
        hidden: of each sentence, float32 [tokens, width]: what the first trained block reads.
        labels: int64 [sentences].
    """

    hidden: list[Tensor]
    labels: Tensor


class Batch(NamedTuple):
    """Padded sentences.

    Attributes:
        hidden: float32 [rows, tokens, width].
        last: the last token of each row, int64 [rows].
        labels: int64 [rows].
    """

    hidden: Tensor
    last: Tensor
    labels: Tensor


class Direction(NamedTuple):
    """Of a matrix, for each row of a batch.

    Attributes:
        outputs: float32 [rows, rank, out_features].
        inputs: float32 [rows, rank, in_features].
    """

    outputs: Tensor
    inputs: Tensor


class Reader:
    """The model: its first blocks read sentences once, and its last blocks are trained."""

    def __init__(self, num_trained: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).to(DEVICE)
        layers = self.model.model.layers
        self.frozen = layers[: len(layers) - num_trained]
        self.trained = layers[len(layers) - num_trained :]
        ids = [self.tokenizer(word, add_special_tokens=False).input_ids for word in VERDICTS]
        self.verdicts = self.model.lm_head.weight[[token for (token,) in ids]]
        self.matrices = [
            module
            for layer in self.trained
            for module in layer.modules()
            if isinstance(module, nn.Linear)
        ]

    def sentences(self, records: Sequence[dict[str, Any]]) -> Sentences:
        """Run the frozen blocks once for each sentence."""
        ids = [self.tokenizer(PROMPT.format(r["sentence"].strip())).input_ids for r in records]
        hidden: dict[int, Tensor] = {}
        for rows in by_length(ids):
            longest = max(len(ids[row]) for row in rows)
            padded = [ids[row] + [0] * (longest - len(ids[row])) for row in rows]
            states = self.model.model.embed_tokens(torch.tensor(padded, device=DEVICE))
            states = self.run_blocks(self.frozen, states)
            for row, of_row in zip(rows, states, strict=True):
                hidden[row] = of_row[: len(ids[row])].clone()
        labels = torch.tensor([record["label"] for record in records], device=DEVICE)
        return Sentences([hidden[row] for row in range(len(ids))], labels)

    def run_blocks(
        self, blocks: Sequence[nn.Module], states: Tensor, cache: Cache | None = None
    ) -> Tensor:
        """Run blocks on right-padded rows, whose tokens see none after them. Fill a cache."""
        positions = torch.arange(states.shape[1], device=DEVICE)[None]
        rotations = self.model.model.rotary_emb(states, positions)
        for block in blocks:
            states = block(states, position_embeddings=rotations, past_key_values=cache)
        return states

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of each row, and whether its verdict is right."""
        states = self.run_blocks(self.trained, batch.hidden)
        rows = torch.arange(len(states), device=DEVICE)
        return self.losses_of(states[rows, batch.last], batch.labels)

    def losses_of(self, states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same, of the last hidden state of each row."""
        logits = F.linear(self.model.model.norm(states), self.verdicts)
        losses = F.cross_entropy(logits, labels, reduction="none")
        return losses, logits.argmax(dim=1) == labels

    def read(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of a batch in each trained block."""
        # The blocks know their own numbers, which count all blocks.
        cache = DynamicCache()
        cache.layers = [DynamicLayer() for _ in self.model.model.layers]
        self.run_blocks(self.trained, batch.hidden, cache)
        return [(layer.keys, layer.values) for layer in cache.layers[len(self.frozen) :]]

    def answer_losses(
        self, batch: Batch, contexts: Sequence[tuple[Tensor, Tensor]], copies: int = 1
    ) -> Tensor:
        """Return the losses of copies of a batch, whose last tokens alone run here.

        Args:
            batch: of one copy.
            contexts: the keys and values of its tokens. A last token sees those before it.
            copies: number of neighboring rows that stand for a row of the batch.
        """
        rows = torch.arange(len(batch.last), device=DEVICE).repeat_interleave(copies)
        last = batch.last[rows]
        states = batch.hidden[rows, last][:, None]
        rotations = self.model.model.rotary_emb(states, last[:, None])
        columns = torch.arange(batch.hidden.shape[1] + 1, device=DEVICE)
        is_own = columns == batch.hidden.shape[1]  # the token itself comes after all others
        seen = ((columns < last[:, None]) | is_own)[:, None, None]
        cache = DynamicCache()
        cache.layers = [DynamicLayer() for _ in self.frozen]
        for keys, values in contexts:
            layer = DynamicLayer()
            layer.update(keys[rows], values[rows])
            cache.layers.append(layer)
        for block in self.trained:
            states = block(
                states, seen, position_embeddings=rotations, past_key_values=cache, use_cache=True
            )
        losses, _ = self.losses_of(states[:, 0], batch.labels[rows])
        return losses

    def perturbed_losses(
        self, batch: Batch, directions: Sequence[Direction], scale: float, settings: Settings
    ) -> Tensor:
        """Return the loss of each direction of each row: at W + scale * outputs^T inputs."""
        contexts = self.read(batch) if settings.tokens == "answers" else None
        copies = settings.directions
        hooks = []
        for matrix, (outputs, inputs) in zip(self.matrices, directions, strict=True):
            add = partial(add_direction, Direction(scale * outputs, inputs))
            hooks.append(matrix.register_forward_hook(add))
        if contexts is not None:
            losses = self.answer_losses(batch, contexts, copies)
        else:
            losses, _ = self.losses(Batch(*(each.repeat_interleave(copies, 0) for each in batch)))
        for hook in hooks:
            hook.remove()
        return losses

    def fit_head(self, sentences: Sentences, number: int) -> None:
        """Fit the rows of the verdicts to some first sentences, by logistic regression."""
        if number == 0:
            return
        labels = sentences.labels[:number]
        states = torch.zeros(number, self.verdicts.shape[1], device=DEVICE)
        for rows in by_length(sentences.hidden[:number]):
            batch = batch_of(sentences, rows)
            last = self.run_blocks(self.trained, batch.hidden)
            last = last[torch.arange(len(rows), device=DEVICE), batch.last]
            states[rows] = self.model.model.norm(last)
        size = states.square().mean(dim=0).sqrt()
        logits = states @ self.verdicts.T
        added = torch.zeros_like(self.verdicts, requires_grad=True)
        optimizer = torch.optim.LBFGS([added], max_iter=200, line_search_fn="strong_wolfe")

        def objective() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(logits + (states / size) @ added.T, labels)
            loss = loss + HEAD_DECAY / number * added.square().sum()
            loss.backward()
            return loss

        with torch.enable_grad():
            optimizer.step(objective)
        self.verdicts = self.verdicts + added.detach() / size

    def scores(self, sentences: Sentences) -> tuple[float, float]:
        """Return the mean loss and the accuracy."""
        loss = right = 0.0
        for rows in by_length(sentences.hidden):
            losses, is_right = self.losses(batch_of(sentences, rows))
            loss += float(losses.sum())
            right += float(is_right.sum())
        number = len(sentences.hidden)
        return round(loss / number, 4), round(right / number, 4)


def add_direction(direction: Direction, _: nn.Module, args: Any, result: Tensor) -> Tensor:
    """Return the output of a linear module with a direction added to its weight in each row."""
    return result + (args[0] @ direction.inputs.transpose(1, 2)) @ direction.outputs


def by_length(rows: Sequence[Any]) -> Iterator[list[int]]:
    """Yield the indices of rows of about the same length."""
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    for first in range(0, len(order), ROWS):
        yield order[first : first + ROWS]


def batch_of(sentences: Sentences, rows: Sequence[int]) -> Batch:
    hidden = nn.utils.rnn.pad_sequence([sentences.hidden[row] for row in rows], batch_first=True)
    lengths = [len(sentences.hidden[row]) for row in rows]
    last = torch.tensor(lengths, device=DEVICE) - 1
    return Batch(hidden, last, sentences.labels[list(rows)])


def draw(
    matrices: Sequence[nn.Linear], rows: int, rank: int, random_numbers: Any
) -> list[Direction]:
    """Return normal directions of all matrices, whose elements have a variance of 1."""
    sizes = [rank * size for m in matrices for size in (m.out_features, m.in_features)]
    noise = torch.randn(rows, sum(sizes), generator=random_numbers, device=DEVICE).split(sizes, 1)
    pairs = zip(noise[::2], noise[1::2], strict=True)
    return [
        Direction(a.view(rows, rank, -1) * rank**-0.5, b.view(rows, rank, -1)) for a, b in pairs
    ]


def follow(directions: list[Direction], moments: Sequence[Tensor], share: float) -> list[Direction]:
    """Return directions whose output side partly is the first moment's answer to their inputs."""
    guided = []
    for (outputs, inputs), moment in zip(directions, moments, strict=True):
        answer = inputs @ moment.T
        answer = answer / (answer.square().mean(-1, keepdim=True).sqrt() + 1e-12)
        guided.append(Direction(math.sqrt(1 - share**2) * outputs + share * answer, inputs))
    return guided


def slopes(reader: Reader, batch: Batch, directions: list[Direction], settings: Settings) -> Tensor:
    """Return the slope of each row in units of their deviation, float32 [rows]."""
    losses = reader.perturbed_losses(batch, directions, settings.scale, settings)
    if settings.two_sided:
        found = losses - reader.perturbed_losses(batch, directions, -settings.scale, settings)
        return found / (found.std() + 1e-12)
    by_example = losses.view(-1, settings.directions)
    centered = by_example - by_example.mean(dim=1, keepdim=True)
    return (centered / (centered.square().mean().sqrt() + 1e-12)).flatten()


def slope_along(reader: Reader, batch: Batch, steps: Sequence[Tensor], scale: float) -> float:
    """Return the slope of a batch's mean loss along a change of all matrices."""
    losses = []
    for change in (scale, -2 * scale, scale):  # there, to the other side, and back
        for matrix, step in zip(reader.matrices, steps, strict=True):
            matrix.weight += change * step
        losses.append(float(reader.losses(batch)[0].mean()))
    return (losses[0] - losses[1]) / (2 * scale)


def gradient_cosine(reader: Reader, batch: Batch) -> float:
    """Return the cosine of the gradient, and of its part that is due to the last tokens alone."""
    weights = [matrix.weight for matrix in reader.matrices]
    contexts = reader.read(batch)
    with torch.enable_grad():
        losses, _ = reader.losses(batch)
        whole = torch.autograd.grad(losses.mean(), weights)
        part = torch.autograd.grad(reader.answer_losses(batch, contexts).mean(), weights)
    gradients = [torch.cat([each.flatten() for each in of_all]) for of_all in (whole, part)]
    return float(F.cosine_similarity(*gradients, dim=0))


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return about U V^T of the singular value decomposition (Muon's Newton-Schulz iteration)."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    result = matrix / (matrix.norm() + 1e-12)
    result = result.T if is_tall else result
    for _ in range(5):
        gram = result @ result.T
        result = 3.4445 * result + (-4.7750 * gram + 2.0315 * gram @ gram) @ result
    return result.T if is_tall else result


class Optimizer:
    """Turns the gradient estimate of a matrix into its update. It has the state of one matrix."""

    def __init__(self, settings: Settings, num_directions: int) -> None:
        self.settings = settings
        self.num_directions = num_directions
        self.steps = 0
        self.first: Tensor | None = None
        self.second: Tensor | None = None
        self.last: list[Tensor] = []

    def update(self, gradient: Tensor) -> Tensor:
        self.steps += 1
        beta = self.settings.beta
        beta2 = self.settings.beta2
        start = torch.zeros_like(gradient) if self.first is None else self.first
        self.first = beta * start + (1 - beta) * gradient
        # Elements of a mean over n directions are about n^-1/2, and so are these updates.
        size = self.num_directions**-0.5
        match self.settings.optimizer:
            case "sgd":
                return gradient
            case "momentum":
                return self.first
            case "muon":
                return orthogonalized(self.first) * math.sqrt(max(gradient.shape)) * size
            case "adam" if self.settings.horizon:
                return self.truncated_adam(gradient) * size
            case "adam" | "adam_matrix":
                square = gradient.square()
                if self.settings.optimizer == "adam_matrix":
                    square = square.mean()
                start = torch.zeros_like(square) if self.second is None else self.second
                self.second = beta2 * start + (1 - beta2) * square
                mean = self.first / (1 - beta**self.steps)
                deviation = (self.second / (1 - beta2**self.steps)).sqrt()
                return mean / (deviation + 1e-8) * size
        sys.exit(f"error: there is no optimizer {self.settings.optimizer}")

    def truncated_adam(self, gradient: Tensor) -> Tensor:
        """Return Adam's update by the moments of the last steps alone."""
        self.last = [gradient, *self.last][: self.settings.horizon]
        mean = torch.zeros_like(gradient)
        square = torch.zeros_like(gradient)
        of_mean = of_square = 0.0  # the sums of the weights
        for age, earlier in enumerate(self.last):
            mean += self.settings.beta**age * earlier
            square += self.settings.beta2**age * earlier.square()
            of_mean += self.settings.beta**age
            of_square += self.settings.beta2**age
        return mean / of_mean / ((square / of_square).sqrt() + 1e-8)


def rate(settings: Settings, step: int) -> float:
    left = 1 - step / settings.steps
    shapes = {
        "constant": 1.0,
        "linear": left,
        "sqrt": math.sqrt(left),
        "cosine": 0.5 - 0.5 * math.cos(math.pi * left),
    }
    return settings.learning_rate * shapes[settings.schedule]


def sentences_of(settings: Settings, reader: Reader) -> tuple[Sentences, Sentences, Sentences]:
    """Return the sentences of all steps, and those for validation and the test."""

    def read(split: str) -> list[dict[str, Any]]:
        path = ASSETS / settings.data / f"{split}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    records = read("train")
    random.Random(0).shuffle(records)
    number = min(MOST_TRAINING, len(records) - 200)
    held_out = records[number : number + NUM_VALIDATION]
    of_steps = [records[row] for row in order_of(settings, number)]
    splits = (of_steps, held_out, read("validation"))
    training, validating, testing = (reader.sentences(split) for split in splits)
    return training, validating, testing


def order_of(settings: Settings, number: int) -> list[int]:
    """Return the sentences of all steps: each is used once before any is used again."""
    shuffler = random.Random(settings.seed)
    order: list[int] = []
    while len(order) < settings.batch_size * settings.steps:
        epoch = list(range(number))
        shuffler.shuffle(epoch)
        order += epoch
    return order[: settings.batch_size * settings.steps]


def run(settings: Settings) -> dict[str, Any]:
    reader = Reader(settings.blocks)
    train, validation, test = sentences_of(settings, reader)
    reader.fit_head(train, settings.head)
    weights = [matrix.weight for matrix in reader.matrices]
    base = [weight.clone() for weight in weights]
    num_rows = settings.batch_size * settings.directions
    optimizers = [Optimizer(settings, num_rows) for _ in weights]
    random_numbers = torch.Generator(device=DEVICE).manual_seed(1000 + settings.seed)
    curve = {}
    averages: list[Tensor] = []
    num_averaged = 0
    began = time.monotonic()
    for step in range(settings.steps):
        first = step * settings.batch_size
        batch = batch_of(train, range(first, first + settings.batch_size))
        if settings.cosine:
            print(f"step {step}: cosine {gradient_cosine(reader, batch):.3f}", flush=True)
            continue
        directions = draw(reader.matrices, num_rows, settings.rank, random_numbers)
        if settings.guide and step >= 10:
            moments = [optimizer.first for optimizer in optimizers]
            directions = follow(directions, moments, settings.guide)
        found = slopes(reader, batch, directions, settings)
        gradients = []
        for outputs, inputs in directions:
            scaled = (outputs * found[:, None, None]).flatten(0, 1)
            gradients.append(scaled.T @ inputs.flatten(0, 1) / num_rows)
        if settings.guided:
            # A mean has a variance of about 1 / num_rows, and a direction one of 1.
            guide = [gradient * math.sqrt(num_rows) for gradient in gradients]
            slope = slope_along(reader, batch, guide, settings.scale)
            gradients = [slope * direction for direction in guide]
        for weight, of_base, optimizer, gradient in zip(
            weights, base, optimizers, gradients, strict=True
        ):
            weight -= rate(settings, step) * optimizer.update(gradient)
            weight -= rate(settings, step) * settings.decay * (weight - of_base)
        if step >= settings.steps * (1 - settings.average):
            num_averaged += 1
            averages = averages or [torch.zeros_like(weight) for weight in weights]
            for average, weight in zip(averages, weights, strict=True):
                average += (weight - average) / num_averaged
        if (step + 1) % max(1, settings.steps // 3) == 0:
            curve[step + 1] = reader.scores(validation)
    result = {"settings": asdict(settings), "seconds": round(time.monotonic() - began, 1)}
    result |= {"validation": curve, "test": reader.scores(test)}
    if averages:
        for weight, average in zip(weights, averages, strict=True):
            weight.copy_(average)
        result["average"] = {"validation": reader.scores(validation), "test": reader.scores(test)}
    return result


def read_value(default: Any, text: str) -> Any:
    """Return a value of the type of its default: text, a number, or true or false."""
    if isinstance(default, bool):
        return text == "true"
    return type(default)(text)


@torch.no_grad()
def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    known = {field.name for field in fields(Settings)}
    changes = {}
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        if key not in known:
            sys.exit(f"error: {key} is none of {', '.join(sorted(known))}")
        changes[key] = read_value(getattr(Settings(), key), value)
    print(json.dumps(run(Settings(**changes))))


if __name__ == "__main__":
    main()
