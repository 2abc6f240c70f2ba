"""training_state.json: what is written comes back, and what is no such file is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lezo_ds.errors import LezoError, UserError
from lezo_ds.journal import EvaluationRecord, Header
from lezo_ds.runs.training_state import TrainingState, read_training_state

HEADER = Header(
    noise_version=1,
    model_fingerprint="a" * 32,
    parameter_table_hash="b" * 32,
    config={"seed": 1},
    libraries={"torch": "2"},
)
EVALUATIONS = tuple(
    EvaluationRecord(step=step, split="dev", loss=loss, metrics={"accuracy": 0.5})
    for step, loss in ((2, 0.75), (4, None), (6, 0.1 + 0.2))
)
STATE = TrainingState(HEADER, world_size=2, step=4, evaluations=EVALUATIONS)


def test_a_state_comes_back_as_it_was_written(tmp_path):
    STATE.write(tmp_path / "state.json")
    assert read_training_state(tmp_path / "state.json") == STATE


def test_evaluations_of_steps_after_the_checkpoint_are_to_be_done_again():
    assert STATE.at_checkpoint() == replace(STATE, evaluations=EVALUATIONS[:2])


@pytest.mark.parametrize("change", ["{", {"evaluations": 3}, {"header": {"format": "other"}}, {"step": None}])
def test_a_damaged_state_is_refused(change, tmp_path):
    path = tmp_path / "state.json"
    STATE.write(path)
    values = json.loads(path.read_text())
    if isinstance(change, dict):
        values |= change
        values = {name: value for name, value in values.items() if value is not None}
        path.write_text(json.dumps(values))
    else:
        path.write_text(change)
    with pytest.raises(UserError, match=r"state.json cannot be read; got: .*restore the file"):
        read_training_state(path)


def test_a_state_that_cannot_be_written_says_so_and_leaves_the_old_one(tmp_path):
    with pytest.raises(LezoError, match=r"none/state.json"):
        STATE.write(tmp_path / "none" / "state.json")
