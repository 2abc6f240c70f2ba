"""Exports that the hub's own client uploads to a stand-in of the part of the hub's API that it calls."""

from __future__ import annotations

import base64
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from commands import assert_one_error, python, run, run_forked_well, run_well
from own_data import own_values, write_byte_model, write_tickets

TOKEN = "hf_writer"


class Hub(ThreadingHTTPServer):
    """A hub that knows one token. It holds the files of each repository, and whether it is private."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Requests)
        self.files, self.private = {}, {}

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"


class Requests(BaseHTTPRequestHandler):
    """The requests of whoami, create_repo and create_commit, for files that git stores without LFS."""

    def do_GET(self):
        if self.path == "/api/whoami-v2":
            return self.answer({"type": "user", "name": "me"})
        return self.answer({"error": "there is no such repository"}, code=404)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            if asked["name"] == "taken":
                return self.answer({"error": "no"}, code=403)
            self.server.private[f"me/{asked['name']}"] = asked.get("visibility") == "private"
            return self.answer({"url": f"{self.server.address}/me/{asked['name']}"})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        repository, _, action = self.path.removeprefix("/api/models/").removesuffix("/main").rpartition("/")
        if action == "preupload":
            files = [file["path"] for file in json.loads(body)["files"]]
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            return self.answer({"files": [{"path": path, **plain} for path in files]})
        assert action == "commit", self.path
        lines = [json.loads(line) for line in body.splitlines()]
        self.server.files[repository] = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for line in lines
            if line["key"] == "file"
        }
        commit = {"commitOid": "c0", "commitUrl": f"{self.server.address}/{repository}/commit/c0"}
        return self.answer({"success": True, **commit})

    def answer(self, content, code=200):
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            content, code = {"error": "Invalid token"}, 401
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        """Nothing: the standard error is the test's."""


@contextmanager
def hub():
    with Hub() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory with a base model, and a finished run on it with its pack."""
    directory = tmp_path_factory.mktemp("push")
    values = own_values(
        write_byte_model(directory / "model"),
        train=str(write_tickets(directory / "tickets.csv")),
        prompt="{text}\nTopic:",
        label_field="topic",
        labels=["billing", "bug", "shipping"],
    )
    (directory / "recipe.json").write_text(json.dumps(values))
    run_forked_well(["--config", directory / "recipe.json", f"run_dir={directory / 'run'}", "train.steps=2"])
    run_forked_well(["--run", directory / "run", "--out", directory / "run.tar.gz"], program="pack.py")
    return directory


def export(
    root, name, *more, address="http://127.0.0.1:9", token=TOKEN, runner=run, source="run", **variables
):
    arguments = [f"--{source}", root / ("run" if source == "run" else "run.tar.gz"), "--out", root / name]
    variables = {"HF_ENDPOINT": address, "HF_HOME": str(root / "home"), "HF_HUB_OFFLINE": "0", **variables}
    token = {"HF_TOKEN": token} if token else {}
    return runner(python(*arguments, *more, program="export.py"), **token, **variables)


def test_a_model_is_uploaded_as_it_was_written(root):
    with hub() as server:
        out = export(
            root, "plain", "--push-to-hub", "me/tickets", "--private", address=server.address, runner=run_well
        ).out
    written = {
        path.relative_to(root / "plain").as_posix(): path.read_bytes()
        for path in (root / "plain").rglob("*")
        if path.is_file()
    }
    assert {"README.md", "config.json", "model-00001.safetensors", "lezo_manifest.json"} <= written.keys()
    assert server.files == {"me/tickets": written}
    assert server.private == {"me/tickets": True}
    assert out.splitlines()[-1] == f"{server.address}/me/tickets/commit/c0"


def test_a_pack_is_uploaded_with_its_model(root):
    with hub() as server:
        more = ("--push-to-hub", "me/packed", f"model.path={root / 'model'}")
        export(root, "packed", *more, address=server.address, runner=run_well, source="pack")
    assert server.files["me/packed"].pop("run.tar.gz") == (root / "run.tar.gz").read_bytes()
    assert "README.md" in server.files["me/packed"]
    assert server.private == {"me/packed": False}


@pytest.mark.parametrize(
    ("repository", "settings", "fragments"),
    [
        ("me/../tickets", {}, ["--push-to-hub names no repository; got: me/../tickets"]),
        ("me/tickets", {"token": None}, ["--push-to-hub needs a token", "hf auth login"]),
        ("me/tickets", {}, ["cannot upload to me/tickets", "refused"]),
        ("me/tickets", {"HF_HUB_OFFLINE": "1"}, ["cannot upload to me/tickets", "offline mode"]),
    ],
    ids=["name", "token", "network", "offline"],
)
def test_an_upload_that_cannot_begin_is_refused_before_the_export(repository, settings, fragments, root):
    failed = export(root, "refused", "--push-to-hub", repository, **settings)
    assert_one_error(failed, 2, *fragments)
    assert not (root / "refused").exists()


def test_an_upload_that_is_refused_leaves_the_export(root):
    with hub() as server:
        wrong = export(root, "wrong", "--push-to-hub", "me/x", address=server.address, token="hf_reader")
        assert_one_error(wrong, 2, "cannot upload to me/x", "Invalid user token")
        assert not (root / "wrong").exists()
        failed = export(root, "kept", "--push-to-hub", "me/taken", address=server.address)
    assert_one_error(failed, 2, "cannot upload to me/taken", "403", "`hf upload` takes its directory")
    assert (root / "kept" / "README.md").is_file()
