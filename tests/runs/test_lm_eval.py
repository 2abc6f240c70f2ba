"""`evaluate --lm-eval` scores a sharded model as lm-evaluation-harness does by its own `hf`."""

from __future__ import annotations

import json

import pytest
from assets import write_reader, write_records
from commands import assert_one_error, run_forked, run_forked_well
from ranks import run_ranks

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
    return (
        model.loglikelihood(requests("loglikelihood", PAIRS)),
        model.loglikelihood_rolling(
            requests("loglikelihood_rolling", [(text * 20,) for text in TEXTS])
        ),
        model.generate_until(requests("generate_until", [(text, settings) for text in TEXTS])),
    )


def open_here(root, keys):
    """Return what runs tasks on this rank, and the sharded model."""
    from lezo_ds.runs.harness import ShardedLM
    from lezo_ds.runs.opening import open_model

    opened = open_model(str(root / "model"), ["train.eval_batch_size=2", *keys])
    return opened, ShardedLM(opened.load_engine(), str(root / "model"), batch_size=2)


def answer_here(root, keys):
    _, model = open_here(root, keys)
    return answers_of(model)


def score_here(root):
    from lezo_ds.runs.harness import run_tasks

    opened, _ = open_here(root, [])
    return run_tasks(opened, str(root / "task.yaml"), 3)


@pytest.fixture(scope="module")
def own_model(directory):
    """The harness's own class."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(directory / "model"), device="cpu", dtype="float32", batch_size=2)


@pytest.fixture(scope="module")
def expected(own_model):
    return answers_of(own_model)


def test_ranks_share_the_requests_and_have_every_bit_of_the_harness_s_own_model(
    directory, expected
):
    first, second = run_ranks(answer_here, 2, directory, [])
    assert first == second == expected
    assert all(first[2])


# The harness reads the files of all its tasks first, on each rank.
@pytest.mark.thorough
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
def test_report_shows_the_scores_of_a_run_before_and_after(recipe, directory, tmp_path):
    run_dir = tmp_path / "run"
    run_forked_well(["--config", recipe, f"run_dir={run_dir}", "train.steps=4"])
    found = {}
    for step in ("0", "4"):
        asked = ["--run", run_dir, "--step", step, "--lm-eval", directory / "task.yaml"]
        scored = run_forked_well([*asked, "--limit", "3", "--json"], program="evaluate")
        found[step] = json.loads(scored.out)["results"]["reviews"]["brier_score,none"]
    assert found["0"] != found["4"]
    lines = run_forked_well([run_dir], program="report").out.splitlines()
    (head,) = [line.split() for line in lines if "lm-eval" in line]
    assert head == ["lm-eval", "metric", "examples", "step", "0", "step", "4"]
    (row,) = [line.split() for line in lines if "brier_score" in line]
    assert row == ["reviews", "brier_score", "3", f"{found['0']:.4f}", f"{found['4']:.4f}"]


@pytest.mark.thorough
@pytest.mark.parametrize(("num_ranks", "keys"), [(1, []), (2, ["tensor_parallel=2"])])
def test_one_rank_or_split_weights_have_the_same_scores(num_ranks, keys, directory, expected):
    answers, *_ = run_ranks(answer_here, num_ranks, directory, keys)
    likelihoods, rolling, texts = expected
    if num_ranks == 1:
        assert answers == expected
    for (number, is_greedy), (right, is_right) in zip(answers[0], likelihoods, strict=True):
        assert (number, is_greedy) == (pytest.approx(right, rel=1e-5), is_right)
    assert answers[1] == pytest.approx(rolling, rel=1e-5)
    assert answers[2] == texts


@pytest.mark.thorough
def test_a_task_that_is_not_there_is_refused(directory):
    asked = ["--model", directory / "model", "--lm-eval", directory / "none.yaml"]
    assert_one_error(run_forked(asked, program="evaluate"), 2, "Tasks not found")
