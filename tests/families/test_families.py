"""What lezo_ds computes with a tiny model of each family is what transformers computes."""

from __future__ import annotations

import pytest
from family_checks import Family

from lezo_ds.errors import UserError

SAMPLE = ("opt", "mistral", "gpt_oss", "qwen3_5", "lfm2", "mamba")


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
