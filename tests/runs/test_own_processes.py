"""Functions of the user's that start processes of their own."""

import signal
import time

import pytest
import yaml
from assets import write_records
from commands import python, run_words, start, wait_until
from own_data import own_values
from run_ends import results_of
from tiny_tasks import write_writer

JUDGE = """
import concurrent.futures as futures
import multiprocessing
import os
import pathlib
import signal
import threading
import time

EXECUTOR = futures.ProcessPoolExecutor(1)  # nobody shuts it down


def length(answer):
    return float(len(answer))


def ended_in_time(method):
    process = multiprocessing.get_context(method).Process(target=time.sleep, args=[600])
    process.start()
    process.terminate()
    process.join(10)
    is_alive = process.is_alive()
    process.kill()
    return not is_alive


def judge(completions, **fields):
    with multiprocessing.Pool(2) as pool:
        in_pool = pool.map(length, completions)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(length, completions) == in_pool
    assert list(EXECUTOR.map(length, completions)) == in_pool
    assert all(ended_in_time("fork") for _ in range(5))
    return in_pool


def endless(completions, **fields):
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # the run has begun
        pathlib.Path(os.environ["WAITS"]).touch()
        threading.Event().wait()
    return [0.0] * len(completions)
"""


@pytest.fixture(scope="module")
def rewarded(tmp_path_factory):
    """A recipe with a reward in a file beside it."""
    folder = tmp_path_factory.mktemp("rewarded")
    (folder / "judge.py").write_text(JUDGE)
    write_records(folder / "t.jsonl", [{"q": f"Order {number}"} for number in range(20)])
    values = own_values(write_writer(folder / "model"), train="./t.jsonl", prompt="{q}")
    values["data"] |= {"num_dev": 2, "num_test": 2}
    values["generation"] = {"max_new_tokens": 4}
    values["zo"] |= {"estimator": "evolution-strategies", "noise_rank": 1, "directions": 2}
    values["train"] |= {"steps": 1, "batch_size": 2, "micro_batch_size": 2}
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    return recipe


def train(recipe, run_dir, objective):
    words = run_words(recipe, run_dir, f"train.objective=judge:{objective}")
    return start(python(*words, program="train"), WAITS=str(run_dir / "waits"))


def test_processes_of_a_reward_start_find_its_module_and_end_when_told_to(rewarded, tmp_path):
    with train(rewarded, tmp_path, "judge") as process:
        _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err[-3000:]
    assert results_of(tmp_path)["finished"]
    assert "\r" not in err and "?step/s" not in err and "real_accelerator" not in err


def test_a_second_ctrl_c_ends_a_run_whose_reward_never_returns(rewarded, tmp_path):
    """As `Pool.map` does not, if a worker is lost."""
    with train(rewarded, tmp_path, "endless") as process:
        wait_until((tmp_path / "waits").exists, process)
        process.send_signal(signal.SIGINT)
        time.sleep(5.1)
        assert process.poll() is None  # it would stop after its step
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted; the same command starts again" in err
