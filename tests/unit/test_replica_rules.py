"""What replicas conclude from each other's statements, and how long they wait."""

import json
import math
from dataclasses import asdict, replace

import pytest

pytest.importorskip("torchft", reason="pip install 'lezo_ds[elastic]'")

from lezo_ds.errors import UserError
from lezo_ds.journal import EvaluationRecord
from lezo_ds.replicas import patience as patience_module
from lezo_ds.replicas.member import Member, is_far, leader_of, read_members, right_checksum
from lezo_ds.replicas.patience import Patience

FACTS = {"run": "0a1b2c3d", "lines": 7, "workers": 2, "age": 3, "longest": 1.5}
FACTS |= {"learning_rate": 0.1 + 0.2}  # all of its bits
FACTS |= {"evaluations": (EvaluationRecord(4, "dev", 0.5, {"accuracy": 0.75}),)}
FACTS |= {"group": "g", "next_group": "h"}
MEMBER = Member(**FACTS, address="10.0.0.1:40001", store="10.0.0.1:40002")
OTHER = replace(MEMBER, address="10.0.0.2:40001")


def sent(member):
    """Return what the lighthouse hands on: JSON without types of Python."""
    return json.loads(json.dumps(asdict(member)))


def test_a_member_comes_back_from_json_and_another_program_is_left_out_though_it_is_the_first():
    unmeasured = replace(MEMBER, evaluations=(EvaluationRecord(4, "test", None, {}),), longest=1800)
    assert read_members([sent(MEMBER), sent(unmeasured)]) == [MEMBER, unmeasured]
    for statement in (None, "hello", [1, 2], {"job": 7, "run": "x"}):
        assert read_members([statement, sent(MEMBER), statement]) == [MEMBER]


BAD_SCORE = {"step": 4, "split": "dev", "loss": None, "metrics": {"accuracy": math.nan}}
WITHOUT_LINES = {name: value for name, value in sent(MEMBER).items() if name != "lines"}


CHANGES = [{"color": "red"}, {"lines": "7"}, {"workers": 0}, {"longest": math.inf}]
CHANGES += [{"evaluations": [BAD_SCORE]}]


@pytest.mark.parametrize("foreign", [WITHOUT_LINES, *(sent(MEMBER) | each for each in CHANGES)])
def test_a_replica_of_another_version_is_left_out_unless_it_is_the_first(foreign):
    assert read_members([sent(MEMBER), foreign, sent(OTHER)]) == [MEMBER, OTHER]
    with pytest.raises(UserError, match=r"of another version: .*fix: install the same version"):
        read_members([foreign, sent(MEMBER)])


def test_the_longest_journal_leads_and_then_the_most_common_one():
    assert leader_of([replace(OTHER, lines=5), MEMBER]) == MEMBER
    lonely = replace(MEMBER, run="ffffffff")
    assert leader_of([lonely, MEMBER, OTHER]) == MEMBER
    assert leader_of([lonely, MEMBER]) == lonely


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, False), ({"lines": 5}, False), ({"lines": 4}, True), ({"run": "ffffffff"}, True)],
)
def test_a_journal_decides_whether_a_replica_is_far(changes, expected):
    assert is_far(replace(OTHER, **changes), leader=MEMBER) is expected


@pytest.mark.parametrize(
    ("checksums", "ages", "right"),
    [
        ([5.0, 5.0, 7.0], [0, 1, 90], 5.0),  # the most replicas, however old
        ([7.0, 5.0], [3, 4], 5.0),  # the older of two
        ([7.0, 5.0], [4, 4], 7.0),  # then the first
        ([7.0, 5.0, 7.0, 5.0], [1, 9, 2, 0], 5.0),  # the group with the oldest
        ([7.0, 5.0, 6.0], [0, 1, 2], 6.0),
    ],
)
def test_who_is_right_when_replicas_disagree(checksums, ages, right):
    assert right_checksum(checksums, ages) == right


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests advance: clock[0] += seconds."""
    now = [100.0]
    monkeypatch.setattr(patience_module.time, "monotonic", lambda: now[0])
    return now


def do_round(patience, clock, seconds):
    patience.start_round(patience.longest)
    clock[0] += seconds
    patience.finish_round()


def test_a_round_may_take_four_times_the_longest_one_lately(clock):
    patience = Patience(limit=300.0)
    patience.start_round(longest_known=patience.longest)
    assert patience.seconds == 300  # nobody knows yet
    do_round(patience, clock, 20.0)
    assert (patience.longest, patience.num_rounds) == (20.0, 1)
    patience.start_round(longest_known=20.0)
    assert patience.seconds == 80
    do_round(patience, clock, 0.1)
    assert patience.longest == 18.0
    patience.start_round(longest_known=0.2)
    assert patience.seconds == 10


def test_patience_doubles_with_each_failure_in_a_row_and_ends_after_three(clock):
    patience = Patience(limit=300.0)
    do_round(patience, clock, 20.0)
    for seconds in (160, 300):
        assert not patience.lose_round()
        patience.start_round(longest_known=20.0)
        assert patience.seconds == seconds
    assert patience.lose_round()
    do_round(patience, clock, 20.0)
    assert not patience.lose_round()
