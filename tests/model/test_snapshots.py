import json
import shutil
from pathlib import Path

import pytest
import torch
from assets import change_json
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_adapters import whole_batch
from tiny_runs import VOCABULARY, full_weights, start_engine, train
from transformers import AutoModelForCausalLM

from lezo_ds.checkpoints import snapshots
from lezo_ds.checkpoints.snapshots import MANIFEST, read_manifest, snapshot_path
from lezo_ds.errors import LezoError
from lezo_ds.files import sha256_file

pytestmark = pytest.mark.distributed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _train_and_save(model, root, dtype, num_ranks):
    """Train with two snapshots, and one step more; return what the snapshots must hold."""
    engine = start_engine(model, dtype, num_ranks)
    records, weights, logits, digests = [], None, None, []
    for step in (2, 4):
        records += train(engine, step - engine.global_steps, num_ranks)
        assert engine.save_checkpoint(root) == snapshot_path(root, step)
        weights, logits = full_weights(engine), engine.forward(whole_batch(VOCABULARY))
        digests.append(engine.weights.digest())
    records += train(engine, 1, num_ranks)
    digests.append(engine.weights.digest())
    return records, weights, logits, digests


@pytest.fixture(scope="module")
def saved(opt_directory, tmp_path_factory):
    """{dtype: (folder of snapshots, what `_train_and_save` returned)}, on 2 ranks."""
    found = {}
    for dtype in DTYPES:
        root = tmp_path_factory.mktemp(dtype) / "snapshots"
        found[dtype] = (root, run_ranks(_train_and_save, 2, opt_directory, root, dtype, 2)[0])
    return found


@pytest.fixture
def copied(saved, tmp_path):
    """The snapshots in fp32, to be damaged; and what they hold."""
    root, held = saved["fp32"]
    shutil.copytree(root, tmp_path / "snapshots")
    return tmp_path / "snapshots", held


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_transformers_opens_a_snapshot_whose_manifest_names_its_files_and_digest(saved, dtype):
    root, (_, weights, logits, digests) = saved[dtype]
    directory = snapshot_path(root, 4)
    manifest = read_manifest(directory)
    assert (manifest["step"], manifest["digest"]) == (4, digests[1])
    files = {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}
    assert set(manifest["files"]) == files - {MANIFEST}
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    assert model.dtype == DTYPES[dtype]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    with torch.no_grad():
        torch.testing.assert_close(model(**whole_batch(VOCABULARY).inputs).logits, logits)
    low_bits = directory / snapshots.LOW_BITS_DIRECTORY / "model-00001.safetensors"
    stored = load_file(low_bits) if low_bits.is_file() else {}
    assert {f"{name}.low" for name in stored} == {name for name in weights if name.endswith(".low")}
    assert bool(stored) == (dtype == "bf16")
    assert all(torch.equal(tensor, weights[f"{name}.low"]) for name, tensor in stored.items())


def _save_in_turn(model, root, fails):
    """Write a snapshot of several files. Return what went wrong, and what this rank has written."""
    snapshots.MAX_FILE_BYTES = 20_000
    engine = start_engine(model, num_ranks=2)
    save = snapshots.save_file
    written = []

    def save_some(tensors, path, **options):
        if fails and engine.global_rank == 1:
            raise OSError("No space left on device")
        written.append(path.name)
        save(tensors, path, **options)

    snapshots.save_file = save_some
    try:
        engine.save_checkpoint(root)
    except LezoError as error:
        return str(error), written
    return "", written


def test_ranks_write_files_in_turn_and_all_report_what_one_cannot_write(opt_directory, tmp_path):
    (_, first), (_, second) = run_ranks(_save_in_turn, 2, opt_directory, tmp_path / "good", False)
    directory = snapshot_path(tmp_path / "good", 0)
    files = sorted(directory.glob("*.safetensors"))
    names = [file.name for file in files]
    assert (first, second) == (names[::2], names[1::2])
    assert all(len(load_file(file)) == 1 or file.stat().st_size < 25_000 for file in files)
    assert set(names) < set(read_manifest(directory)["files"])
    written = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    base = AutoModelForCausalLM.from_pretrained(opt_directory).state_dict()
    assert all(torch.equal(value, base[name]) for name, value in written.items())
    for message, _ in run_ranks(_save_in_turn, 2, opt_directory, tmp_path / "bad", True):
        assert "No space left on device (on rank 1); fix: free space" in message
    assert not list((tmp_path / "bad").iterdir())


def _flip_a_byte(directory):
    path = next(directory.glob("model-*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)


DEVICE = {"/dev/zero": {"bytes": 0}}
DAMAGES = {
    "a flipped bit": _flip_a_byte,
    "a missing file": lambda directory: (directory / "config.json").unlink(),
    "half a manifest": lambda directory: (directory / MANIFEST).write_text('{"files": {'),
    "a deep manifest": lambda directory: (directory / MANIFEST).write_text("[" * 9000),
    "no file": lambda directory: change_json(directory / MANIFEST, files=DEVICE),
    "not yet renamed": lambda path: path.rename(path.with_name(f".{path.name}.tmp")),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_snapshot_is_passed_over_for_the_one_before(copied, damage):
    root, _ = copied
    assert [snapshots.newest_snapshot(root, step) for step in (1, 2, 3, 4, 5)] == [None, 2, 2, 4, 4]
    DAMAGES[damage](snapshot_path(root, 4))
    assert snapshots.newest_snapshot(root, 5) == 2
    DAMAGES[damage](snapshot_path(root, 2))
    assert snapshots.newest_snapshot(root, 5) is None


def test_a_snapshot_that_cannot_be_replaced_stays(opt_directory, tmp_path, monkeypatch):
    engine = start_engine(opt_directory)
    directory = engine.save_checkpoint(tmp_path)
    rename = Path.replace

    def fail(path, target):
        if path.name == ".step-00000000.tmp":
            raise OSError("the file system is read-only")
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(LezoError, match="cannot be written: the file system is read-only; fix: "):
        engine.save_checkpoint(tmp_path)
    assert read_manifest(directory) is not None
    assert list(tmp_path.iterdir()) == [directory]


def _resume(model, root, records):
    engine = start_engine(model, num_ranks=2)
    try:
        engine.load_checkpoint(root, records)
    except LezoError as error:
        return str(error)
    return engine.weights.digest()


def test_a_damaged_snapshot_is_passed_over_and_wrong_weights_are_refused(copied, opt_directory):
    root, (records, _, _, digests) = copied
    _flip_a_byte(snapshot_path(root, 4))
    assert run_ranks(_resume, 2, opt_directory, root, records) == [digests[2]] * 2
    change_json(snapshot_path(root, 2) / MANIFEST, digest="0" * 32)
    for message in run_ranks(_resume, 2, opt_directory, root, records):
        assert f"have digest {digests[0]}, not that of the manifest, 0000" in message


@pytest.mark.parametrize(
    ("keep", "protected", "left"), [(2, (), [20, 30]), (1, (10,), [10, 30]), (9, (), [10, 20, 30])]
)
def test_the_newest_and_the_protected_snapshots_are_kept(tmp_path, keep, protected, left):
    (tmp_path / ".step-00000040.tmp").mkdir()
    (tmp_path / "step-of-another-kind").mkdir()
    for step in (10, 20, 30):
        weights = snapshot_path(tmp_path, step) / "model.safetensors"
        weights.parent.mkdir()
        weights.write_bytes(b"weights")
        facts = {weights.name: {"bytes": 7, "sha256": sha256_file(weights)}}
        weights.with_name(MANIFEST).write_text(json.dumps({"files": facts}))
    snapshots.prune_snapshots(tmp_path, keep, protected)
    assert snapshots.snapshot_steps(tmp_path) == left
    expected = {*(f"step-000000{step}" for step in left), "step-of-another-kind"}
    assert {path.name for path in tmp_path.iterdir()} == expected


def test_neither_weights_nor_code_of_the_base_model_are_copied(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    kept = {"config.json", "LICENSE", "README.md", "chat_template.jinja", "merges.txt"}
    kept |= {"tokenizer.json", "tokenizer.model", "additional_chat_templates/rag.jinja"}
    others = {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "model.pth"}
    others |= {"x.pkl", "modeling_evil.py", "run.sh", "folder/x.json", MANIFEST}
    for name in (*kept, *others):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("text")
    snapshots._copy_companions(source, target)
    assert {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()} == kept
