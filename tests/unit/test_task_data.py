"""The data of a run, from its configuration to the micro-batches of a step."""

from dataclasses import replace

import pytest
import torch
import yaml
from assets import write_records
from own_data import MARKED, THINKING, conversation, load_own, own_config, write_chat_model
from tiny_tasks import task_config, write_tasks, write_writer

from lezo_ds.config import load_config
from lezo_ds.data.batches import batch_indices
from lezo_ds.data.dataset import Examples
from lezo_ds.data.rewards import reward
from lezo_ds.data.task_data import load_task_data
from lezo_ds.errors import UserError
from lezo_ds.zo.keys import sample_key

JUDGED = "test_task_data:num_words"
SAMPLED = {"train__objective": JUDGED, "generation__temperature": 1.0}
SAMPLED |= {"generation__num_samples": 2}


@reward
def num_words(answers, records):
    return [len(answer.split()) for answer in answers]


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    root = tmp_path_factory.mktemp("assets")
    write_writer(root / "writer")
    write_tasks(root / "data")
    return root


def config_of(assets, task, **changes):
    return task_config(assets / "writer", assets / "data", task, **changes)


def load(assets, task, **changes):
    return load_task_data(config_of(assets, task, **changes))


def text(data, ids):
    assert ids[0] == 0
    return data.reader.tokenizer.decode(ids[1:])


def keys_of(batch):
    return [key for part in batch for key in part.prompts.sample_keys.tolist()]


@pytest.mark.parametrize(("size", "is_once"), [(None, True), (2, True), (1, False)])
def test_what_examples_begin_with_is_once_in_a_row_if_they_share_directions(assets, size, is_once):
    start = "Is this a good film? "
    keys = {"task": "custom", "prompt": start + "{sentence}\n", "label_field": "label"}
    keys = {f"data__{name}": value for name, value in keys.items()}
    keys |= {"data__labels": {"0": "x", "1": "y"}, "zo__noise_rank": 1}
    data = load(assets, "sst2", **keys, zo__examples_per_direction=size)
    assert data.train.num_start == 1 + len(start)
    tokens = data.training_batch([0, 1, 2, 3]).inputs["input_ids"]
    assert len(tokens) == 1
    assert text(data, tokens[0].tolist()).count(start) == (1 if is_once else 4)


@pytest.mark.parametrize(("task", "changes"), [("cb", {}), ("squad", {"train__objective": "f1"})])
def test_the_examples_of_a_step_are_sorted_by_length_before_they_are_cut(assets, task, changes):
    config = config_of(assets, task, **changes)
    data = load_task_data(config)
    train = data.train
    examples = list(train.examples)
    lengths_of = list(map(len, train.prompts)) if changes else train.lengths.tolist()
    for step in range(5):
        batch = list(data.step_batch(config, step))
        drawn = batch_indices(config.seed, step, len(train), 4)
        if changes:
            rows = [examples.index(example) for part in batch for example in part.examples]
            assert sorted(rows) == sorted(drawn)
        lengths = sorted(lengths_of[row] for row in drawn)
        for part, longest in zip(batch, lengths[1::2], strict=True):
            reached = part.inputs["input_ids"].shape[1]
            if "position_ids" in part.inputs:  # sequences share rows
                reached = int(part.inputs["position_ids"].max()) + 1
            assert longest - 1 <= reached < longest + 8  # a multiple of 8


def test_training_shares_rows_and_deals_examples_unless_there_is_a_prefix(assets, tmp_path):
    records = [{"sentence": "so " * (1 + n % 4 * 4), "label": n % 2} for n in range(24)]
    for split in ("train", "validation"):
        write_records(tmp_path / "sst2" / f"{split}.jsonl", records)

    def laid_out(micro_batch_size, **changes):
        sizes = {"train__micro_batch_size": micro_batch_size, "train__batch_size": 12}
        config = task_config(assets / "writer", tmp_path, "sst2", **sizes, **changes)
        data = load_task_data(config)
        batches = list(data.step_batch(config, 0))
        return len(batches[0].inputs["input_ids"]), data.packed

    assert laid_out(12)[0] < 18
    assert laid_out(12, peft__kind="prefix") == (24, False)


def test_prompts_are_encoded_for_the_splits_that_are_answered_only_and_leave_room(assets, caplog):
    squad = load(assets, "squad", data__max_length=80)
    assert [split.longest_prompt for split in (squad.train, squad.dev, squad.test)] == [0, 30, 30]
    longest = max(load(assets, "squad").test.lengths.tolist())
    caplog.clear()
    squad = load(assets, "squad", data__max_length=longest)  # which all texts and answers fit
    assert f"{len(squad.test)} of {len(squad.test)} examples are cut: with an answer" in caplog.text
    f1 = load(assets, "squad", train__objective="f1")
    assert min(map(len, f1.train.prompts)) > 0
    assert [text(f1, ids) for ids in f1.test.prompts] == [e.prompt for e in f1.test.examples]
    assert load(assets, "copa").test.longest_prompt == 0


@pytest.mark.parametrize("protocol", ["clean", "mezo"])
def test_mezos_protocol_strips_texts_and_cuts_answers_earlier(assets, tmp_path, protocol, caplog):
    record = {"premise": "\n\t\u00a0 \u3000It rains.", "hypothesis": "it is wet", "label": 0}
    for split in ("train", "validation"):
        write_records(tmp_path / "rte" / f"{split}.jsonl", [record] * 24)
    rte = load_task_data(task_config(assets / "writer", tmp_path, "rte", data__protocol=protocol))
    start = "It rains." if protocol == "mezo" else "\n"
    for split in (rte.train, rte.dev, rte.test):
        assert all(text(rte, ids).startswith(start) for e in split.encoded for ids in e.sequences)
    squad = load(assets, "squad", data__max_length=70, data__protocol=protocol)
    for split in (squad.train, squad.dev):
        assert set(split.lengths.tolist()) == {20 if protocol == "mezo" else 70}
    assert "7 of 7 examples are cut" in caplog.text
    copa = load(assets, "copa", data__max_length=40, data__protocol=protocol)
    assert copa.train.lengths.max() == 40


def test_a_reward_gets_prompts_and_texts_for_any_task(assets):
    config = config_of(assets, "cb", **SAMPLED)
    data = load_task_data(config)
    (batch, _) = data.step_batch(config, 0)
    rows = zip(batch.inputs["input_ids"], batch.inputs["attention_mask"].bool(), strict=True)
    asked = [text(data, ids[mask].tolist()) for ids, mask in rows]
    assert asked == [example.prompt for example in batch.examples]
    assert (len(batch.examples), len(set(batch.prompts.sample_keys.tolist()))) == (4, 4)
    assert batch.examples[0] == batch.examples[1]
    letter, space, end, newline = (data.reader.tokenizer.encode([c])[0][-1] for c in "a b\n")
    tokens = torch.tensor([[letter, space, end, newline], [newline, letter, space, letter]])
    assert data.reader.answers(tokens) == ["a b", ""]
    two = replace(batch, examples=batch.examples[:2])
    assert data.loss(tokens, two).tolist() == [-2.0, 0.0]


@pytest.mark.parametrize("micro_batch_size", [2, 8])
def test_each_answer_of_a_step_has_its_own_key_though_prompts_repeat(assets, micro_batch_size):
    sizes = {"train__batch_size": 8, "train__micro_batch_size": micro_batch_size}
    config = config_of(assets, "cb", **SAMPLED, **sizes, data__num_train=3)
    data = load_task_data(config)
    keys = keys_of(data.step_batch(config, 0))
    assert len(set(keys)) == len(keys) == 16
    # A batch that repeats nothing has the first keys of each prompt.
    first_of = [sample_key(config.seed, 0, e.index, 0) for e in data.train.examples]
    assert set(first_of) < set(keys)
    again = data.step_batch(config, 0)
    last = again[len(again) - 1]  # laid out alone, as by another rank
    assert last.prompts.sample_keys.tolist() == keys[-2 * micro_batch_size :]


@pytest.mark.parametrize("template", [THINKING, MARKED])
def test_the_turns_of_one_conversation_are_answered_with_keys_of_their_own(template, tmp_path):
    model = write_chat_model(tmp_path / "model", template)
    path = tmp_path / "chats.jsonl"
    write_records(path, [{"turns": conversation(number)} for number in range(20)])
    words = [f"train.objective={JUDGED}", "train.batch_size=24", "generation.temperature=1.0"]
    config = own_config(model, path, *words, "generation.max_new_tokens=4", messages="turns")
    data = load_task_data(config)
    assert len(data.train) == 24 == 2 * len(set(data.train.index.tolist()))
    assert len(set(keys_of(data.step_batch(config, 0)))) == 24
    for prompt, example in zip(data.train.prompts, data.train.examples, strict=True):
        asked = data.reader.tokenizer.backend.decode(list(prompt))
        assert asked.endswith(f"{example.prompt}</s>\n<s>assistant\n")


@pytest.mark.parametrize(
    ("stop", "ending"), [(None, "\n"), ([";", "."], "</s>"), ([";"], ";"), ([], "</s>")]
)
def test_a_gold_answer_ends_with_what_ends_generated_ones(assets, stop, ending):
    data = load(assets, "squad", generation__stop=stop)
    backend = data.reader.tokenizer.backend
    for encoded in data.train.encoded:
        (ids,) = encoded.sequences
        assert backend.convert_ids_to_tokens(ids[-1]) == ending
        assert encoded.masks[0][-1]


def test_right_answers_that_no_answer_can_equal_are_counted(assets, tmp_path, caplog):
    texts = ["Rome", "Rome\nOslo", "the end " * 12]
    path = tmp_path / "t.jsonl"
    write_records(path, [{"q": f"question {row}", "a": texts[row % 3]} for row in range(30)])
    keys = {"prompt": "{q}", "completion": "{a}", "test": str(path)}
    load_own(assets / "writer", path, **keys)
    assert "no answer can equal 20 of 30 right answers to score" in caplog.text
    caplog.clear()
    words = ["generation.stop=[]", "generation.max_new_tokens=200"]
    load_own(assets / "writer", path, *words, **keys)
    assert "no answer can equal" not in caplog.text


def test_a_fingerprint_depends_on_tokens_and_on_records_that_the_objective_reads(assets, tmp_path):
    prints = []
    for stars in (1, 2):
        rows = [{"sentence": f"It is {n}", "label": 0, "stars": stars} for n in range(24)]
        for split in ("train", "validation"):
            write_records(tmp_path / "sst2" / f"{split}.jsonl", rows)
        for objective in ("task", JUDGED):
            config = task_config(assets / "writer", tmp_path, "sst2", train__objective=objective)
            prints.append(load_task_data(config).dev.fingerprint())
    assert prints[0] == prints[2]
    assert prints[1] != prints[3]


def test_a_split_with_a_file_of_its_own_is_read_alone(assets, tmp_path):
    path = tmp_path / "test.jsonl"
    write_records(path, [{"q": "a", "y": "x"}, {"q": "b", "y": "y"}])
    keys = {"prompt": "{q}", "label_field": "y", "labels": ["x", "y"], "test": str(path)}
    examples = Examples(own_config(assets / "writer", tmp_path / "none.jsonl", **keys), "test")
    assert sorted(e.prompt for e in examples.split("test").examples) == ["a", "b"]
    # Solved examples are those of data.train.
    keys["num_demonstrations"] = 1
    examples = Examples(own_config(assets / "writer", path, **keys), "test")
    assert all(example.demonstrations for example in examples.split("test").examples)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.num_demonstrations=1"], "is for lezo-ds evaluate, and for a task"),
        (["data.prompt=<s>{q}"], "data.prompt begins with <s>, and the tokenizer already puts <s>"),
        (["data.max_length=9000"], "tokens, and the model has 256 positions; fix: set data.max_l"),
        (["data.metric=reward"], "data.metric=reward needs a reward, not train.objective=task"),
        (["train.objective=f1"], "train.objective=f1 needs a task that generates answers"),
        (["train.objective=assets:write_records"], "failed: |not one loss per example"),
    ],
)
def test_a_recipe_that_does_not_fit_its_data_is_refused(words, message, assets, tmp_path):
    path = tmp_path / "t.jsonl"
    write_records(path, [{"q": f"{n} " * 200, "y": "xy"[n % 2]} for n in range(9)])
    keys = {"prompt": "{q}", "label_field": "y", "labels": ["x", "y"]}
    with pytest.raises(UserError, match=message):
        load_own(assets / "writer", path, *words, **keys)


DECORATED = "from lezo_ds import reward\n@reward\ndef judge(answers, records):\n    return"
BAD_REWARDS = {
    "def judge(answers, records): return [1.0] * len(answers)": "needs a reward, not train.obj",
    DECORATED.replace(", records", "") + " [1.0]": "takes 1 positional argument but 2 were given",
    f"{DECORATED} [1 / 10**-400 for _ in answers]": r"ZeroDivisionError: .*\(.*bad.py line 4\)",
}


@pytest.mark.parametrize("code", BAD_REWARDS)
def test_a_bad_reward_is_found_before_weights_are_read(code, assets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")  # a process keeps the module of a folder
    (folder / "bad.py").write_text(code)
    write_records(folder / "prompts.jsonl", [{"text": f"say {n}"} for n in range(9)])
    values = {"run_dir": "none", "model": {"path": str(assets / "writer"), "dtype": "fp32"}}
    values |= {"data": {"train": "prompts.jsonl", "prompt": "{text}"}}
    values |= {"train": {"steps": 1, "objective": "bad:judge"}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match=BAD_REWARDS[code]) as error:
        load_task_data(load_config(folder / "recipe.yaml"))
    assert "\n" not in str(error.value)
