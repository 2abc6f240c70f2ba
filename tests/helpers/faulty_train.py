"""launch/train.py with a `faults.Fault` in the file operations of Python and safetensors."""

import errno
import json
import os
import re
import runpy
import shutil  # noqa: F401  (it looks at os's own functions when it is imported)
import signal
from pathlib import Path

from lezo_ds.checkpoints import snapshots
from lezo_ds.sharding import weights

VARIABLE = "LEZO_TEST_FAULT"
TRAIN = Path(__file__).resolve().parents[2] / "launch" / "train.py"
OPERATIONS = ("write", "fsync", "ftruncate", "replace", "rename", "unlink", "rmdir", "mkdir")


class Injector:
    def __init__(self, fault):
        self._fault = fault
        self._root = os.path.realpath(fault["root"])
        self._seen = 0
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._log = os.open(fault["log"] or os.devnull, flags)
        self._write = os.write

    def install(self):
        for name in OPERATIONS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        snapshots.save_file = self._wrapped("save", snapshots.save_file)
        apply = weights.ShardedWeights.apply

        def logged_apply(*arguments):
            self._note("apply", "")
            return apply(*arguments)

        weights.ShardedWeights.apply = logged_apply

    def _wrapped(self, name, real):
        def operation(*arguments, **keywords):
            path = _path_of(name, arguments, keywords)
            if path != self._root and not path.startswith(self._root + os.sep):
                return real(*arguments, **keywords)
            relative = os.path.relpath(path, self._root)
            self._note(name, relative)
            is_due = self._is_due(name, relative)
            if is_due and self._fault["moment"] == "within":
                _do_half(name, real, arguments, path)
            if is_due and self._fault["moment"] != "after":
                self._strike()
            result = real(*arguments, **keywords)
            if is_due:
                self._strike()
            if name == "fsync":
                self._note("synced", relative)
            return result

        return operation

    def _note(self, name, relative):
        self._write(self._log, f"{name} {relative}\n".encode())

    def _is_due(self, name, relative):
        fault = self._fault
        if fault["lasts"] and self._seen >= fault["number"]:
            return True
        matches = re.fullmatch(fault["operation"], name) and re.fullmatch(fault["path"], relative)
        self._seen += bool(matches)
        return bool(matches) and self._seen == fault["number"]

    def _strike(self):
        if self._fault["effect"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        number = getattr(errno, self._fault["effect"])
        raise OSError(number, os.strerror(number))


def _path_of(name, arguments, keywords):
    """Return the absolute path that an operation changes; of a rename, the new one."""
    subject = arguments[1] if name in ("replace", "rename", "save") else arguments[0]
    if isinstance(subject, int):
        return _opened_path(subject).removesuffix(" (deleted)")
    if (directory := keywords.get("dir_fd")) is not None:
        return f"{_opened_path(directory)}/{subject}"
    path = Path(subject)
    return str(path.parent.resolve() / path.name)


def _opened_path(descriptor):
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def _do_half(name, real, arguments, path):
    """Leave what a write, or the flush of a file, that was cut off in the middle leaves."""
    if name == "write":
        real(arguments[0], arguments[1][: len(arguments[1]) // 2])
        return
    if name == "save":
        real(*arguments)
    os.truncate(path, Path(path).stat().st_size // 2)


if __name__ == "__main__":
    if os.environ["RANK"] == "0":
        Injector(json.loads(os.environ[VARIABLE])).install()
    runpy.run_path(str(TRAIN), run_name="__main__")
