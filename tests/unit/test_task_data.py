"""The data of a run, from its configuration to the micro-batches of a step."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
import yaml
from assets import write_records
from lezo_ds.tasks.base import EncodedExample, Example
from own_data import THINKING, WITHOUT_SYSTEM, conversation, own_values, write_chat_model
from tiny_tasks import task_config, write_tasks, write_writer

from lezo_ds.config import config_from_dict, load_config
from lezo_ds.data.batches import batch_indices
from lezo_ds.data.reader import EncodedSplit, warn_of_unlike_ends
from lezo_ds.data.rewards import reward
from lezo_ds.data.task_data import load_task_data
from lezo_ds.errors import UserError
from lezo_ds.zo.keys import sample_key


@reward
def num_words(answers, records):
    return [len(answer.split()) for answer in answers]


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    root = tmp_path_factory.mktemp("assets")
    write_writer(root / "writer")
    write_tasks(root / "data")
    return root


def config_of(assets, task, data="data", **changes):
    return task_config(assets / "writer", assets / data, task, **changes)


@pytest.mark.parametrize(
    ("prompts", "number"),
    [
        ([(*range(9), 9, 1), (*range(9), 8), (*range(9), 7)], 9),
        (
            [(*range(9), 9), tuple(range(9)), (*range(9), 9, 1)],
            8,
        ),  # a token of the shortest is left
        ([(*range(7), 9, 1), (*range(7), 8, 1)], 0),  # too few
    ],
)
def test_the_common_beginning_of_prompts_leaves_each_a_token(prompts, number):
    assert EncodedSplit((), (), tuple(prompts)).num_common == number


@pytest.mark.parametrize(("end", "is_named"), [((4, 4), False), ((44,), True), ((), False)])
def test_prompts_that_end_in_other_tokens_before_an_answer_are_named(end, is_named, caplog):
    encoded = EncodedExample(((5, 4, 4, 6),), (1,), 0, truncated=False)
    split = EncodedSplit((Example("", (), None),) * 3, (encoded,) * 3, ((5, *end),) * 3)
    warn_of_unlike_ends(split, room=4)
    assert ("3 of 3 prompts end in other tokens" in caplog.text) == is_named
    warn_of_unlike_ends(split, room=len(end))  # cut
    assert caplog.text.count("prompts end in") == is_named


def load(assets, task, data="data", **changes):
    return load_task_data(config_of(assets, task, data, **changes))


@pytest.mark.parametrize(
    ("changes", "is_once"),
    [
        ({}, True),
        ({"zo__examples_per_direction": 2}, True),
        ({"zo__examples_per_direction": 1}, False),
        ({"method": "adamw"}, True),
    ],
)
def test_what_examples_begin_with_is_once_in_a_row_if_no_examples_of_it_have_own_directions(
    assets, changes, is_once
):
    instructed = {
        "data__task": "custom",
        "data__prompt": "Is this a good film? {sentence}\n",
        "data__label_field": "label",
        "data__labels": {"0": "x", "1": "y"},
        "train__micro_batch_size": 2,
        "zo__noise_rank": 1,
    }
    data = load(assets, "sst2", **(instructed | changes))
    start = "Is this a good film? "
    assert data.train.num_start == 1 + len(start)
    tokens = data.training_batch([0, 1, 2, 3]).inputs["input_ids"]
    assert len(tokens) == 1
    assert text(data, tokens[0].tolist()).count(start) == (1 if is_once else 4)


def text(data, ids):
    assert ids[0] == 0
    return data.tokenizer.decode(ids[1:])


@pytest.mark.parametrize(("task", "changes"), [("cb", {}), ("squad", {"train__objective": "f1"})])
def test_the_examples_of_a_step_are_those_drawn_sorted_by_length_before_they_are_cut(
    assets, task, changes
):
    config = config_of(assets, task, **changes)
    data = load_task_data(config)
    train = data.train
    lengths_of = [len(ids) for ids in train.prompts] or [
        max(map(len, e.sequences)) for e in train.encoded
    ]
    for step in range(5):
        batch = list(data.step_batch(config, step))
        rows = [train.examples.index(example) for part in batch for example in part.examples]
        assert sorted(rows) == sorted(batch_indices(config.seed, step, len(train.examples), 4))
        lengths = [lengths_of[row] for row in rows]
        assert lengths == sorted(lengths)
        for part, longest in zip(batch, lengths[1::2], strict=True):
            reached = part.inputs["input_ids"].shape[1]
            if "position_ids" in part.inputs:  # sequences share rows
                reached = int(part.inputs["position_ids"].max()) + 1
            assert longest - 1 <= reached < longest + 8  # a multiple of 8


def test_training_shares_rows_and_deals_examples_unless_there_is_a_prefix(assets, tmp_path):
    records = [
        {"sentence": "so " * (1 + number % 4 * 4), "label": number % 2} for number in range(24)
    ]
    for split in ("train", "validation"):
        write_records(tmp_path / "sst2" / f"{split}.jsonl", records)

    def laid_out(micro_batch_size, **changes):
        sizes = {"train__micro_batch_size": micro_batch_size, "train__batch_size": 12}
        config = task_config(assets / "writer", tmp_path, "sst2", **sizes, **changes)
        batches = list(load_task_data(config).step_batch(config, 0))
        lengths = [sum(len(example.prompt) for example in batch.examples) for batch in batches]
        return max(lengths) / min(lengths), len(batches[0].inputs["input_ids"])

    assert laid_out(12)[1] < 18
    assert laid_out(12, peft__kind="prefix")[1] == 24
    assert laid_out(6)[0] < 1.2
    for by_length in (laid_out(6, peft__kind="prefix"), laid_out(3)):
        assert by_length[0] > 1.5


def test_prompts_are_encoded_for_the_splits_that_are_answered_only_and_leave_room(assets, caplog):
    squad = load(assets, "squad", data__max_length=80)
    assert [len(split.prompts) for split in (squad.train, squad.dev, squad.test)] == [0, 5, 7]
    assert max(map(len, squad.test.prompts)) == 80 - 50
    assert (
        "7 of 7 examples are longer than max_length 30 tokens and were cut on the left"
        in caplog.text
    )
    f1 = load(assets, "squad", train__objective="f1")
    assert [len(split.prompts) for split in (f1.train, f1.dev, f1.test)] == [12, 5, 7]
    assert [text(f1, ids) for ids in f1.test.prompts] == [
        example.prompt for example in f1.test.examples
    ]
    assert load(assets, "copa").test.prompts == ()


@pytest.mark.parametrize("protocol", ["clean", "mezo"])
def test_mezos_protocol_strips_texts_and_cuts_gold_answers_earlier(assets, tmp_path, protocol):
    record = {"premise": "\n\t\u00a0 \u3000It rains.", "hypothesis": "it is wet", "label": 0}
    for split in ("train", "validation"):
        write_records(tmp_path / "rte" / f"{split}.jsonl", [record] * 24)
    rte = load_task_data(task_config(assets / "writer", tmp_path, "rte", data__protocol=protocol))
    start = "It rains." if protocol == "mezo" else record["premise"]
    assert all(
        e.prompt.startswith(start)
        for split in (rte.train, rte.dev, rte.test)
        for e in split.examples
    )
    squad = load(assets, "squad", data__max_length=70, data__protocol=protocol)
    for split in (squad.train, squad.dev):
        assert {example.num_tokens for example in split.encoded} == {
            20 if protocol == "mezo" else 70
        }
    assert max(map(len, squad.test.prompts)) == 20
    copa = load(assets, "copa", data__max_length=40, data__protocol=protocol)
    assert max(example.num_tokens for example in copa.train.encoded) == 40
    assert squad.reader.loss_batch == (8 if protocol == "mezo" else None)


def test_a_reward_gets_prompts_and_texts_for_any_task(assets):
    sampled = {"generation__temperature": 1.0, "generation__num_samples": 2}
    config = config_of(assets, "cb", train__objective="test_task_data:num_words", **sampled)
    data = load_task_data(config)
    (batch, _) = data.step_batch(config, 0)
    rows = zip(batch.inputs["input_ids"], batch.inputs["attention_mask"].bool(), strict=True)
    assert [text(data, ids[mask].tolist()) for ids, mask in rows] == [
        e.prompt for e in batch.examples
    ]
    assert (len(batch.examples), len(set(batch.prompts.sample_keys.tolist()))) == (4, 4)
    assert batch.examples[0] == batch.examples[1]
    letter, space, end, newline = (data.tokenizer.encode([c])[0][-1] for c in "a b\n")
    tokens = torch.tensor([[letter, space, end, newline], [newline, letter, space, letter]])
    assert data.answers(tokens) == ["a b", ""]
    two = replace(batch, examples=batch.examples[:2])
    assert data.loss(tokens, two).tolist() == [-2.0, 0.0]


@pytest.mark.parametrize("micro_batch_size", [2, 4, 8])
def test_each_answer_of_a_step_has_its_own_key_though_prompts_repeat(assets, micro_batch_size):
    config = config_of(
        assets,
        "cb",
        train__objective="test_task_data:num_words",
        train__batch_size=8,
        train__micro_batch_size=micro_batch_size,
        generation__temperature=1.0,
        generation__num_samples=2,
        data__num_train=3,
    )
    data = load_task_data(config)
    batch = data.step_batch(config, 0)
    keys = [key for part in batch for key in part.prompts.sample_keys.tolist()]
    assert len(set(keys)) == len(keys) == 16
    # A batch that repeats nothing has the first keys of each prompt.
    first_of = [sample_key(config.seed, 0, e.index, 0) for e in data.train.examples]
    assert set(first_of) < set(keys)
    again = data.step_batch(config, 0)
    last = again[len(again) - 1]  # laid out alone, as by another rank
    assert last.prompts.sample_keys.tolist() == keys[-2 * micro_batch_size :]


def test_the_turns_of_one_conversation_are_answered_with_keys_of_their_own(tmp_path):
    model = write_chat_model(tmp_path / "model", THINKING)  # which changes earlier turns
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"turns": conversation(n)}) + "\n" for n in range(20)))
    values = own_values(model, train=str(path), messages="turns")
    values["train"] |= {"objective": "test_task_data:num_words", "batch_size": 24}
    values["generation"] = {"temperature": 1.0, "max_new_tokens": 4}
    config = config_from_dict({**values, "run_dir": "none"}, "test")
    data = load_task_data(config)
    assert len(data.train.examples) == 2 * len({e.index for e in data.train.examples})
    keys = [key for part in data.step_batch(config, 0) for key in part.prompts.sample_keys.tolist()]
    assert len(set(keys)) == len(keys) == 24


def test_a_reward_in_a_chat_gets_all_lines_of_an_answer(assets, tmp_path):
    model = write_chat_model(tmp_path / "model")
    path = tmp_path / "prompts.jsonl"
    write_records(path, [{"text": f"say {number}"} for number in range(9)])
    values = {"run_dir": "none", **own_values(model, train=str(path), prompt="{text}")}
    values["data"]["chat_template"] = True
    values["train"]["objective"] = "test_task_data:num_words"
    data = load_task_data(config_from_dict(values, "test"))
    answer = '{\n "city": "Oslo"\n}'
    (ids,) = data.tokenizer.backend([f"{answer}</s>\n<s>user"])["input_ids"]
    assert data.answers(torch.tensor([ids])) == [answer]


def test_a_gold_answer_ends_with_what_ends_generated_ones(assets):
    for stop, ending in ((None, "\n"), ([";", "."], ";"), ([], "</s>")):
        data = load(assets, "squad", generation__stop=stop)
        assert all(e.candidates[0].endswith(ending) for e in data.train.examples)


def test_right_answers_that_no_answer_can_equal_are_counted(assets, tmp_path, caplog):
    texts = ["Rome", "Rome\nOslo", "the end " * 12]
    rows = [{"q": f"question {row}", "a": texts[row % 3]} for row in range(30)]
    write_records(tmp_path / "t.jsonl", rows)
    keys = {"train": str(tmp_path / "t.jsonl"), "prompt": "{q}", "completion": "{a}"}
    values = {**own_values(assets / "writer", **keys), "run_dir": "none"}
    load_task_data(config_from_dict(values, "test", ["data.test=" + keys["train"]]))
    stopped, long = [each for each in caplog.messages if "no answer can equal" in each]
    assert stopped.startswith("10 of 30 right answers to score have several lines")
    assert stopped.endswith(
        "('\\n'): no answer can equal them; to end answers at the end of the "
        "sequence, set generation.stop=[]"
    )
    assert long.startswith("10 of 30 right answers to score have more than generation.max_new_")
    caplog.clear()
    keys = ["data.test=" + keys["train"], "generation.stop=[]", "generation.max_new_tokens=200"]
    load_task_data(config_from_dict(values, "test", keys))
    assert "no answer can equal" not in caplog.text


def test_a_fingerprint_depends_on_tokens_and_on_records_that_the_objective_reads(assets, tmp_path):
    records = [{"sentence": f"It is {number}", "label": 0, "stars": 1} for number in range(24)]
    prints = []
    for stars in (1, 2):
        for split in ("train", "validation"):
            rows = [record | {"stars": stars} for record in records]
            write_records(tmp_path / "sst2" / f"{split}.jsonl", rows)
        for objective in ("task", "test_task_data:num_words"):
            config = task_config(assets / "writer", tmp_path, "sst2", train__objective=objective)
            prints.append(load_task_data(config).dev.fingerprint())
    assert prints[0] == prints[2]
    assert prints[1] != prints[3]


def test_chats_of_all_layouts_are_taken_and_unusable_ones_are_refused_together_or_left_out(
    tmp_path, caplog
):
    model = write_chat_model(tmp_path / "model")
    asked, answer = {"role": "user", "content": "Où?"}, {"role": "assistant", "content": "Là-bas."}
    good = [
        [
            {"from": "system", "value": "x"},
            {"from": "human", "value": "Où?"},
            {"from": "gpt", "value": "Là"},
        ],
        [asked, {**answer, "weight": 0}, {"role": "function", "content": None}, answer],
        [{**asked, "role": "developer"}, {**answer, "weight": 1}],
        *map(conversation, range(20)),
    ]
    call = {"name": "f", "arguments": "{}"}
    bad = [
        [{**asked, "content": None}, answer],
        [asked, {**answer, "weight": 0.5}],
        [answer, asked],
        [asked, {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}],
        [{**asked, "content": [{"type": "image_url"}]}, answer],
    ]
    untrained = [[asked, {**answer, "weight": 0}]]
    path = tmp_path / "chats.jsonl"
    path.write_text(
        "".join(json.dumps({"turns": turns}) + "\n" for turns in [*good, *bad, *untrained]) + "{"
    )
    values = {"run_dir": "none", **own_values(model, train=str(path), messages="turns")}
    with pytest.raises(UserError, match="4 records cannot be used: record 24 of") as error:
        load_task_data(config_from_dict(values, "test"))
    message = str(error.value)
    assert "content of turn 1 of field turns is null, not text" in message
    assert "and 1 more; fix: write a text under its key content, or remove the record, " in message
    assert "or leave out such records: data.skip" in message
    data = load_task_data(
        config_from_dict(values, "test", ["data.skip_unusable=true", "data.splits=random"])
    )
    splits = (data.train, data.dev, data.test)
    assert (
        sum(len(split.examples) for split in splits)
        == sum(len(split.encoded) for split in splits)
        == 23
    )
    assert "left out: 4 records cannot be used" in caplog.text
    assert (
        "left out: 2 records cannot be used: the chat template does not write turn 2" in caplog.text
    )
    by_line = {example.where: example.messages for split in splits for example in split.examples}
    name = "record {1} of the train split of custom ({0} line {1})"
    roles = [[turn.role for turn in by_line[name.format(path, line)]] for line in (1, 2, 3)]
    assert roles[0] == ["system", "user", "assistant"] and roles[2] == ["developer", "assistant"]
    assert roles[1] == ["user", "assistant", "tool", "assistant"]


def test_bad_records_of_all_splits_are_named_at_once_as_they_are_counted_in_their_files(tmp_path):
    model = write_chat_model(tmp_path / "model", WITHOUT_SYSTEM)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    system = {"role": "system", "content": "c"}
    unanswered = {"turns": [{"role": "user", "content": "a"}]}
    rows = [unanswered, *({"turns": turns} for _ in range(20))]

    def refusal(bad):
        values = {"run_dir": "none", **own_values(model, messages="turns")}
        for split in ("train", "validation", "test"):
            path = tmp_path / f"{split}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, bad]))
            values["data"][split] = str(path)
        with pytest.raises(UserError, match="1 record cannot be used: ") as error:
            load_task_data(config_from_dict(values, "test"))
        return str(error.value)

    for bad in ({"turns": "x"}, {"turns": [system, *turns]}):
        message = refusal(bad)
        for split in ("train", "validation", "test"):
            where = f"record 22 of the {split} split of custom ({tmp_path}/{split}.jsonl line 22)"
            assert where in message


DECORATED = "from lezo_ds import reward\n@reward\ndef judge(answers, records):\n    return"
UNDECORATED = "def judge(answers, records): return [1.0] * len(answers)"
BAD_REWARDS = {
    "import no_such_module": "No module named 'no_such_module'",
    "def judge(": "SyntaxError",
    "judge = 1": "TypeError: 1 is not callable",
    UNDECORATED: "needs a reward, not train.objective=",
    DECORATED.replace(", records", "")
    + " [1.0]": "takes 1 positional argument but 2 were given; fix",
    f"{DECORATED} None": "returned None, not one finite reward per answer",
    f"{DECORATED} [float('nan')] * len(answers)": "returned .nan, nan, nan, nan., not one finite",
    f"{DECORATED} [1 / 10**-400 for _ in answers]": r"ZeroDivisionError: .*\(.*own_0.py line 4\)",
    f"{DECORATED} [1e999 for _ in answers]": "returned .inf, inf",
    f"{DECORATED} [1.0]": "returned .1.0., not one finite reward per answer",
    f"{DECORATED} 'good'": "returned good, not one finite",
}


@pytest.mark.parametrize(("number", "code"), [*enumerate(BAD_REWARDS)])
def test_a_bad_reward_beside_the_recipe_is_found_before_weights_are_read(
    number, code, assets, tmp_path
):
    name = f"own_{number}"  # a module is imported once
    (tmp_path / f"{name}.py").write_text(code)
    write_records(tmp_path / "prompts.jsonl", [{"text": f"say {n}"} for n in range(9)])
    values = {"run_dir": "none", "model": {"path": str(assets / "writer"), "dtype": "fp32"}}
    values |= {"data": {"train": "prompts.jsonl", "prompt": "{text}"}}
    values |= {"zo": {"learning_rate": 1.0, "sparsity": 0.5}}
    values |= {"train": {"steps": 1, "objective": f"{name}:judge"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match=BAD_REWARDS[code].replace("own_0", name)) as error:
        load_task_data(load_config(tmp_path / "recipe.yaml"))
    assert "\n" not in str(error.value)
    assert str(tmp_path) not in sys.path


def test_a_reward_without_its_mark_is_found_before_weights_are_read_also_beside_labels(
    assets, tmp_path, monkeypatch
):
    (tmp_path / "unmarked.py").write_text(UNDECORATED)
    monkeypatch.syspath_prepend(tmp_path)
    config = config_of(assets, "sst2")
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"objective": "unmarked:judge"})}
    )
    message = "not one loss per example; fix: .*put @lezo_ds.reward before a function that judges"
    with pytest.raises(UserError, match=message):
        load_task_data(config)
