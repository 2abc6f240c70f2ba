"""`evaluate --lm-eval` scores a sharded model as lm-evaluation-harness does by its own `hf`."""

import json
from shutil import copytree, ignore_patterns

import pytest
from assets import write_reader, write_records
from commands import assert_refused
from ranks import run_ranks
from thorough import thorough

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: lezo_ds[lm-eval]")

pytestmark = pytest.mark.distributed

TEXTS = ["It was great", "the plot is dull and the score was", "the cast seems warm and"]
PAIRS = [(text, f" {word}") for text in TEXTS for word in ("moving", "dull and flat", "warm")]

TASK = """
task: reviews
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: ["warm", "dull and flat"]
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: brier_score}]
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("lm_eval")
    write_reader(root / "model")
    write_records(root / "t.jsonl", [{"text": t, "label": i % 2} for i, t in enumerate(TEXTS)])
    (root / "task.yaml").write_text(TASK.replace("FILE", str(root / "t.jsonl")))
    return root


def answers_of(model):
    """Return what a model of the harness makes of requests of each kind."""
    from lm_eval.api.instance import Instance

    def requests(kind, arguments):
        return [Instance(kind, {}, pair, index) for index, pair in enumerate(arguments)]

    settings = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    rolling = requests("loglikelihood_rolling", [(text * 20,) for text in TEXTS])
    return (
        model.loglikelihood(requests("loglikelihood", PAIRS)),
        model.loglikelihood_rolling(rolling),
        model.generate_until(requests("generate_until", [(text, settings) for text in TEXTS])),
    )


def open_here(root, *keys):
    from lezo_ds.runs.opening import open_model

    return open_model(str(root / "model"), ["train.eval_batch_size=2", *keys])


def answer_here(root, *keys):
    from lezo_ds.runs.harness import ShardedLM

    engine = open_here(root, *keys).load_engine()
    return answers_of(ShardedLM(engine, str(root / "model"), batch_size=2))


def score_here(root):
    from lezo_ds.runs.harness import run_tasks

    return run_tasks(open_here(root), str(root / "task.yaml"), 3)


@pytest.fixture(scope="module")
def own_model(directory):
    """The harness's own class."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(directory / "model"), device="cpu", dtype="float32", batch_size=2)


@pytest.fixture(scope="module")
def expected(own_model):
    return answers_of(own_model)


@pytest.mark.parametrize(
    ("num_ranks", "keys"), [(2, ()), thorough(1, ()), thorough(2, ("tensor_parallel=2",))]
)
def test_the_answers_are_those_of_the_harness_s_own_model(num_ranks, keys, directory, expected):
    answers, *others = run_ranks(answer_here, num_ranks, directory, *keys)
    assert all(other == answers for other in others)
    assert all(answers[2])
    if not keys:
        assert answers == expected
    likelihoods, rolling, texts = expected
    for (number, is_greedy), (right, is_right) in zip(answers[0], likelihoods, strict=True):
        assert (number, is_greedy) == (pytest.approx(right, rel=1e-5), is_right)
    assert answers[1] == pytest.approx(rolling, rel=1e-5)
    assert answers[2] == texts


@pytest.mark.thorough  # the harness reads the files of all its tasks first, on each rank
def test_scores_of_a_task_are_those_of_the_harness_s_own_model(directory, own_model):
    from lm_eval.config.evaluate_config import EvaluatorConfig

    found, none = run_ranks(score_here, 2, directory)
    config = EvaluatorConfig(tasks=str(directory / "task.yaml"))
    manager = config.process_tasks()
    expected = lm_eval.simple_evaluate(own_model, tasks=config.tasks, limit=3, task_manager=manager)
    assert json.dumps(found["results"]) == json.dumps(expected["results"])
    assert "reviews" in found["table"]
    assert none == {}


@pytest.mark.thorough
def test_a_task_that_is_not_there_or_has_no_data_is_refused(directory):
    (directory / "lost.yaml").write_text(TASK.replace("FILE", str(directory / "lost.jsonl")))
    (directory / "recipe.yaml").write_text("train: {steps: 1}")
    refused = {"none": "Tasks not found", "lost": "Unable to find", "recipe": "Unknown config"}
    for name, message in refused.items():
        asked = ["--model", directory / "model", "--lm-eval", directory / f"{name}.yaml"]
        assert_refused("evaluate", asked, message)
    bare = ["--model", copytree(asked[1], directory / "bare", ignore=ignore_patterns("tokenizer*"))]
    assert_refused("evaluate", [*bare, *asked[2:]], "cannot load the tokenizer")
