"""AdamW under ZeRO-3 does what torch's own does to a plain model, on any number of ranks."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from ranks import run_ranks
from tiny_adapters import peft_config
from tiny_runs import DS_CONFIG, SEED, TINY_OPT, make_batch, write_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from lezo_ds.config import AdamWConfig
from lezo_ds.config.deepspeed import load_ds_config
from lezo_ds.data.objectives import classification_loss
from lezo_ds.errors import DivergenceError, UserError
from lezo_ds.runs.first_order import initialize_first_order
from lezo_ds.zo.keys import dropout_key

pytestmark = pytest.mark.distributed

NUM_STEPS = 4
NUM_MICRO_BATCHES = 4
CONFIG = AdamWConfig(learning_rate=1e-3, weight_decay=0.1)
DROPOUTS = (0.0, 0.3)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A tiny random OPT without dropout, and the same weights with it."""
    found = {}
    for dropout in DROPOUTS:
        config = copy.deepcopy(TINY_OPT)
        config.dropout = config.attention_dropout = dropout
        found[dropout] = str(write_model(config, tmp_path_factory.mktemp("opt")))
    return found


def start(directory, num_ranks=1, dtype="fp32", peft=None, config=CONFIG):
    torch.set_num_threads(1)
    ds_config = load_ds_config(DS_CONFIG, dtype, num_ranks, 2)
    ds_config |= {
        "train_batch_size": 2 * NUM_MICRO_BATCHES,
        "gradient_accumulation_steps": NUM_MICRO_BATCHES // num_ranks,
    }
    return initialize_first_order(directory, config, NUM_STEPS, ds_config, dtype, SEED, peft)


def gathered(engine):
    return {parameter.name: parameter.gather() for parameter in engine.weights.parameters}


def train(engine, num_steps=NUM_STEPS):
    """Return (learning rate, loss) of each step."""
    return [
        (engine.learning_rate, engine.train_batch(make_batch(engine.global_steps), classification_loss))
        for _ in range(num_steps)
    ]


def train_all(directories, num_ranks):
    """Return by dropout: steps, weights, and whether a forward pass repeats itself after training."""
    found = {}
    for dropout, directory in directories.items():
        engine = start(directory, num_ranks)
        steps = train(engine)
        (batch,) = make_batch(0, num_micro_batches=1)
        found[dropout] = steps, gathered(engine), torch.equal(engine(batch), engine(batch))
    return found


@pytest.fixture(scope="module")
def by_ranks(directories):
    @cache
    def found(num_ranks):
        return run_ranks(train_all, num_ranks, directories, num_ranks)

    return found


def plain_loss(model, batch, index, step):
    """Return a micro-batch's mean loss by a plain model, with the dropout of (seed, step, micro-batch)."""
    with torch.random.fork_rng([]):
        torch.manual_seed(dropout_key(SEED, step, index))
        logits = model(**batch.inputs).logits
    wanted = logits[batch.selection.rows, batch.selection.positions][:, batch.selection.vocabulary]
    return F.cross_entropy(wanted, batch.labels["label"])


def train_plainly(directory):
    """Return (learning rate, loss) of each step, and the weights: transformers and torch alone."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=CONFIG.learning_rate, weight_decay=0.1)
    steps, norms = [], []
    for step in range(NUM_STEPS):
        optimizer.param_groups[0]["lr"] = CONFIG.learning_rate * (NUM_STEPS - step) / NUM_STEPS
        batches = make_batch(step)
        losses = [plain_loss(model, batch, i, step) / len(batches) for i, batch in enumerate(batches)]
        optimizer.zero_grad()
        sum(losses).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        steps.append((optimizer.param_groups[0]["lr"], sum(losses).item()))
    assert max(norms) > 2.0, "nothing was clipped"
    return steps, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_losses_and_weights_are_those_of_torchs_own_adamw_with_clipping(
    by_ranks, directories, num_ranks, dropout
):
    expected, weights = train_plainly(directories[dropout])
    first = dict(AutoModelForCausalLM.from_pretrained(directories[dropout]).named_parameters())
    for found in by_ranks(num_ranks):
        steps, own, _ = found[dropout]
        for (rate, loss), (expected_rate, expected_loss) in zip(steps, expected, strict=True):
            assert rate == pytest.approx(expected_rate, rel=1e-12)
            assert loss == pytest.approx(expected_loss, rel=1e-4)
        assert own.keys() == weights.keys()
        # Adam divides a gradient by its own size; that of a key's bias is nothing but rounding noise.
        for name in [name for name in own if not name.endswith("k_proj.bias")]:
            moved = (weights[name] - first[name]).abs().mean()
            assert moved > 1e-4, name
            assert (own[name] - weights[name]).abs().mean() < 0.05 * moved, name


def test_dropout_acts_in_training_only(by_ranks):
    for found in by_ranks(2):
        assert found[0.0][0][0][1] != pytest.approx(found[0.3][0][0][1], rel=1e-3)
        assert all(repeats for _, _, repeats in found.values())


def repeat_a_batch(directory, dtype, kind):
    """Take the same step again and again; return losses, and which parameters moved."""
    config = AdamWConfig(learning_rate=1e-3)
    engine = start(directory, 2, dtype, kind and peft_config(kind), config)
    before = gathered(engine)
    losses = [engine.train_batch(make_batch(0), classification_loss) for _ in range(NUM_STEPS)]
    after = gathered(engine)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    return losses, moved, {p.name for p in engine.weights.adapter_parameters}, set(before)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("fp32", None), ("bf16", None), ("fp32", "lora"), ("bf16", "prefix")]
)
def test_the_loss_falls_and_an_adapter_moves_alone(directories, dtype, kind):
    for losses, moved, adapter, everything in run_ranks(repeat_a_batch, 2, directories[0.0], dtype, kind):
        assert losses[-1] < losses[0]
        if kind is not None:
            assert adapter
            assert moved == adapter
        elif dtype == "fp32":
            assert moved == everything
        else:
            assert len(moved) > len(everything) / 2  # bf16 keeps small changes in the fp32 copy only


def save_and_go_on(directory, root, num_ranks):
    engine = start(directory, num_ranks)
    first = train(engine, 2)
    engine.save_training_state(root)
    rest = train(engine, 2)
    fresh = start(directory, num_ranks)
    fresh.load_training_state(root, 2)
    again = train(fresh, 2)
    same = all(
        torch.equal(a, b) for a, b in zip(gathered(engine).values(), gathered(fresh).values(), strict=True)
    )
    return first, rest, again, same, fresh.global_steps


def test_a_training_state_loaded_again_goes_on_bit_for_bit(directories, tmp_path):
    for first, rest, again, same, step in run_ranks(save_and_go_on, 2, directories[0.3], tmp_path, 2):
        assert (rest, step) == (again, NUM_STEPS)
        assert first != rest
        assert same


def not_finite(logits, batch):
    return logits[:, 0] * float("nan")


def without_gradient(logits, batch):
    return (logits.argmax(dim=1) != batch.labels["label"]).float()


def break_step(directory, function, num_micro_batches):
    """Return the kind and text of the error of a step, and whether the weights are as before."""
    engine = start(directory, 2)
    before = gathered(engine)
    try:
        engine.train_batch(make_batch(0, num_micro_batches), function)
    except (DivergenceError, UserError) as error:
        same = all(torch.equal(a, b) for a, b in zip(before.values(), gathered(engine).values(), strict=True))
        return type(error), str(error), same, engine.global_steps


@pytest.mark.parametrize(
    ("function", "num_micro_batches", "kind", "text"),
    [
        (not_finite, 4, DivergenceError, "loss of step 0 is not finite; got: nan"),
        (without_gradient, 4, UserError, "adamw needs a loss with a gradient"),
        (classification_loss, 3, UserError, "cannot be shared evenly; got: 3"),
    ],
    ids=["not finite", "no gradient", "uneven"],
)
def test_a_step_that_cannot_be_done_changes_no_weight(directories, function, num_micro_batches, kind, text):
    for found, message, same, step in run_ranks(break_step, 2, directories[0.0], function, num_micro_batches):
        assert found is kind
        assert text in message
        assert (same, step) == (True, 0)
