"""What a run can be, in pairs: each is killed, resumed, replayed, exported, scored and compared."""

import itertools
import json
import shutil
import signal
from dataclasses import dataclass, fields

import pytest
import torch
from assets import recipe_values, write_data, write_reader
from commands import lezo, run_words, scores_of
from faults import Fault, run_faulty
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from reference import Reference, estimate_groups, probes_of
from run_ends import end, num_steps, records_of, results_of
from thorough import thorough
from transformers import AutoModelForCausalLM

from lezo_ds.checkpoints.snapshots import read_manifest, snapshot_path
from lezo_ds.config import config_from_dict
from lezo_ds.data.task_data import load_task_data
from lezo_ds.forward.adapters import load_prefix
from lezo_ds.forward.adapters.lora import uniform
from lezo_ds.sharding.parameters import parameter_ids
from lezo_ds.zo.keys import adapter_key
from lezo_ds.zo.records import StepRecord

pytestmark = pytest.mark.distributed

STEPS = 6
SCALE = 1e-2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LORA = {"rank": 3, "alpha": 5.0, "targets": ["q_proj", "v_proj"]}


@dataclass(frozen=True)
class Case:
    """The settings of a run; `probes` is the number of probes of a forward pass."""

    adapter: str
    dtype: str
    precision: str
    estimator: str
    policy: str
    distribution: str
    partition: str
    decay: str
    probes: str
    family: str
    more: str

    @property
    def directions(self):
        return 2 if self.estimator == "spsa" else 4

    def keys(self):
        return [
            f"peft.kind={self.adapter}",
            f"peft.lora_rank={LORA['rank']}",
            f"peft.lora_alpha={LORA['alpha']}",
            "peft.prefix_length=3",
            f"model.dtype={self.dtype}",
            f"zo.update_precision={self.precision}",
            f"zo.estimator={WORDS.get(self.estimator, self.estimator)}",
            f"zo.directions={self.directions}",
            f"zo.probes_per_pass={self.probes}",
            f"zo.perturbation_scale={SCALE}",
            f"zo.layer_policy={WORDS.get(self.policy, self.policy)}",
            f"zo.noise_distribution={self.distribution}",
            f"partition_size={WORDS[self.partition]}",
            f"zo.weight_decay={WORDS[self.decay]}",
            *MORE[self.more],
        ]


MORE = {
    "-": (),
    "blocks": ("zo.only_blocks=true",),
    "falling": ("zo.lr_schedule=linear", "zo.warmup_steps=2"),
}
WORDS = {"es": "evolution-strategies", "weighted": "weighted_groups:Weighted"}
WORDS |= {"replicas": "1", "shared": "null", "decays": "10", "-": "0"}


def cases(rows):
    """Return the cases of a table, in the order of the fields of `Case`."""
    return [Case(*row.split()) for row in rows.strip().splitlines()]


CASES = cases("""
none    fp32  fp32_master  es         uniform   rademacher  replicas  decays  4  opt    -
lora    fp32  stochastic   spsa       fixed     rademacher  shared    -       2  opt    -
prefix  bf16  stochastic   spsa       uniform   normal      replicas  -       1  opt    -
lora    bf16  stochastic   es         weighted  normal      shared    -       1  llama  -
none    fp32  stochastic   one-sided  weighted  rademacher  replicas  -       1  opt    -
prefix  fp16  stochastic   es         fixed     rademacher  shared    -       1  opt    -
lora    bf16  fp32_master  one-sided  fixed     normal      shared    decays  6  opt    -
prefix  fp16  fp32_master  one-sided  uniform   normal      shared    decays  1  llama  -
lora    fp16  stochastic   fzoo       uniform   rademacher  replicas  decays  1  opt    falling
none    fp16  fp32_master  spsa       weighted  normal      shared    decays  1  opt    -
prefix  fp32  fp32_master  fzoo       weighted  normal      shared    -       2  opt    falling
none    bf16  stochastic   fzoo       fixed     rademacher  replicas  -       1  opt    blocks
""")
COLUMNS = [field.name for field in fields(Case)[:8]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        family: write_reader(root / family, family=family, odd=True) for family in ("opt", "llama")
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def test_the_cases_have_every_pair_of_settings():
    def pairs(rows):
        found = set()
        for row in rows:
            found.update(itertools.combinations(zip(COLUMNS, row, strict=True), 2))
        # In fp32, an update is stored as it is.
        return {pair for pair in found if (pair[0], pair[1][0]) != (("dtype", "fp32"), "precision")}

    rows = [[getattr(case, column) for column in COLUMNS] for case in CASES]
    assert pairs(rows) == pairs(itertools.product(*map(set, zip(*rows, strict=True))))


def recipe(case, models, data, run_dir):
    values = recipe_values(models[case.family], data)
    values["run_dir"] = str(run_dir)
    values["data"] |= {"num_train": 20, "num_dev": 3, "num_test": 5}
    values["train"] |= {"steps": STEPS, "micro_batch_size": 4, "eval_every": 3, "snapshot_every": 2}
    path = run_dir.with_suffix(".json")
    path.write_text(json.dumps(values))
    config = config_from_dict(values, "the test", case.keys())
    return config, run_words(path, run_dir, *case.keys())


IN_EVERY_RUN = CASES[3]


@pytest.mark.parametrize(
    "case",
    [case if case is IN_EVERY_RUN else thorough(case) for case in CASES],
    ids=lambda c: "-".join(map(str, (getattr(c, n) for n in COLUMNS))),
)
def test_a_run_is_exact_however_it_is_run(case, models, data, tmp_path):
    undisturbed, run_dir, exported = (tmp_path / name for name in ("undisturbed", "run", "out"))
    lezo("train", *recipe(case, models, data, undisturbed)[1])
    config, arguments = recipe(case, models, data, run_dir)

    # Lines after the header: two evaluations, three steps and an evaluation; the next is torn.
    torn = Fault("write", "journal.jsonl", 7, "within")
    assert run_faulty(arguments, torn, num_ranks=2).code == -signal.SIGKILL
    assert num_steps(run_dir) == 3
    lezo("train", *arguments)
    assert end(run_dir) == end(undisturbed)

    start = read_start(case, models, run_dir)
    source = ["--run", run_dir]
    if case.adapter != "prefix":  # whose start is not in the journal
        lezo("export", "--run", run_dir, "--journal", tmp_path / "run.lezo")
        source = ["--journal", tmp_path / "run.lezo", f"model.path={models[case.family]}"]
    for path in (run_dir / "snapshots").glob("step-0*[1-9]"):
        shutil.rmtree(path)
    lezo("export", *source, "--step", "last", "--out", exported, num_ranks=2)
    last = read_manifest(snapshot_path(undisturbed / "snapshots", STEPS))
    manifest = read_manifest(exported)
    assert manifest["digest"] == last["digest"]
    for file, facts in last["files"].items():
        if file.endswith(".safetensors") and "/" not in file:  # an export has no low bits
            assert manifest["files"][file] == facts
    weights = trained_by_reference(case, config, start, records_of(run_dir, StepRecord))
    opened = trained_weights(case, opened_by_its_library(case, models, exported))
    assert weights.keys() == opened.keys()
    for name, expected in weights.items():
        assert torch.equal(opened[name], expected), name

    results = results_of(run_dir)
    score = scores_of("--run", run_dir)
    assert (score["step"], score["score"]) == (results["best_step"], results["test"])
    if case.adapter == "none":
        of_run = scores_of("--run", run_dir, "--step", "last")
        # The last bits of a loss depend on the batches.
        sizes = ["data.num_test=5", f"train.eval_batch_size={config.train.eval_batch_size}"]
        for name in ("path", "num_train", "num_dev"):
            sizes.append(f"data.{name}={getattr(config.data, name)}")
        of_model = scores_of("--model", exported, *sizes)
        for name in ("loss", "score", "num_examples"):
            assert of_run[name] == of_model[name]


def own_name(name):
    return name.removeprefix("base_model.model.").replace(".default.", ".")


def plain_model(case, models):
    return AutoModelForCausalLM.from_pretrained(models[case.family], dtype=torch.float32)


def read_start(case, models, run_dir):
    """Return the model before the first step, in float32, with gradients where it is trained."""
    model = plain_model(case, models)
    if case.adapter == "prefix":
        load_prefix(model, snapshot_path(run_dir / "snapshots", 0))
    if case.adapter == "lora":
        lora = LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules=LORA["targets"])
        inject_adapter_in_model(lora, model)
        ids = parameter_ids([own_name(name) for name, _ in model.named_parameters()])
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                elements = torch.arange(parameter.numel())
                drawn = uniform(adapter_key(0), ids[own_name(name)], elements)
                parameter.data = (drawn * parameter.shape[1] ** -0.5).view(parameter.shape)
    if case.more == "blocks":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers." in name)
    return model


def trained_by_reference(case, config, model, records):
    """Compare the records of all steps with the reference's own; return its trained weights."""
    dtype = DTYPES[case.dtype]
    reference = Reference(model, dtype, case.precision, case.distribution, own_name)
    task = load_task_data(config)
    probes = probes_of(config.zo.estimator, SCALE, case.directions)
    for step, record in enumerate(records):
        batch = task.step_batch(config, step)
        losses = reference.losses(batch, record.key, probes, record.dropped_layers)
        loss, gradients = estimate_groups(config.zo.estimator, SCALE, [losses])
        if case.probes == "1":
            assert record.loss == pytest.approx(loss, rel=1e-14), step
            assert record.projected_grads == pytest.approx(gradients, rel=1e-9), step
        else:
            # The copies of a pass run in one batch: other shapes of products, and other last bits.
            exact = case.dtype == "fp32"
            assert record.loss == pytest.approx(loss, rel=1e-5 if exact else 0.05), step
            near = pytest.approx(gradients, rel=1e-2, abs=1e-3)
            assert not exact or record.projected_grads == near, step
        reference.update(record, config.zo.weight_decay)
    assert len(records) == STEPS
    return reference.stored()


def opened_by_its_library(case, models, exported):
    """Return an exported model as transformers and peft open it."""
    if case.adapter == "none":
        return AutoModelForCausalLM.from_pretrained(exported)
    model = plain_model(case, models).to(DTYPES[case.dtype])
    if case.adapter == "lora":
        options = {"is_trainable": True, "autocast_adapter_dtype": False}
        return PeftModel.from_pretrained(model, exported, **options)
    load_prefix(model, exported)
    return model


def trained_weights(case, model):
    return {
        own_name(name): parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (case.more != "blocks" or "layers." in name)
    }
