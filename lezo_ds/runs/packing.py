"""A run as one small file without weights. Together with the base model it gives the tuned model.

A pack is a gzipped tar archive of a run directory's small files, with pack.json first. The same run gives the
same bytes. A pack is not trusted: only known names are taken from it, only plain files, and nothing is
written unless every file has the hash that pack.json gives.
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
"""Version of the format; it rises when a reader of old packs would misread new ones."""

MAX_BYTES = 256 << 20
"""Largest unpacked size in bytes. The journal of 20,000 steps has about 8 MB."""

_CHUNK_BYTES = 1 << 20
_MANIFEST = "pack.json"
_REQUIRED = ("config.yaml", "environment.json", "journal.jsonl")
_KNOWN = (_MANIFEST, *_REQUIRED, "results.json")
_FIRST_VALUES = re.compile(
    r"snapshots/step-00000000/(lezo_manifest\.json|prefix\.safetensors|prefix_config\.json"
    r"|low_bits/(model-00001\.safetensors|model\.safetensors\.index\.json))"
)
"""The first values of a prefix. They come from a forward pass, which another machine rounds differently."""


@dataclass(frozen=True)
class Pack:
    """What pack.json says.

    Attributes:
        base_model: hub id or directory from which the run loaded its base model.
        model_fingerprint: digest of the base weights.
        digests: digests of the tuned weights that the run knew, by the number of updates.
        files: SHA-256 of each file, by name.
        format_version: version of the format.
    """

    base_model: str
    model_fingerprint: str
    digests: dict[str, str]
    files: dict[str, str]
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        texts = [self.base_model, self.model_fingerprint]
        for table in (self.digests, self.files):
            texts += [*table.keys(), *table.values()] if isinstance(table, dict) else [table]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a value has another type than text")


def pack_run(path: Path, target: Path) -> int:
    """Write a LeZO or MeZO run, finished or not, to one file and return its size in bytes.

    Args:
        path: directory of the run.
        target: file to write, such as run.tar.gz; it is replaced if it exists.

    Raises:
        UserError: there is no such run, its journal does not hold all of it, or `target` cannot be written.
        JournalError: its journal is damaged.
    """
    run = read_run(path)
    if run.config.method not in ZEROTH_ORDER:
        raise UserError(
            f"run {path} cannot be packed",
            got=f"method {run.config.method}",
            expected="lezo or mezo, whose journal holds everything that was learned",
            fix="share what launch/export.py writes",
        )
    contents = _read_files(path)
    pack = Pack(run.config.model.path, run.header.model_fingerprint, recorded_digests(run), _hashes(contents))
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
    """Write the run directory that a pack holds. Nothing is written unless the whole pack is sound.

    Args:
        file: the pack.
        directory: existing directory to write to.

    Raises:
        UserError: the file is not a pack, is damaged, or has another format version.
    """
    try:
        contents = _from_archive(file)
        values = json.loads(contents.pop(_MANIFEST, b"{}"))
        version = values.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(f"format version {version!r}")
        pack = Pack(**values)
        if _hashes(contents) != pack.files or not contents.keys() >= set(_REQUIRED):
            raise ValueError("files are missing or differ from those that were packed")
        if not isinstance(json.loads(contents["environment.json"]), dict):
            raise ValueError("environment.json is not a JSON object")
    except (OSError, EOFError, zlib.error, tarfile.TarError, RecursionError) as error:
        raise _refusal(file, f"{type(error).__name__}: {error}") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise _refusal(file, str(error)) from error
    for name, content in contents.items():
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, content)
    return pack


def recorded_digests(run: RecordedRun) -> dict[str, str]:
    """Return the digests of weights in the results and snapshots of a zeroth-order run, by step."""
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


def _hashes(contents: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def _read_files(path: Path) -> dict[str, bytes]:
    first = snapshot_path(path / "snapshots", 0)
    found = [*(path / name for name in _KNOWN), *sorted(first.rglob("*"))]
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
    return name in _KNOWN or _FIRST_VALUES.fullmatch(name) is not None


def _to_archive(contents: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)  # owned by nobody, from 1970: nothing tells this machine
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), mtime=0)


def _from_archive(file: Path) -> dict[str, bytes]:
    """Return the files of an archive, all of which must be known.

    Raises:
        ValueError, OSError, EOFError, zlib.error, tarfile.TarError, RecursionError: the archive is malformed.
    """
    unpacked = io.BytesIO()
    with gzip.open(file) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            unpacked.write(chunk)
            if unpacked.tell() > MAX_BYTES:
                raise ValueError(f"it unpacks to more than {MAX_BYTES} bytes")
    num_bytes = unpacked.tell()
    unpacked.seek(0)
    contents: dict[str, bytes] = {}
    with tarfile.open(fileobj=unpacked, mode="r:") as archive:
        for member in archive:
            tarfile.data_filter(member, ".")
            # A sparse member names any size; only its holes would be in the archive.
            is_plain = member.isreg() and not member.issparse()
            is_whole = 0 <= member.size <= num_bytes - member.offset_data
            if not (is_plain and is_whole and _is_known(member.name)) or member.name in contents:
                raise ValueError(f"{member.name[:100]!r} in it")
            content = archive.extractfile(member)
            assert content is not None, "a regular file"
            contents[member.name] = content.read()
    return contents


def _refusal(file: Path, got: str) -> UserError:
    return UserError(
        f"{file} is not a pack that can be used",
        got=got,
        expected=f"a file that launch/pack.py wrote, of format version {FORMAT_VERSION}",
        fix="copy it again, or use the version of this package that wrote it",
    )
