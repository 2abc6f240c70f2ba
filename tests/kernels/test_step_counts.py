"""What a step asks of the host (calls, collectives, operators): 10 % more than it took at most."""

import sys
from collections import Counter

import pytest
from ranks import run_ranks
from tiny_runs import TINY_OPT, make_batch, start_engine, train, write_model
from torch.utils._python_dispatch import TorchDispatchMode

from lezo_ds import distributed
from lezo_ds.data.objectives import classification_loss

COLLECTIVES = {"all_gather_into_tensor", "all_gather", "all_reduce", "broadcast"}
COLLECTIVES |= {"reduce_scatter_tensor"}
DEEPSPEED = "deepspeed/comm/comm.py"
WARM_UP_STEPS = 2
"""DeepSpeed records the order of the modules in the first, and prefetches after it."""
NO_KERNELS = {"_unsafe_view", "detach", "empty", "empty_like", "empty_strided"}
NO_KERNELS |= {"lift_fresh", "new_empty"}


class Operators(TorchDispatchMode):
    """Counts the operators that launch a kernel on a GPU: none of views or of memory alone."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func.overloadpacket.__name__ not in NO_KERNELS:
            self.count += 1
        return func(*args, **(kwargs or {}))


def count_step(directory, num_ranks, dtype, sparsity, partition_size):
    """Return the counts of a step of two micro-batches."""
    distributed.init_distributed()
    settings = {"sparsity": sparsity, "partition_size": partition_size}
    engine = start_engine(directory, dtype, num_ranks, **settings)
    train(engine, WARM_UP_STEPS, num_micro_batches=2)
    batch, counts = make_batch(WARM_UP_STEPS, 2), Counter()

    def profile(frame, event, _):
        if event in ("call", "c_call"):
            counts["Python calls"] += 1
        code = frame.f_code
        if event == "call" and code.co_name in COLLECTIVES and code.co_filename.endswith(DEEPSPEED):
            counts[code.co_name] += 1
            if "gather" not in code.co_name:
                counts["bytes"] += frame.f_locals["tensor"].nbytes

    sys.setprofile(profile)
    engine.train_batch(batch, classification_loss)
    sys.setprofile(None)
    with Operators() as operators:
        engine.train_batch(batch, classification_loss)
    return counts | {"operators": operators.count}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("settings", "calls", "operators"),
    [
        ((1, "bf16", 0.0, None), 15_600, 437),
        ((1, "fp32", 0.5, None), 9_350, 292),
        ((2, "bf16", 0.5, None), 7_470, 211),
        ((2, "bf16", 0.5, 1), 7_000, 211),
    ],
)
def test_a_step_asks_no_more_of_the_host(settings, calls, operators, tmp_path):
    write_model(TINY_OPT, tmp_path)
    num_ranks, *_, partition_size = settings
    for counts in run_ranks(count_step, num_ranks, tmp_path, *settings):
        found = counts.pop("Python calls"), counts.pop("operators")
        assert calls / 2 < found[0] <= calls and operators / 2 < found[1] <= operators, found
        # 4 blocks, 2 embeddings and the last norm are gathered one ahead of their use.
        gathers = {"all_gather_into_tensor": 7} if (partition_size or num_ranks) > 1 else {}
        # 129 bytes: a plan of 32, a bit for each of 6 groups, 2 probes of 12; 9 numbers of 8.
        assert counts == {"broadcast": 1, "all_reduce": 1, "bytes": 129, **gathers}
