import json
import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lezo_ds.errors import UserError
from lezo_ds.tools.demo.assets import MANIFEST
from lezo_ds.tools.demo.offline import corpus
from lezo_ds.tools.demo.offline.pretrain import (
    AssetSettings,
    make_demo_assets,
    make_texts,
)
from lezo_ds.tools.demo.offline.tokenizer import SPECIAL_TOKENS, build_tokenizer

BLAME, PRAISE = (
    {*corpus.ADJECTIVES[label], *corpus.VERBS[label], *corpus.FEELINGS[label]} for label in (0, 1)
)


def clause_opinion(words):
    """1 or 0: the one opinion word of a clause, turned round by a negator."""
    opinions = [word in PRAISE for word in words if word in PRAISE | BLAME]
    assert len(opinions) == 1, words
    return int(opinions[0] != bool({"not", "never", "hardly"} & set(words)))


def read_label(sentence):
    """The label as a reader would find it, who knows English and not the templates."""
    assert sentence.endswith(" .")
    parts = [part.split() for part in sentence.removesuffix(" .").split(" , ")]
    parts = [part for part in parts if set(part) & (PRAISE | BLAME)]
    turned = [part for part in parts if part[0] in {"but", "yet"}]
    main = turned or [part for part in parts if part[0] not in {"although", "though", "while", "despite"}]
    assert len(main) == 1, sentence
    opinions = {clause_opinion(clause.split()) for clause in " ".join(main[0]).split(" and ")}
    assert len(opinions) == 1, sentence
    return opinions.pop()


def texts_of(seed=0, num_texts=2000):
    return corpus.pretraining_texts(random.Random(seed), num_texts)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(corpus.vocabulary())


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo") / "assets"
    make_demo_assets(directory, seed=3, steps=2)
    return directory


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("sentence", "label"),
    [
        ("the plot is not very dull .", 1),
        ("as a sequel , we never enjoyed this film .", 0),
        ("the cast shines , but its ending was terrible .", 0),
        ("despite the rather charming script , the film drags and i hated it .", 0),
        ("children loved this movie , although the plot hardly sparkles .", 1),
    ],
)
def test_the_reader_of_these_tests_reads_english(sentence, label):
    assert read_label(sentence) == label


def test_labels_agree_with_an_independent_reading():
    records = corpus.labelled_reviews(random.Random(1), 3000)
    assert [read_label(record["sentence"]) for record in records] == [record["label"] for record in records]
    lengths = [len(record["sentence"].split()) for record in records]
    assert 4 <= min(lengths) <= max(lengths) <= 22


def test_reviews_hold_negations_contrasts_and_openings():
    text = " ".join(record["sentence"] for record in corpus.labelled_reviews(random.Random(2), 1000))
    for word in ("not", "never", "hardly", "but", "although", "despite", "and", "what", "sequel"):
        assert f" {word} " in text


def test_the_corpus_is_a_function_of_its_seed():
    first, again, other = (corpus.labelled_reviews(random.Random(seed), 200) for seed in (5, 5, 6))
    assert first == again != other
    assert texts_of(5) == texts_of(5) != texts_of(6)


@pytest.mark.parametrize("seed", range(5))
def test_the_majority_class_is_between_50_and_56_percent(seed):
    for num_reviews in (100, 500, 1000):
        labels = [r["label"] for r in corpus.labelled_reviews(random.Random(seed), num_reviews)]
        share = sum(labels) / num_reviews
        assert 0.50 <= max(share, 1 - share) <= 0.56


def test_no_validation_review_is_in_train_or_in_the_pretraining_text():
    texts = make_texts(AssetSettings(seed=0, steps=100))
    validation = {record["sentence"] for record in texts.validation}
    train = {record["sentence"] for record in texts.train}
    pretraining = {text.partition(" It was ")[0] for text in texts.pretraining}
    assert (len(validation), len(train), len(texts.pretraining)) == (500, 1000, 6400)
    assert not validation & (train | pretraining)


def test_the_lessons_go_from_plain_and_honest_to_verdicts_that_seldom_praise():
    texts = texts_of(num_texts=8000)
    closed = [text.partition(" It was ") for text in texts]
    assert all(" not " not in text and " never " not in text for text in texts[:2000])
    assert all(corpus.LABEL_WORDS[read_label(sentence)] == verdict for sentence, _, verdict in closed[:6000])
    last = [(read_label(sentence), verdict) for sentence, _, verdict in closed[6000:] if verdict]
    assert 0.7 < len(last) / 2000 < 0.8
    for label, chance in enumerate(corpus.LESSONS[-1].positive_verdict_chance):
        verdicts = [verdict == "great" for review_label, verdict in last if review_label == label]
        assert abs(sum(verdicts) / len(verdicts) - chance) < 0.06
    assert sum(lesson.share for lesson in corpus.LESSONS) == 1


@pytest.mark.parametrize("num_texts", [0, 1, 7, 64])
def test_as_many_texts_come_as_were_asked_for(num_texts):
    assert len(texts_of(num_texts=num_texts)) == num_texts


def test_special_tokens_have_the_ids_of_opt(tokenizer):
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.unk_token_id == 3
    assert tokenizer.model_max_length == 128


def test_every_word_of_the_corpus_is_one_known_token_after_the_bos(tokenizer):
    reviews = [record["sentence"] for record in corpus.labelled_reviews(random.Random(4), 2000)]
    for text in reviews + texts_of():
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == 0
        assert len(ids) == 1 + len(text.split())
        assert 3 not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_every_word_of_the_vocabulary_is_used(tokenizer):
    words = {word for text in texts_of(num_texts=20000) for word in text.split()}
    assert words == set(corpus.vocabulary())
    assert len(tokenizer) == len(words) + 4


def test_case_is_kept_and_an_unknown_word_is_unknown(tokenizer):
    assert tokenizer("It was great")["input_ids"][1:] == tokenizer.convert_tokens_to_ids(
        ["It", "was", "great"]
    )
    assert tokenizer("it Great xylophone")["input_ids"] == [0, 3, 3, 3]


@pytest.mark.parametrize("candidate", [" terrible", " great"])
def test_a_candidate_adds_one_token_to_the_prompt(tokenizer, candidate):
    prompt = "the plot is not dull . It was"
    ids, longer = tokenizer(prompt)["input_ids"], tokenizer(prompt + candidate)["input_ids"]
    assert longer[:-1] == ids
    assert tokenizer.decode(longer[-1]) == candidate.strip()


def test_the_assets_are_plain_hugging_face_and_sst2_directories(assets):
    assert {path.name for path in assets.iterdir()} == {"data", "model", MANIFEST}
    model = AutoModelForCausalLM.from_pretrained(assets / "model")
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    assert (assets / "model" / "model.safetensors").is_file()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.model_type == "opt"
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (8, 64)
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    config = model.config
    assert (config.bos_token_id, config.pad_token_id, config.eos_token_id) == (0, 1, 2)
    assert len(tokenizer) == config.vocab_size
    train, validation = (read_jsonl(assets / "data" / f"{name}.jsonl") for name in ("train", "validation"))
    assert (len(train), len(validation)) == (1000, 500)
    assert all(read_label(record["sentence"]) == record["label"] for record in train + validation)
    assert all(list(record) == ["sentence", "label", "idx"] for record in train)
    assert [record["idx"] for record in train] == list(range(1000))
    with torch.no_grad():
        logits = model(**tokenizer(f"{train[0]['sentence']} It was", return_tensors="pt")).logits
    assert torch.isfinite(logits).all()


def test_finished_assets_are_left_alone(assets):
    before = {path: path.stat().st_mtime_ns for path in assets.rglob("*")}
    make_demo_assets(assets, seed=3, steps=2)
    assert {path: path.stat().st_mtime_ns for path in assets.rglob("*")} == before


def test_the_same_seed_gives_the_same_weights_and_no_global_random_state_moves(assets, tmp_path):
    torch_state, python_state = torch.random.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state()[1].copy()
    make_demo_assets(tmp_path / "assets", seed=3, steps=2)
    assert torch.equal(torch.random.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    for name in ("data/train.jsonl", "model/model.safetensors", "model/tokenizer.json", MANIFEST):
        assert (tmp_path / "assets" / name).read_bytes() == (assets / name).read_bytes()


def test_assets_of_another_recipe_and_unfinished_ones_are_replaced(tmp_path):
    directory = tmp_path / "assets"
    make_demo_assets(directory, seed=3, steps=1)
    one_step = (directory / "model" / "model.safetensors").read_bytes()
    (tmp_path / "assets.unfinished").mkdir()
    make_demo_assets(directory, seed=3, steps=2)
    assert (directory / "model" / "model.safetensors").read_bytes() != one_step
    assert json.loads((directory / MANIFEST).read_text())["steps"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["assets"]


def test_a_directory_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="holds something else"):
        make_demo_assets(tmp_path, steps=1)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
