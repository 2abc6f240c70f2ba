"""The fitted head: by transformers, one sentence at a time, of a run, and on every layout."""

import copy
import re

import pytest
import torch
from assets import read_lines, write_recipe, write_records
from commands import assert_refused, lezo, train
from own_data import own_values, write_chat_model
from run_ends import results_of
from safetensors.torch import load_file
from tiny_models import FAMILIES
from tiny_runs import write_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, GraniteConfig

from lezo_ds.checkpoints.snapshots import read_manifest
from lezo_ds.config import dump_yaml, load_config
from lezo_ds.data.task_data import load_task_data
from lezo_ds.runs.fit_head import DECAYS

pytestmark = pytest.mark.distributed

OWN = ("data.task=custom", "data.prompt={sentence} It", "data.label_field=label")
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 1}
MODELS = {name: copy.deepcopy(config) for name, (config, _) in FAMILIES.items()}
MODELS["gemma2"].final_logit_softcapping = 1.0
MODELS["granite"] = GraniteConfig(**SIZES, logits_scaling=4.0, tie_word_embeddings=True)
# The tied head has a tied bias.
MODELS["bert"] = BertConfig(**SIZES, is_decoder=True, max_position_embeddings=64)


def fit_words(recipe, out, *keys, model=None):
    command = ["--model", model or recipe.parent / "model", "--config", recipe, "--out", out]
    return [*command, f"run_dir={out}.run", *keys]


def fit(recipe, out, *keys, model=None, **options):
    return lezo("fit-head", *fit_words(recipe, out, *keys, model=model), **options)


def write_family(directory, family, **changes):
    """Write a recipe whose model is of a family."""
    recipe = write_recipe(directory)
    config = copy.deepcopy(MODELS[family])
    config.vocab_size = len(AutoTokenizer.from_pretrained(directory / "model"))
    for name, value in changes.items():
        setattr(config, name, value)
    write_model(config, directory / "model")
    return recipe


def splits_of(recipe):
    data = load_task_data(load_config(recipe, ["run_dir=unused"]))
    return [split.examples for split in (data.train, data.dev, data.test)]


def golds_of(examples):
    return torch.tensor([example.label for example in examples])


class Alone:
    """A model of transformers, which reads one sentence at a time."""

    def __init__(self, directory):
        self.model = AutoModelForCausalLM.from_pretrained(directory).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.head = self.model.get_output_embeddings()
        self.labels = self.tokenizer.convert_tokens_to_ids(["terrible", "great"])

    def read(self, examples):
        """Return what the head reads, and the logits of the labels."""
        hidden, logits = [], []
        hook = self.head.register_forward_pre_hook(
            lambda _, inputs: hidden.append(inputs[0][0, -1])
        )
        for example in examples:
            ids = self.tokenizer(example.prompt, return_tensors="pt").input_ids
            logits.append(self.model(input_ids=ids).logits[0, -1, self.labels])
        hook.remove()
        return torch.stack(hidden).double(), torch.stack(logits).double()


@torch.no_grad()
@pytest.mark.parametrize("family", ["opt", "phi", "gemma2", "granite", "bert"])
def test_a_fitted_head_minimizes_the_loss_of_what_transformers_reads(family, tmp_path):
    recipe = write_family(tmp_path, family)
    printed = fit(recipe, tmp_path / "fitted").out
    base, fitted = (Alone(tmp_path / name) for name in ("model", "fitted"))
    training, *held_out = splits_of(recipe)
    hidden, before = base.read(training)
    same_hidden, after = fitted.read(training)
    torch.testing.assert_close(same_hidden, hidden)

    # Only the rows of the labels are others, and the embedding is the same.
    embeddings = [each.model.get_input_embeddings().weight for each in (base, fitted)]
    assert torch.equal(*embeddings)
    added = (fitted.head.weight - base.head.weight).double()
    assert added.any(dim=1).nonzero().flatten().tolist() == sorted(base.labels)
    rows = added[base.labels]

    # The loss has one minimum, where its gradient is 0 for one of the decays. Granite multiplies
    # what the head returns, and Gemma 2 caps it.
    near = 1e-2 if family == "gemma2" else 1e-3
    scale = {"granite": 0.25}.get(family, 1.0)
    size = (scale * hidden).square().mean(dim=0).sqrt()
    errors = after.softmax(dim=1) - F.one_hot(golds_of(training), 2)
    if family == "gemma2":
        errors = errors * (1 - after.square())
        before, after = before.atanh(), after.atanh()
    torch.testing.assert_close(after - before, scale * hidden @ rows.t(), rtol=near, atol=near)
    slope = errors.t() @ (scale * hidden / size)
    left = [(slope + 2 * decay * rows * size).norm() for decay in DECAYS]
    assert min(left) < (1e-2 + near) * slope.norm()

    # It prints what both models make of the other splits.
    for name, examples in zip(("validation", "test"), held_out, strict=True):
        found = re.search(rf"{name} examples: (\S+) -> (\S+), loss (\S+) -> (\S+)", printed)
        golds = golds_of(examples)
        logits = [each.read(examples)[1] for each in (base, fitted)]
        expected = [float((x.argmax(dim=1) == golds).double().mean()) for x in logits]
        expected += [float(F.cross_entropy(x, golds)) for x in logits]
        assert list(map(float, found.groups())) == pytest.approx(expected, abs=near)
        assert name == "test" or expected[3] < expected[2]


def tensors_of(directory):
    found = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


def test_the_head_of_a_run_is_fitted_at_its_weights_and_training_goes_on_from_it(recipe, tmp_path):
    train(recipe, tmp_path / "run", "zo.learning_rate=1e-2", "model.dtype=bf16")
    given = ["--run", tmp_path / "run", "--step", "last"]
    lezo("export", *given, "--out", tmp_path / "exported")
    finished = lezo("fit-head", *given, "--out", tmp_path / "fitted")
    exported, fitted = (tensors_of(tmp_path / name) for name in ("exported", "fitted"))
    assert fitted.keys() == {*exported, "lm_head.weight"}
    assert all(torch.equal(fitted[name], tensor) for name, tensor in exported.items())
    assert "after 8 steps of training" in (tmp_path / "fitted" / "README.md").read_text()
    assert "digest" not in read_manifest(tmp_path / "fitted")

    (accuracy,) = re.findall(r"13 test examples: \S+ -> (\S+),", finished.out)
    changes = [f"model.path={tmp_path / 'fitted'}", "train.steps=2", "model.dtype=bf16"]
    train(recipe, tmp_path / "next", *changes, num_ranks=2)
    assert results_of(tmp_path / "next")["zero_shot"] == pytest.approx(float(accuracy), abs=1e-3)


def test_all_layouts_fit_the_same_head(recipe, tmp_path):
    fit(recipe, tmp_path / "one")
    fit(recipe, tmp_path / "two", num_ranks=2)
    fit(recipe, tmp_path / "whole", "partition_size=1", num_ranks=2)
    fit(recipe, tmp_path / "split", "tensor_parallel=2", num_ranks=2)
    names = ("one", "two", "whole", "split")
    one, two, whole, split = (tensors_of(tmp_path / name)["lm_head.weight"] for name in names)
    assert torch.equal(two, one)
    assert torch.equal(whole, one)
    torch.testing.assert_close(split, one, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("labels", ["the film, of Bob", "the film, the plot"])
def test_labels_of_several_tokens_are_answered_by_one(labels, tmp_path):
    model = write_chat_model(tmp_path / "base")
    recipe, tickets = tmp_path / "recipe.yaml", tmp_path / "tickets.jsonl"
    bug, billing = labels.split(", ")
    texts = ("it crashes", "the price is wrong")
    rows = [{"text": texts[n % 2], "topic": (bug, billing)[n % 2]} for n in range(60)]
    write_records(tickets, rows)
    data = {"train": str(tickets), "label_field": "topic", "labels": [bug, billing]}
    data |= {"prompt": "{text}\nThis is about", "num_test": 20, "chat_template": True}
    recipe.write_text(dump_yaml(own_values(model, **data)))
    fitted = fit(recipe, tmp_path / "fitted", model=model)
    assert "the model answers labels of several tokens by" in fitted.err
    lezo("predict", "--model", tmp_path / "fitted", tickets, "--out", tmp_path / "labels.jsonl")
    predicted = [row["predicted"] for row in read_lines(tmp_path / "labels.jsonl")]
    assert set(predicted) <= {bug, billing}
    right = [row["topic"] == label for row, label in zip(rows, predicted, strict=True)]
    assert sum(right) > 50


def test_a_lora_run_is_fitted_like_its_merged_model(recipe, tmp_path):
    changes = ["peft.kind=lora", "peft.lora_targets=q_proj,lm_head", "zo.learning_rate=1"]
    train(recipe, tmp_path / "run", *changes)
    run = ["--run", tmp_path / "run", "--step", "last"]
    lezo("export", *run, "--out", tmp_path / "merged", "--merge")
    fit(recipe, tmp_path / "of-merged", model=tmp_path / "merged")
    lezo("fit-head", *run, "--out", tmp_path / "of-run", num_ranks=2)
    places = (recipe.parent / "model", tmp_path / "of-merged", tmp_path / "of-run")
    base, expected, found = (Alone(place).model.state_dict() for place in places)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)
    changed = {name for name in base if not torch.equal(found[name], base[name])}
    assert changed == {name for name in base if "q_proj.weight" in name} | {"lm_head.weight"}


def test_a_run_with_a_prefix_is_refused(recipe, tmp_path):
    train(recipe, tmp_path / "run", "peft.kind=prefix", "train.steps=1")
    words = ["--run", tmp_path / "run", "--out", tmp_path / "fitted"]
    assert_refused("fit-head", words, "a prefix is not part", "by --model")


def test_where_no_head_can_be_fitted_or_stored_nothing_is_written(recipe, tmp_path):
    file, out = tmp_path / "both.jsonl", tmp_path / "fitted"
    write_records(file, [{"sentence": "a film", "label": label} for label in (0, 1)])
    # The validation example has the other label, so each fit has a higher loss on it.
    unlike = [*OWN, 'data.labels={"0": terrible, "1": great}', "data.path=null"]
    unlike += [f"data.train={file}", f"data.test={file}", "data.num_train=1", "data.num_dev=1"]
    unlike += ["data.num_test=2"]
    for target, keys, message in (
        (out, [*OWN, "data.choices=[link, other]"], "of kind multiple_choice"),
        (out, ["model.bits=8"], "model.bits=8 rounds"),
        (out, unlike, "no fit has a lower validation loss"),
        (tmp_path, [], "is not an empty directory"),
        (file / "fitted", [], "is below a file"),
        (".", [], "--out is the current folder"),
    ):
        assert_refused("fit-head", fit_words(recipe, target, *keys), message)
        assert not out.exists()


def test_models_whose_head_cannot_be_fitted_are_refused(tmp_path):
    recipe = write_family(tmp_path, "gemma2", final_logit_softcapping=1e-3)
    of_bytes = write_chat_model(tmp_path / "bytes")  # of which the task's labels have several
    words = fit_words(recipe, tmp_path / "fitted", model=of_bytes)
    assert_refused("fit-head", words, "labels that the model answers by one token each")
    words = fit_words(recipe, tmp_path / "fitted")
    assert_refused("fit-head", words, "Gemma2ForCausalLM are not the output of its head")
