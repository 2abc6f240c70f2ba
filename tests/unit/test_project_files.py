"""The files that other programs read: Dockerfile, CITATION.cff and the workflow of GitHub."""

from __future__ import annotations

import fnmatch
import os
import re
import sys

import pytest
import yaml
from assets import REPOSITORY

from lezo_ds import __version__

DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
SETUP = (REPOSITORY / "setup.py").read_text()


def copied():
    """Return what the Dockerfile copies from the repository."""
    return [
        name for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]
    ]


def test_the_image_has_the_files_that_the_package_is_built_from():
    read = set(re.findall(r'Path\("([\w./]+)"\)', SETUP)) | {"setup.py", "pyproject.toml", "LICENSE"}
    needed = {name.partition("/")[0] for name in read} | {"launch", "ds_configs", "constraints.txt"}
    assert set(copied()) == needed
    assert [name for name in copied() if not (REPOSITORY / name).exists()] == []


def test_nothing_else_is_sent_to_the_builder_of_the_image():
    lines = [line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line[:1] != "#"]
    assert lines[0] == "*"
    assert [line.removeprefix("!") for line in lines[1:-1]] == copied()
    assert fnmatch.fnmatch("lezo_ds/zo/__pycache__", lines[-1])


def test_the_image_has_the_python_and_the_versions_that_are_tested():
    (base,) = re.findall(r"^FROM (.+)$", DOCKERFILE, re.MULTILINE)
    assert base.startswith("python:{}.{}-slim".format(*sys.version_info))
    (command,) = re.findall(r'pip install (.+) "\.\[(\w+)\]"', DOCKERFILE)
    assert "--constraint constraints.txt" in command[0]
    assert f'"{command[1]}": [' in SETUP
    assert not re.search(r"^(USER|ENTRYPOINT|VOLUME)", DOCKERFILE, re.MULTILINE)


TEXT = r".+"
VERSION = re.escape(__version__)
CITATION = {
    "cff-version": r"1\.2\.0",
    "message": TEXT,
    "type": "software",
    "title": TEXT,
    "version": VERSION,
    "license": "Apache-2.0",
}
"""Keys of the Citation File Format that this file has, and what they hold."""


def assert_authors(authors):
    assert authors
    for author in authors:
        assert author.keys() in ({"name"}, {"family-names", "given-names"})
        assert all(isinstance(value, str) and value for value in author.values())


def test_the_citation_follows_the_citation_file_format():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert citation.keys() == {*CITATION, "authors", "keywords", "references"}
    for key, pattern in CITATION.items():
        assert re.fullmatch(pattern, citation[key]), key
    assert_authors(citation["authors"])
    assert all(isinstance(word, str) for word in citation["keywords"])
    for reference in citation["references"]:
        assert reference.keys() == {"type", "title", "authors", "year", "url"}
        assert reference["type"] == "article"
        assert_authors(reference["authors"])
        assert re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{5}", reference["url"])
        assert reference["url"] in (REPOSITORY / "README.md").read_text()


def test_the_workflow_calls_what_runs_everywhere():
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow[True].keys() == {"push", "pull_request"}  # YAML reads the key `on` as true
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == [".ci/run"]
    assert os.access(REPOSITORY / ".ci" / "run", os.X_OK)
    (python,) = [step["with"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    assert python["python-version"] == "{}.{}".format(*sys.version_info)
    assert (REPOSITORY / python["cache-dependency-path"]).is_file()


@pytest.mark.parametrize("target", ["check", "test", "test-long"])
def test_the_targets_of_the_workflow_are_the_makefiles(target):
    assert target in (REPOSITORY / ".ci" / "run").read_text()
    assert re.search(rf"^{target}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
