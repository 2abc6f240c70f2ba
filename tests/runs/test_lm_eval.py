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


def score_here(root, keys):
    """Return the answers of the sharded model on this rank, and the scores of the task."""
    from lezo_ds.runs.harness import ShardedLM, run_tasks
    from lezo_ds.runs.opening import open_model

    opened = open_model(str(root / "model"), ["train.eval_batch_size=2", *keys])
    model = ShardedLM(opened.load_engine(), str(root / "model"), batch_size=2)
    return answers_of(model), run_tasks(opened, str(root / "task.yaml"), 3)


@pytest.fixture(scope="module")
def expected(directory):
    """Return the same by the harness's own class."""
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.models.huggingface import HFLM

    model = HFLM(str(directory / "model"), device="cpu", dtype="float32", batch_size=2)
    config = EvaluatorConfig(tasks=str(directory / "task.yaml"))
    manager = config.process_tasks()
    found = lm_eval.simple_evaluate(model, tasks=config.tasks, limit=3, task_manager=manager)
    return answers_of(model), found["results"]


def test_ranks_share_the_requests_and_have_every_bit_of_the_harness_s_own_model(
    directory, expected
):
    (first, found), (second, none) = run_ranks(score_here, 2, directory, [])
    assert first == second == expected[0]
    assert all(first[2])
    assert json.dumps(found["results"]) == json.dumps(expected[1])
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
    (answers, _), *_ = run_ranks(score_here, num_ranks, directory, keys)
    likelihoods, rolling, texts = expected[0]
    if num_ranks == 1:
        assert answers == expected[0]
    for (number, is_greedy), (right, is_right) in zip(answers[0], likelihoods, strict=True):
        assert (number, is_greedy) == (pytest.approx(right, rel=1e-5), is_right)
    assert answers[1] == pytest.approx(rolling, rel=1e-5)
    assert answers[2] == texts


@pytest.mark.thorough
def test_a_task_that_is_not_there_is_refused(directory):
    asked = ["--model", directory / "model", "--lm-eval", directory / "none.yaml"]
    assert_one_error(run_forked(asked, program="evaluate"), 2, "Tasks not found")
