"""What lezo_ds computes with a tiny model of each family is what transformers computes."""

from importlib.metadata import version

import pytest
from family_checks import Family
from family_models import KNOWN, NOT_BUILT
from family_page import FAMILIES, PAGE, outcomes_of, page_text, read_rows, table_row
from thorough import thorough

from lezo_ds.errors import UserError

SAMPLE = ("mistral", "qwen3_5_text", "lfm2_vl", "apertus")
"""A sliding window, linear attention, a multimodal model with states, and one that stores
buffers."""


@pytest.mark.parametrize("family", [*SAMPLE, thorough("gpt_oss")])
def test_a_step_answers_labels_and_an_export_are_those_of_transformers(family, tmp_path):
    checked = Family(family, tmp_path)
    checked.losses()
    checked.answers()
    checked.step()
    checked.export()
    checked.plan()
    checked.labels()


def test_a_model_whose_texts_are_read_in_both_directions_is_refused(tmp_path):
    with pytest.raises(UserError, match="PaliGemmaForConditionalGeneration has an encoder"):
        Family("paligemma", tmp_path).losses()


@pytest.mark.parametrize("family", ["llama4_text", "jetmoe"])
def test_experts_route_the_tokens_of_each_probe_alone(family, tmp_path):
    """Their inputs have the tokens once for each expert. JetMoe sorts the tokens by expert."""
    Family(family, tmp_path).step()


@pytest.mark.skipif(
    f"transformers {version('transformers').rpartition('.')[0]}" not in PAGE.read_text(),
    reason="the page is about another version of transformers",
)
def test_the_page_has_all_families_that_transformers_builds():
    rows = read_rows()
    assert rows.keys() | NOT_BUILT.keys() == set(KNOWN)
    assert PAGE.read_text(encoding="utf-8") == page_text(rows)


@pytest.mark.families
@pytest.mark.parametrize("family", FAMILIES)
def test_what_comes_out_for_a_family_is_what_the_page_says(family):
    outcomes = outcomes_of(family)
    assert table_row(family, outcomes) == read_rows()[family], outcomes
