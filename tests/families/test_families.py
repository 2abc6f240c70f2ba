"""What lezo_ds computes with a tiny model of each family is what transformers computes."""

from __future__ import annotations

import pytest
from family_checks import Family
from family_models import NOT_BUILT
from family_page import FAMILIES, PAGE, outcomes_of, page_text, read_rows, table_row
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lezo_ds.errors import UserError

SAMPLE = ("opt", "mistral", "gpt_oss", "gemma3", "qwen3_5", "lfm2", "mamba")
"""Absolute positions, a sliding window, a mixture, two multimodal models, and recurrences."""


@pytest.mark.parametrize("family", SAMPLE)
def test_losses_answers_and_the_gradient_of_a_step_are_those_of_transformers(family, tmp_path):
    checked = Family(family, tmp_path)
    checked.losses()
    checked.answers()
    checked.step()


def test_tokens_that_lie_once_for_each_expert_are_not_cut_into_copies(tmp_path):
    checked = Family("llama4_text", tmp_path)
    with pytest.raises(UserError, match=r"without a batch dimension of .* zo.probes_per_pass=1"):
        checked.step()
    checked.step(probes_per_pass=1)


def test_the_page_has_all_families_that_transformers_builds():
    rows = read_rows()
    assert rows.keys() | NOT_BUILT.keys() == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert PAGE.read_text(encoding="utf-8") == page_text(rows)


@pytest.mark.families
@pytest.mark.parametrize("family", FAMILIES)
def test_what_comes_out_for_a_family_is_what_the_page_says(family):
    outcomes = outcomes_of(family)
    assert table_row(family, outcomes) == read_rows()[family], outcomes
