"""The eleven tasks against their protocol: texts, tokens and losses of one sequence at a time."""

import re
from datetime import datetime

import pytest
import torch
from golden_tasks import GOLDEN
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

from lezo_ds.data.encode import PromptTokenizer, encode_candidates
from lezo_ds.data.examples import Example
from lezo_ds.data.mezo import TASKS
from lezo_ds.data.objectives import training_objective

BOS, PAD, EOS = 0, 1, 2
MAX_LENGTH = 400
# How GPT-2, and so OPT, cuts text before it merges anything; here what it cuts is a token.
PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
TEXTS = [(each.prompt + candidate).strip(" ") for each in GOLDEN for candidate in each.candidates]
PIECES = {piece for text in (*TEXTS, "Rain\n\n") for piece in re.findall(PATTERN, text)}
VOCABULARY = ["<s>", "<pad>", "</s>", "<unk>", *sorted(PIECES)]


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.task)
def test_a_record_becomes_the_text_of_the_protocol(golden):
    made = golden.prompt, golden.candidates, golden.label
    found = TASKS.find(golden.task.upper()).example(golden.record)
    assert found == Example(*made, references=golden.references)


def test_every_task_has_goldens_and_a_record_without_a_right_answer_has_no_label():
    names = [golden.task for golden in GOLDEN]
    assert {name: names.count(name) >= 2 for name in names} == dict.fromkeys(TASKS, True)
    record = {"passage": "", "query": "", "entities": ["Rome"], "answers": ["Oslo", "Rome"]}
    assert TASKS["record"].example(record).label is None
    record = {"passage": "", "question": "", "answers_spans": {"spans": []}}
    assert TASKS["drop"].example(record).label is None


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(VOCABULARY)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    words.decoder = decoders.Fuse()
    backend = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    return PromptTokenizer(backend, (BOS,), PAD, (EOS,), datetime.now())


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32, "num_hidden_layers": 2}
    config = OPTConfig(vocab_size=len(VOCABULARY), **sizes, num_attention_heads=2, init_std=0.4)
    return OPTForCausalLM(config).eval()


def ids_of(text):
    """BOS and the tokens of a text, worked out without the tokenizer."""
    return (BOS, *(VOCABULARY.index(piece) for piece in re.findall(PATTERN, text)))


def golden_of(task):
    return [golden for golden in GOLDEN if golden.task == task.name]


def sequences(golden):
    texts = [golden.prompt + candidate for candidate in golden.candidates]
    return tuple(ids_of(text.strip(" ")) for text in texts)


def log_probabilities(model, golden):
    """Return those of the tokens of each candidate."""
    logs = []
    for ids in sequences(golden):
        rows = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        first = len(ids_of(golden.prompt.strip(" ")))
        logs.append(torch.stack([rows[place - 1, ids[place]] for place in range(first, len(ids))]))
    return logs


def protocol_loss(model, task):
    """The training loss of a batch of all golden records, as the protocol words it."""
    pairs = [(log_probabilities(model, golden), golden.label) for golden in golden_of(task)]
    if task.kind != "classification":
        return -torch.cat([logs[label] for logs, label in pairs]).mean()
    means = [(torch.stack([log.mean() for log in logs]), label) for logs, label in pairs]
    return -torch.stack([each.log_softmax(0)[label] for each, label in means]).mean()


@torch.inference_mode()
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_the_training_loss_is_the_protocols(tokenizer, model, task):
    objective = training_objective(task)
    examples = [task.example(golden.record) for golden in golden_of(task)]
    encoded = [encode_candidates(tokenizer, example, MAX_LENGTH) for example in examples]
    batch = objective.build_batch(encoded, PAD)
    logits = model(**batch.inputs).logits[batch.selection.rows, batch.selection.positions]
    if batch.selection.vocabulary is not None:
        logits = logits[:, batch.selection.vocabulary]
    loss = objective.loss(logits, batch).sum() / batch.weight
    assert loss.item() == pytest.approx(protocol_loss(model, task).item(), abs=1e-5)
