"""A run as one small file: its journal and its facts, no weights. With the base model it is the tuned model.

A pack is a gzipped tar of a run directory's small files, pack.json first. The same run gives the same bytes.
Unpacking writes only names that are known here, and only if all of them have their hashes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lezo_ds.config import ZEROTH_ORDER
from lezo_ds.errors import UserError
from lezo_ds.files import write_atomically
from lezo_ds.model.snapshots import MANIFEST as SNAPSHOT_MANIFEST
from lezo_ds.model.snapshots import snapshot_path, snapshot_steps
from lezo_ds.runs.restore import RecordedRun, read_run

FORMAT_VERSION = 1
"""Of packs; raised when a reader of the old ones would misread the new ones."""

MAX_BYTES = 256 << 20
"""Of all files of a pack together; a journal of 20,000 steps has about 8 MB."""

_MANIFEST = "pack.json"
_REQUIRED = ("config.yaml", "environment.json", "journal.jsonl")
_OPTIONAL = ("results.json",)
_FIRST_VALUES = re.compile(
    r"snapshots/step-00000000/(lezo_manifest\.json|prefix\.safetensors|prefix_config\.json"
    r"|low_bits/(model-00001\.safetensors|model\.safetensors\.index\.json))"
)
"""What a prefix starts from: it comes from a forward pass, which another machine rounds otherwise."""


@dataclass(frozen=True)
class Pack:
    """What a pack says of itself.

    Attributes:
        base_model: hub id or directory that the run had its base model from.
        model_fingerprint: digest of the base weights.
        digests: of the tuned weights, by the number of updates they have seen; those that the run knew.
        files: SHA-256 of each file, by name.
        format_version: of the pack.
    """

    base_model: str
    model_fingerprint: str
    digests: dict[str, str]
    files: dict[str, str]
    format_version: int = FORMAT_VERSION


def pack_run(path: Path, target: Path) -> int:
    """Write a run of LeZO or MeZO, finished or not, to one file; return its size in bytes.

    Args:
        path: the run's directory.
        target: file to write, such as run.tar.gz; replaced if it exists.

    Raises:
        UserError: no such run, one that its journal does not hold, or `target` cannot be written.
        JournalError: its journal is damaged.
    """
    run = read_run(path)
    if run.config.method not in ZEROTH_ORDER:
        raise UserError(
            f"run {path} cannot be packed",
            got=f"method {run.config.method}",
            expected="lezo or mezo: the journal then holds all that was learned",
            fix="share what launch/export.py writes",
        )
    contents = _read_files(path)
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    pack = Pack(run.config.model.path, run.header.model_fingerprint, recorded_digests(run), hashes)
    text = json.dumps(asdict(pack), indent=1, sort_keys=True) + "\n"
    packed = _to_archive({_MANIFEST: text.encode(), **contents})
    try:
        write_atomically(target, packed)
    except OSError as error:
        raise UserError(
            f"cannot write {target}",
            got=str(error),
            expected="a file in a directory that exists",
            fix="give another --out",
        ) from error
    return len(packed)


def unpack_run(file: Path, directory: Path) -> Pack:
    """Write the run directory that a pack holds; nothing is written unless all of it is sound.

    Args:
        file: the pack.
        directory: to make, or to add to.

    Raises:
        UserError: the file is not a pack, is damaged, or is of another format version.
    """
    contents = _from_archive(file)
    try:
        values = json.loads(contents.pop(_MANIFEST))
        if values["format_version"] != FORMAT_VERSION:
            raise _refusal(file, f"format version {values['format_version']}")
        pack = Pack(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise _refusal(file, f"{_MANIFEST}: {type(error).__name__}: {error}") from error
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    if hashes != pack.files or not contents.keys() >= set(_REQUIRED):
        raise _refusal(file, "files that are missing, or are not those that were packed")
    for name, content in contents.items():
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, content)
    return pack


def recorded_digests(run: RecordedRun) -> dict[str, str]:
    """Return the digests of weights that a zeroth-order run's results and snapshots name, by step."""
    directory, found = run.directory, {}
    for step in snapshot_steps(directory.snapshots):
        manifest = _read_json(snapshot_path(directory.snapshots, step) / SNAPSHOT_MANIFEST)
        if manifest and manifest["base"] == run.header.model_fingerprint:
            found[str(step)] = str(manifest["digest"])
    if results := _read_json(directory.results):
        step = results["best_step"] if results["finished"] else results["steps"]
        found[str(step)] = str(results["weights_digest"])
    return found


def _read_json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.is_file() else None


def _read_files(path: Path) -> dict[str, bytes]:
    found = [path / name for name in (*_REQUIRED, *_OPTIONAL)]
    first = snapshot_path(path / "snapshots", 0)
    found += sorted(file for file in first.rglob("*") if file.is_file())
    names = {file.relative_to(path).as_posix(): file for file in found if file.is_file()}
    missing = [name for name in _REQUIRED if name not in names]
    unknown = [name for name in names if not _is_known(name)]
    if missing or unknown:
        raise UserError(
            f"run {path} cannot be packed",
            got=f"without {', '.join(missing)}" if missing else f"unknown files: {', '.join(unknown)}",
            expected="the files that a run writes",
            fix="start the run's command again",
        )
    return {name: file.read_bytes() for name, file in names.items()}


def _is_known(name: str) -> bool:
    return name in (_MANIFEST, *_REQUIRED, *_OPTIONAL) or _FIRST_VALUES.fullmatch(name) is not None


def _to_archive(contents: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)  # of nobody, from 1970: nothing of this machine
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), mtime=0)


def _from_archive(file: Path) -> dict[str, bytes]:
    """Return the known files of an archive; anything else in it is refused."""
    contents: dict[str, bytes] = {}
    try:
        with gzip.open(file) as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise _refusal(file, f"more than {MAX_BYTES} bytes")
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for member in archive:
                if member.type != tarfile.REGTYPE or not _is_known(member.name) or member.name in contents:
                    raise _refusal(file, f"{member.name!r} in it")
                content = archive.extractfile(member)
                assert content is not None, "a regular file"
                contents[member.name] = content.read()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise _refusal(file, f"{type(error).__name__}: {error}") from error
    return contents


def _refusal(file: Path, got: str) -> UserError:
    return UserError(
        f"{file} is not a pack that can be used",
        got=got,
        expected=f"a file that launch/pack.py wrote, of format version {FORMAT_VERSION}",
        fix="copy it again, or use the version of this package that wrote it",
    )
