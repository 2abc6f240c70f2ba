"""Bad input: one line that says what, got, expected and fix; exit code 2, under every launcher.

The model that most of these tests name has no weights: a check that came only after loading them would be
beaten by "holds no weights".
"""

from __future__ import annotations

import json
import shutil

import pytest
from assets import NUM_BLOCKS, NUM_POSITIONS, write_reader, write_recipe_without_weights, write_records
from commands import assert_one_error, assert_refused, deepspeed, mpirun, python, run_forked, run_forked_well
from tiny_tasks import NUM_POSITIONS as NUM_WRITER_POSITIONS
from tiny_tasks import write_writer
from transformers import AutoTokenizer

GOOD = [{"sentence": "a great film .", "label": i % 2, "idx": i} for i in range(60)]
UNLABELLED = [record | {"label": -1} for record in GOOD]
EMPTY_CHOICE = {"premise": "It fell.", "choice1": "It hung.", "choice2": " ", "question": "cause", "label": 0}
QUESTION = {"title": "Rome", "context": "Ada ate bread.", "question": "Who ate?"}
ANSWERED = [QUESTION | {"answers": {"text": ["Ada"]}}] * 60
UNANSWERED = [QUESTION | {"answers": {"text": []}}] * 60
LONG = [{"sentence": "great " * 100, "label": i % 2, "idx": i} for i in range(60)]
DEEPSPEED_JSON = {
    "stage2": {"zero_optimization": {"stage": 2}},
    "persistent": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100000}},
    "adam": {"zero_optimization": {"stage": 3}, "optimizer": {"type": "Adam"}},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A directory of everything that is wrong; its recipe is right but for a model without weights."""
    directory = tmp_path_factory.mktemp("inputs")
    write_recipe_without_weights(directory)
    write_reader(directory / "no_blocks", num_blocks=0)
    (directory / "no_blocks" / "model.safetensors").unlink()
    write_reader(directory / "other_model", seed=1)
    for name, records in (("no_sentence", [{"text": "x", "label": 0}]), ("empty", []), ("long", LONG)):
        write_records(directory / name / "train.jsonl", records)
        write_records(directory / name / "validation.jsonl", GOOD)
    write_records(directory / "half" / "train.jsonl", GOOD)
    others = {"copa": [EMPTY_CHOICE] * 60, "answered": ANSWERED, "unanswered": UNANSWERED}
    for name, records in (others | {"unlabelled": UNLABELLED}).items():
        write_records(directory / name / "train.jsonl", GOOD if name == "unlabelled" else records)
        write_records(directory / name / "validation.jsonl", records)
    write_writer(directory / "no_eos", has_eos=False)
    (directory / "no_eos" / "model.safetensors").unlink()
    write_writer(directory / "more_tokens")
    (directory / "more_tokens" / "model.safetensors").unlink()
    tokenizer = AutoTokenizer.from_pretrained(directory / "more_tokens")
    tokenizer.add_tokens(["Ada ate"])
    tokenizer.save_pretrained(directory / "more_tokens")
    (directory / "gguf").mkdir()
    (directory / "gguf" / "tiny.Q4_1.gguf").write_bytes(b"GGUF")
    (directory / "no_config").mkdir()
    for kind in ("t5", "vit"):
        shutil.copytree(directory / "model", directory / kind)
        (directory / kind / "config.json").write_text(json.dumps({"model_type": kind}))
    for name, values in DEEPSPEED_JSON.items():
        (directory / f"{name}.json").write_text(json.dumps(values))
    (directory / "file").write_text("not a directory")
    return directory


@pytest.fixture(scope="module")
def finished_run(inputs):
    """A run of the whole model, ended as it should."""
    directory = inputs / "finished"
    run_forked_well(whole(inputs, directory))
    return directory


@pytest.fixture
def old_run(finished_run, tmp_path):
    """A copy of it, to resume."""
    return shutil.copytree(finished_run, tmp_path / "run")


def whole(inputs, run_dir, *overrides):
    recipe, model = inputs / "recipe.yaml", inputs / "whole_model"
    return ["--config", recipe, f"run_dir={run_dir}", f"model.path={model}", *overrides]


def assert_refused_by_train(arguments, *fragments):
    assert_one_error(run_forked(arguments), 2, *fragments, "got: ", "expected: ")


def contents(directory):
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


REFUSED = {
    "unknown_key": (["zo.sparsit=0.5"], ["unknown key", "got: zo.sparsit", "did you mean zo.sparsity?"]),
    "unknown_task": (["data.task=sst3"], ["data.task in", "got: 'sst3'", "did you mean sst2?"]),
    "task_of_two_lines": (['data.task="one\\ntwo"'], ["data.task in", "got: 'one\\ntwo'", "one of sst2"]),
    "no_such_directory": (["model.path={inputs}/none"], ["model.path", "{inputs}/none", "config.json"]),
    "hub_model_offline": (
        ["model.path=facebook/opt-1.3b"],
        ["model.path facebook/opt-1.3b", "download the model first"],
    ),
    "directory_without_config": (["model.path={inputs}/no_config"], ["holds no config.json"]),
    "no_decoder": (
        ["model.path={inputs}/t5"],
        ["T5Config is not the config of a causal language model", "a decoder"],
    ),
    "no_language_model": (["model.path={inputs}/vit"], ["has no vocabulary", "ViTConfig", "a decoder"]),
    "model_without_blocks": (["model.path={inputs}/no_blocks"], ["no transformer blocks", "layers (0)"]),
    "unknown_dtype": (["model.dtype=float16"], ["model.dtype", "'float16'", "fp32, bf16, fp16"]),
    "sparsity_above_1": (["zo.sparsity=1.01"], ["zo.sparsity", "got: 1.01", "0 to 1"]),
    "sparsity_below_0": (["zo.sparsity=-0.01"], ["zo.sparsity", "got: -0.01", "0 to 1"]),
    "sparsity_twice": (
        ["zo.num_dropped_layers=1"],
        ["zo.sparsity=0.5, zo.num_dropped_layers=1", "exactly one"],
    ),
    "no_sparsity": (["zo.sparsity=null"], ["zo.sparsity=null, zo.num_dropped_layers=null", "exactly one"]),
    "too_many_dropped": (
        ["zo.sparsity=null", f"zo.num_dropped_layers={NUM_BLOCKS + 1}"],
        ["zo.num_dropped_layers", f"got: {NUM_BLOCKS + 1}", f"0 to {NUM_BLOCKS}"],
    ),
    "weights_of_other_blocks": (
        ["zo.layer_policy=weighted", "zo.layer_policy_options.weights=1,2"],
        ["zo.layer_policy_options.weights does not fit", "got: 1,2", f"{NUM_BLOCKS} numbers above 0"],
    ),
    "eps_0": (["zo.perturbation_scale=0"], ["zo.perturbation_scale", "got: 0", "a number above 0"]),
    "undivided_batch": (["train.batch_size=7"], ["train.batch_size=7, train.micro_batch_size=2", "1, 7"]),
    "no_data": (["data.path={inputs}/none"], ["data directory does not exist", "{inputs}/none"]),
    "hub_data_offline": (["data.path=null"], ["cannot load nyu-mll/glue", "set data.path to a directory"]),
    "no_fields": (["data.path={inputs}/no_sentence"], ["record 1 of the train split", "no field sentence"]),
    "empty_split": (["data.path={inputs}/empty"], ["the train split of sst2 is empty"]),
    "no_labels": (
        ["data.path={inputs}/unlabelled"],
        [
            "record 1 of the validation split of sst2 ({inputs}/unlabelled/validation.jsonl line 1)",
            "has no usable label; got: -1; expected: 0 to 1",
        ],
    ),
    "no_answers": (
        ["data.task=squad", "data.path={inputs}/unanswered"],
        ["the train split of squad is empty", "60 records without an answer"],
    ),
    "candidate_without_tokens": (
        ["data.task=copa", "data.path={inputs}/copa"],
        ["a candidate of record", "adds no token; got: ' '"],
    ),
    "no_end_of_sequence": (
        ["data.task=squad", "data.path={inputs}/answered", "model.path={inputs}/no_eos"],
        ["no end-of-sequence token", "eos_token"],
    ),
    "token_without_a_row": (
        ["data.task=squad", "data.path={inputs}/answered", "model.path={inputs}/more_tokens"],
        ["a token that the model's embedding has no row for", "'Ada ate'", "the vocab_size in config.json"],
    ),
    "gguf_file": (
        ["model.path={inputs}/gguf/tiny.Q4_1.gguf"],
        ["gguf/tiny.Q4_1.gguf is a model in GGUF", "convert_gguf('{inputs}/gguf/tiny.Q4_1.gguf', "],
    ),
    "gguf_directory": (["model.path={inputs}/gguf"], ["gguf/tiny.Q4_1.gguf is a model in GGUF"]),
    "no_newline": (
        ["data.task=squad", "data.path={inputs}/answered"],
        ["no token for a newline"],
    ),
    "missing_split": (["data.path={inputs}/half"], ["no validation split", "got: train.jsonl"]),
    "too_few_examples": (["data.num_train=50"], ["too few training records", "60 records for 50 + 11"]),
    "no_room_for_the_label": (
        ["data.max_length=1"],
        ["leaves no token before it", "raise data.max_length=1"],
    ),
    "input_without_positions": (
        ["data.path={inputs}/long"],
        ["longer than the model's positions", f"at most {NUM_POSITIONS}", f"data.max_length={NUM_POSITIONS}"],
    ),
    "no_deepspeed_json": (["deepspeed={inputs}/none.json"], ["DeepSpeed configuration", "none.json"]),
    "zero_stage_2": (["deepspeed={inputs}/stage2.json"], ["ZeRO stage 3", "'stage': 2"]),
    "persistent_parameters": (
        ["deepspeed={inputs}/persistent.json"],
        ["stage3_param_persistence_threshold", "got: 100000", "expected: 0"],
    ),
    "optimizer": (["deepspeed={inputs}/adam.json"], ["optimizer", "Adam", "LeZO is the optimizer"]),
    "run_dir_is_a_file": (["run_dir={inputs}/file"], ["run_dir", "file cannot be written to"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_one_line_before_weights_load(name, inputs, tmp_path):
    given, fragments = ([part.replace("{inputs}", str(inputs)) for part in parts] for parts in REFUSED[name])
    assert_refused_by_train(
        ["--config", inputs / "recipe.yaml", f"run_dir={tmp_path / 'run'}", *given], *fragments
    )
    assert not contents(tmp_path)
    assert (inputs / "file").read_text() == "not a directory"


def test_the_same_recipe_without_any_mistake_is_refused_for_want_of_weights(inputs, tmp_path):
    arguments = ["--config", inputs / "recipe.yaml", f"run_dir={tmp_path / 'run'}"]
    assert_refused_by_train(arguments, "holds no weights", "expected: model.safetensors")


def test_records_without_an_answer_are_left_out_and_long_prompts_cut_with_their_numbers(tmp_path):
    """Neither ends the run; a tokenizer without a pad token does not either."""
    write_writer(tmp_path / "model", has_pad=False)
    long = [record | {"context": "Ada ate bread. " * 30} for record in ANSWERED[:7]]
    records = [*UNANSWERED[:5], *ANSWERED[:20], *long]
    for split in ("train", "validation"):
        write_records(tmp_path / "data" / f"{split}.jsonl", records)
    keys = [
        *(f"run_dir={tmp_path / 'run'}", f"model.path={tmp_path / 'model'}", "model.dtype=fp32"),
        *("method=zero_shot", "data.task=squad", f"data.path={tmp_path / 'data'}"),
        *("data.num_train=20", "data.num_dev=7", "data.num_test=27"),
    ]
    finished = run_forked_well([*keys, f"data.max_length={NUM_WRITER_POSITIONS}"])
    for split in ("train", "validation"):
        assert f"5 of 32 records of the {split} split of squad have no right answer and are left out" in (
            finished.err
        )
    cut = f"7 of 27 examples are longer than max_length {NUM_WRITER_POSITIONS} tokens"
    assert cut in finished.err


def test_a_missing_key_is_named(inputs):
    arguments = ["--config", inputs / "recipe.yaml"]
    assert_refused_by_train(arguments, "missing", "run_dir", "run_dir=... on the command line")


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("model.path={inputs}/other_model", "the model fingerprint differs from the journal's"),
        (
            "zo.learning_rate=0.002",
            "config zo.learning_rate differs from the journal's; got: 0.002; expected: 0.001",
        ),
        ("seed=1", "config seed differs from the journal's; got: 1; expected: 0"),
    ],
    ids=["model", "learning_rate", "seed"],
)
def test_a_run_directory_made_with_something_else_is_refused_and_left_as_it_was(
    override, fragment, inputs, old_run
):
    before = contents(old_run)
    assert_refused_by_train(whole(inputs, old_run, override.replace("{inputs}", str(inputs))), fragment)
    assert contents(old_run) == before


def test_a_run_directory_made_with_another_config_is_refused_before_weights_load(inputs, old_run):
    before = contents(old_run)
    arguments = ["--config", inputs / "recipe.yaml", f"run_dir={old_run}", "train.batch_size=4"]
    problem = "config train.batch_size differs from the journal's; got: 4; expected: 8"
    assert_refused_by_train(arguments, problem)
    assert contents(old_run) == before


def test_a_run_directory_made_with_another_tokenizer_is_refused(inputs, old_run, tmp_path):
    model = shutil.copytree(inputs / "whole_model", tmp_path / "model")
    path = model / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    before = contents(old_run)
    arguments = whole(inputs, old_run, f"model.path={model}")
    assert_refused_by_train(arguments, "config tokenizer differs from the journal's")
    assert contents(old_run) == before


def test_a_damaged_journal_is_refused_with_an_exit_code_of_its_own(inputs, old_run):
    path = old_run / "journal.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step":3', b'"step":4', 1))
    problem = "journal.jsonl line 6 is damaged: its checksum does not match; last valid step: 2"
    assert_one_error(run_forked(whole(inputs, old_run)), 3, problem)


# Launchers pass on the line and the exit code.


@pytest.mark.parametrize("starter", [deepspeed, mpirun])
def test_a_launcher_passes_on_one_line_and_the_exit_code(starter, inputs, tmp_path):
    given = ["--config", inputs / "recipe.yaml", f"run_dir={tmp_path / 'run'}", "train.micro_batch_size=8"]
    assert_refused(starter(2, *given), "8, 2 ranks", "train.micro_batch_size to one of 1, 2, 4")
    assert not contents(tmp_path)


def test_plain_python_ends_with_one_line_and_the_exit_code(inputs, tmp_path):
    given = ["--config", inputs / "recipe.yaml", f"run_dir={tmp_path / 'run'}", "zo.sparsit=0.5"]
    assert_refused(python(*given), "got: zo.sparsit", "did you mean zo.sparsity?")


def test_two_ranks_refuse_a_run_directory_of_another_config(inputs, old_run):
    before = contents(old_run)
    given = ["--config", inputs / "recipe.yaml", f"run_dir={old_run}", "seed=1"]
    assert_one_error(run_forked(given, num_ranks=2), 2, "config seed differs")
    assert contents(old_run) == before
