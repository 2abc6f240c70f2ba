"""What lezo_ds computes with a tiny model, compared with transformers, one sequence at a time."""

import csv
import gc
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from assets import tokenizer_of
from family_models import TOKENS, opened_by, published_class, small_config
from safetensors.torch import load_file
from tiny_models import random_values
from tiny_runs import full_weights, start_engine
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.pytorch_utils import Conv1D

from lezo_ds.checkpoints.checkpoint import load_model_config, persistent_buffers
from lezo_ds.cli import run_command
from lezo_ds.config import PeftConfig
from lezo_ds.data.batches import all_candidates, candidate_batch, token_batch
from lezo_ds.data.examples import EncodedExample
from lezo_ds.data.generation import prompt_batch
from lezo_ds.data.objectives import classification_loss
from lezo_ds.data.packing import can_pack, pack
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import GenerationSettings
from lezo_ds.forward.blocks import find_blocks
from lezo_ds.forward.probes import Perturbation
from lezo_ds.zo.passes import KeyedProbe

PAD = 1
CONTEXT_LENGTHS = (5, 21, 3, 9, 11, 2, 7, 14)
PROMPT_LENGTHS = (3, 12, 1, 6, 4)
NUM_NEW_TOKENS = 6
SETTINGS = GenerationSettings(NUM_NEW_TOKENS, (), PAD)
SCALE = 1e-2
TOLERANCE = 1e-4

WORDS = tuple(f"w{token}" for token in TOKENS)
"""The text of each token: a label is one of the last two."""
LABELS = WORDS[-2:]
NUM_RECORDS = 30


def drawn_tokens(count, generator) -> tuple[int, ...]:
    drawn = torch.randint(TOKENS.start, TOKENS.stop, (count,), generator=generator)
    return tuple(drawn.tolist())


def examples_of(option_length, lengths=CONTEXT_LENGTHS, seed=5) -> list[EncodedExample]:
    """Return examples with two candidates, whose contexts have different lengths."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count):
        return drawn_tokens(count, generator)

    candidates = [tokens(option_length) for _ in range(2)]
    examples = []
    for number, length in enumerate(lengths):
        context = tokens(length)
        sequences = tuple((*context, *candidate) for candidate in candidates)
        mask = (False,) * length + (True,) * option_length
        examples.append(EncodedExample(sequences, (mask, mask), number % 2))
    return examples


def write_table(path: Path, labels: Sequence[str]) -> None:
    """Write a table of texts of different lengths, with these labels."""
    generator = torch.Generator().manual_seed(9)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for number, label in enumerate(labels):
            length = CONTEXT_LENGTHS[number % len(CONTEXT_LENGTHS)] + 1
            drawn = torch.randint(len(WORDS) - len(LABELS), (length,), generator=generator)
            writer.writerow([" ".join(WORDS[place] for place in drawn.tolist()), label])


def with_start(examples: Iterable[EncodedExample], start: tuple[int, ...]) -> list[EncodedExample]:
    """Return examples whose sequences all begin with the same tokens."""
    found = []
    for own in examples:
        sequences = tuple((*start, *ids) for ids in own.sequences)
        masks = tuple((False,) * len(start) + mask for mask in own.masks)
        found.append(replace(own, sequences=sequences, masks=masks))
    return found


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(7)
    return [drawn_tokens(length, generator) for length in PROMPT_LENGTHS]


@torch.no_grad()
def logits_of(model: Any, ids: tuple[int, ...]) -> Tensor:
    """Return the logits after each token of one sequence, [tokens, vocabulary]."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def log_probabilities(model: Any, examples: list[EncodedExample]) -> Tensor:
    """Return the log-probability of each token of each candidate of each example."""
    found = []
    for example in examples:
        for ids, length in zip(example.sequences, example.option_lengths, strict=True):
            logits = logits_of(model, ids[:-1])[-length:]
            targets = torch.tensor(ids[-length:])
            found.append(-cross_entropy(logits, targets, reduction="none"))
    return torch.cat(found)


class Family:
    """A directory with a tiny model of a family, and what is compared on it."""

    def __init__(self, family: str, root: Path) -> None:
        self.family = family
        self.root = root
        self.directory = root / "model"
        self.recipe = root / "recipe.yaml"
        self.table = root / "table.csv"
        config = small_config(family)
        model = published_class(family)(config).eval()
        random_values(model)
        for _, buffer in persistent_buffers(model):
            # Those of routers are zeros, and of scalars ones. Tables are those of a recurrence.
            if buffer.is_floating_point() and buffer.dim() < 2:
                buffer += torch.linspace(0.1, 0.3, buffer.numel()).view_as(buffer)
        model.save_pretrained(self.directory)

    @cached_property
    def reference(self) -> Any:
        """The model of transformers on the directory."""
        return self.opened(self.directory)[0]

    @cached_property
    def engine(self) -> Any:
        """The engine of lezo_ds that trains all weights."""
        return self._start()

    def opened(self, directory: Path) -> tuple[Any, dict[str, Any]]:
        """Return the model that transformers loads from a directory, and what it says about it."""
        model, info = opened_by(self.family).from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True
        )
        return model.eval(), info

    def opened_whole(self, directory: Path) -> Any:
        """Return the model in a directory that has each of its weights, and no others.

        The class that its config names must find all of them, too.
        """
        model, info = self.opened(directory)
        named = json.loads((directory / "config.json").read_text())["architectures"][0]
        own_class = getattr(transformers, named)
        _, own_info = own_class.from_pretrained(directory, output_loading_info=True)
        for name, said in ((type(model).__name__, info), (named, own_info)):
            problems = {key: sorted(value) for key, value in said.items() if value}
            assert not problems, f"{name}: {problems}"
        return model

    def _start(self, **changes: Any) -> Any:
        settings = {"learning_rate": 1e-2, "perturbation_scale": SCALE, "sparsity": 0.0}
        return start_engine(self.directory, **(settings | changes))

    def losses(self) -> None:
        for option_length in (2, 1):
            examples = examples_of(option_length)
            expected = log_probabilities(self.reference, examples)
            if option_length > 1:
                assert_near(self.engine.forward(candidate_batch(examples, PAD)), expected)
                continue
            whole = token_batch(all_candidates(examples), PAD)
            assert_near(self.engine.forward(whole), expected)
            # A pass over labels of one token returns their entries alone.
            found = self.engine.forward(candidate_batch(examples, PAD))
            for row, example in zip(found, examples, strict=True):
                ids = [sequence[-1] for sequence in example.sequences]
                assert_near(row, logits_of(self.reference, example.sequences[0][:-1])[-1, ids])

    def packed(self) -> None:
        config = load_model_config(self.directory)
        own = examples_of(2)
        start = prompts()[1][:6]
        for examples, num_start in ((own, 0), (with_start(own, start), len(start))):
            longest = max(len(ids) for example in examples for ids in example.sequences)
            if not can_pack(config, longest):
                if examples is own:
                    raise UserError("not packed", fix="")
                continue
            batch = candidate_batch(examples, PAD)
            together = pack(batch, num_start)
            assert len(together.inputs["input_ids"]) < len(batch.inputs["input_ids"])
            found = self.engine.forward(together)
            assert_near(found, log_probabilities(self.reference, examples))

    def answers(self) -> None:
        common = prompts()[1][:3]
        for start in ((), common):
            asked = [(*start, *prompt) for prompt in prompts()]
            found = self.engine.forward(prompt_batch(asked, SETTINGS, len(start)))
            expected = [written(self.reference, prompt) for prompt in asked]
            assert found.tolist() == expected, f"{found.tolist()} instead of {expected}"

    def step(self, **changes: Any) -> None:
        self._compare_slope(self._start(**changes) if changes else self.engine)

    def rank_1(self) -> None:
        self._compare_slope(self._start(noise_rank=1))

    def _compare_slope(self, engine: Any) -> None:
        """Compare the projected gradient of a step with the difference of two losses by hand."""
        before = full_weights(engine)
        examples = examples_of(2)
        record = engine.train_batch([candidate_batch(examples, PAD)], classification_loss)
        (slope,) = record.projected_grads
        after = full_weights(engine)
        direction = {
            name: (weight - after[name]) / (slope * record.learning_rate)
            for name, weight in before.items()
        }
        model = self.opened(self.directory)[0]
        losses = []
        for scale in (SCALE, -SCALE):
            set_values(model, moved(before, direction, scale))
            scores = log_probabilities(model, examples).view(len(examples), 2, -1).mean(dim=2)
            labels = torch.tensor([example.gold for example in examples])
            losses.append(float(cross_entropy(scores, labels)))
        expected = (losses[0] - losses[1]) / (2 * SCALE)
        assert abs(slope - expected) <= 2e-3 * (1 + abs(expected)), f"{slope} not {expected}"
        self._compare_answers(engine, model, record.key, after, direction)

    def _compare_answers(self, engine, model, key, values, direction) -> None:
        """Compare the answers of a pass at two probes with those at moved weights."""
        probes = (KeyedProbe((key,), 4 * SCALE), KeyedProbe((key,), -4 * SCALE))
        perturbation = Perturbation(probes)
        batch = prompt_batch(prompts(), SETTINGS)
        if engine.config.probes_per_pass == 1:
            outputs = [engine.run(batch, single)[0] for single in perturbation.one_by_one()]
        else:
            outputs = engine.run(batch, perturbation)
        for probe, found in zip(probes, outputs, strict=True):
            set_values(model, moved(values, direction, probe.scale))
            expected = [written(model, prompt) for prompt in prompts()]
            assert found.tolist() == expected, f"{found.tolist()} instead of {expected}"

    def export(self) -> None:
        """Compare the logits after a step with those of the exported model."""
        target = self.root / "exported"
        self.engine.write_model(target)
        model = self.opened_whole(target)
        examples = examples_of(2)
        batch = candidate_batch(examples, PAD)
        assert_near(self.engine.forward(batch), log_probabilities(model, examples))

    def lora(self) -> None:
        names = ",".join(linear_names(self.reference))
        config = PeftConfig(kind="lora", lora_rank=2, lora_alpha=5.0, lora_targets=names)
        engine = self._start(peft=config, learning_rate=0.03)
        examples = examples_of(2)
        batch = candidate_batch(examples, PAD)
        for _ in range(2):
            engine.train_batch([batch], classification_loss)
        adapter, merged = self.root / "adapter", self.root / "merged"
        engine.write_model(adapter)
        engine.write_model(merged, merge=True)
        plain = log_probabilities(self.reference, examples)
        base = self.opened(self.directory)[0]
        with_adapter = peft.PeftModel.from_pretrained(base, adapter)
        read = peft.get_peft_model_state_dict(with_adapter)
        stored = load_file(adapter / "adapter_model.safetensors")
        if any(not torch.equal(value, read[name]) for name, value in stored.items()):
            raise UserError("peft does not read the names of this adapter", fix="")
        by_peft = with_adapter.merge_and_unload()
        model = self.opened_whole(merged)
        expected = dict(by_peft.named_parameters())
        found = dict(model.named_parameters())
        assert found.keys() == expected.keys()
        for name in expected:
            assert_near(found[name].detach(), expected[name].detach())
        scores = log_probabilities(model, examples)
        # A merged weight is rounded once more.
        assert_near(engine.forward(batch), scores, 10 * TOLERANCE)
        assert (scores - plain).abs().max() > 4 * TOLERANCE, "the adapter does not matter"

    def plan(self) -> None:
        """Write a recipe by init, and plan its run."""
        write_table(self.table, LABELS * (NUM_RECORDS // len(LABELS)))
        words = [*WORDS, "Label:"]
        tokenizer_of(words, WhitespaceSplit()).save_pretrained(self.directory)
        command = [self.directory, self.table, "--out", self.recipe]
        run_command("init", [*map(str, command)])
        run_command("train", ["--config", str(self.recipe), "--dry-run"])

    def labels(self) -> None:
        """Compare predicted labels with transformers' own, before and after fit-head.

        The head is fitted to the labels that the model does not predict, which most fits improve.
        """
        if not self.recipe.exists():
            self.plan()  # raises again why there is none
        recipe = ["--config", str(self.recipe)]
        predicted = self._compare_labels(self.directory, self.reference, recipe)
        write_table(self.table, [LABELS[1 - LABELS.index(label)] for label in predicted])
        fitted = self.root / "fitted"
        command = ["--model", str(self.directory), "--out", str(fitted)]
        try:
            run_command("fit-head", [*recipe, *command])
        except UserError as error:
            if "no fit has a lower validation loss" in str(error):
                return
            raise
        self._compare_labels(fitted, self.opened_whole(fitted), [])

    def _compare_labels(self, directory: Path, model: Any, recipe: list[str]) -> list[str]:
        """Return the labels that predict writes, which are those of a model of transformers."""
        out = self.root / f"by-{directory.name}.csv"
        command = ["--model", directory, self.table, "--out", out]
        run_command("predict", [*recipe, *map(str, command)])
        with out.open(newline="") as file:
            rows = list(csv.DictReader(file))
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        tokens = tokenizer.convert_tokens_to_ids(list(LABELS))
        asked = [tuple(tokenizer(f"{row['text']}\nLabel:").input_ids) for row in rows]
        logits = torch.stack([logits_of(model, ids)[-1, tokens] for ids in asked])
        expected, chosen = logits.softmax(dim=1).max(dim=1)
        found = torch.tensor([float(row["probability"]) for row in rows])
        assert_near(found, expected)
        labels = [row["predicted"] for row in rows]
        assert labels == [LABELS[place] for place in chosen.tolist()]
        return labels


def written(model: Any, prompt: tuple[int, ...]) -> list[int]:
    """Return what generate of transformers writes after one prompt, reading all for each token."""
    ids = torch.tensor([prompt])
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=NUM_NEW_TOKENS, do_sample=False, pad_token_id=PAD, use_cache=False
    )
    tokens = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
    return tokens[0, len(prompt) :].tolist()


def moved(values, direction, scale):
    return {name: value + scale * direction[name] for name, value in values.items()}


def set_values(model, values):
    parameters = dict(model.named_parameters())
    assert values.keys() == parameters.keys(), values.keys() ^ parameters.keys()
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)


def linear_names(model: nn.Module) -> list[str]:
    """Return the names of modules in the blocks that are linear wherever they occur."""
    names: dict[str, bool] = {}
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        is_linear = isinstance(module, nn.Linear | Conv1D)
        names[name] = names.get(name, True) and is_linear
    blocks = model.get_submodule(find_blocks(model).path)
    inside = {path.rpartition(".")[2] for path, _ in blocks.named_modules()}
    return sorted(name for name in inside if names.get(name) and not name.isdecimal())


def assert_near(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def outcome(check: Callable[[], None]) -> str:
    """Return "equal", or in one line what came out instead."""
    try:
        check()
    except UserError as error:
        return f"refused: {error}"
    except AssertionError as error:
        return "differs: " + " ".join(str(error).split())
    except Exception as error:  # of transformers or peft
        return f"error: {type(error).__name__}: " + " ".join(str(error).split())
    finally:
        gc.collect()
    return "equal"
