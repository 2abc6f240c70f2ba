from __future__ import annotations

import pytest

from lezo_ds.errors import UserError
from lezo_ds.tasks import TASKS, get_task
from lezo_ds.tasks.base import Example, SplitSizes
from lezo_ds.tasks.sst2 import SST2


def test_sst2_asks_for_the_verdict_that_closes_the_review():
    record = {"sentence": " hide new secretions from the parental units ", "label": 0}
    assert SST2.build_example(record, 7) == Example(
        prompt="hide new secretions from the parental units It was",
        candidates=(" terrible", " great"),
        label=0,
        index=7,
        null_prompt=" It was",
    )


def test_sst2_is_the_hubs_parquet_with_mezos_default_sizes():
    assert (SST2.hub_id, SST2.hub_config) == ("nyu-mll/glue", "sst2")
    assert SST2.sizes == SST2.mezo_sizes == SplitSizes(num_train=1000, num_dev=500, num_test=1000)
    assert (SST2.kind, SST2.metric) == ("classification", "accuracy")


@pytest.mark.parametrize("name", ["sst2", "SST2", "Sst2"])
def test_a_task_is_found_whatever_the_case_of_its_name(name):
    assert get_task(name) is SST2


@pytest.mark.parametrize("name", ["sst-2", "SST", "ssst2"])
def test_an_unknown_task_gets_the_nearest_name(name):
    with pytest.raises(UserError, match=rf"unknown task; got: {name}; .*did you mean sst2\?"):
        get_task(name)


def test_a_name_near_to_none_gets_the_list_alone():
    with pytest.raises(UserError, match=r"expected: one of .*sst2") as caught:
        get_task("translation")
    assert "did you mean" not in str(caught.value)


def test_every_task_is_registered_under_its_own_lower_case_name():
    assert all(name == task.name == task.name.lower() for name, task in TASKS.items())
