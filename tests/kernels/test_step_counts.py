"""What a step asks of the host: its Python calls, collectives and operators, on a small fixed model.

The limits are 10 % above what a step took when they were written; the collectives are exact. A step that has
become slower mostly shows here first: most of the time of a small step is the host's.
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest
from operators import Operators
from ranks import run_ranks
from tiny_runs import TINY_OPT, make_batch, start_engine, train, write_model

from lezo_ds import distributed
from lezo_ds.data.objectives import classification_loss

COLLECTIVES = ("all_gather_into_tensor", "all_gather", "all_reduce", "broadcast", "reduce_scatter_tensor")
DEEPSPEED = "deepspeed/comm/comm.py"
WARM_UP_STEPS = 2  # DeepSpeed records the order of the modules in the first, and prefetches after it


def count_step(directory, num_ranks, dtype, sparsity):
    """Return the counts of a step of two micro-batches."""
    distributed.init_distributed()
    engine = start_engine(directory, dtype, num_ranks, sparsity=sparsity)
    train(engine, WARM_UP_STEPS, num_micro_batches=2)
    batch, counts = make_batch(WARM_UP_STEPS, 2), Counter()

    def profile(frame, event, _):
        if event in ("call", "c_call"):
            counts["Python calls"] += 1
        code = frame.f_code
        if event == "call" and code.co_name in COLLECTIVES and code.co_filename.endswith(DEEPSPEED):
            counts[code.co_name] += 1

    sys.setprofile(profile)
    engine.train_batch(batch, classification_loss)
    sys.setprofile(None)
    with Operators() as operators:
        engine.train_batch(batch, classification_loss)
    return counts | {"operators": operators.count}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("num_ranks", "dtype", "sparsity", "calls", "operators"),
    [(1, "bf16", 0.0, 15_600, 468), (1, "fp32", 0.5, 8_480, 275), (2, "bf16", 0.5, 7_470, 211)],
)
def test_a_step_asks_no_more_of_the_host(num_ranks, dtype, sparsity, calls, operators, tmp_path):
    write_model(TINY_OPT, tmp_path)
    for counts in run_ranks(count_step, num_ranks, tmp_path, num_ranks, dtype, sparsity):
        found = counts.pop("Python calls"), counts.pop("operators")
        assert calls / 2 < found[0] <= calls and operators / 2 < found[1] <= operators, found
        # 4 blocks, 2 embeddings and the last norm are gathered one ahead of their use.
        gathers = {"all_gather_into_tensor": 7} if num_ranks > 1 else {}
        assert counts == {"broadcast": 1, "all_reduce": 1, **gathers}
