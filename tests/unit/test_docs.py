"""The pages of docs/ build as a site without a warning; what they say of keys and commands is the code's."""

from __future__ import annotations

import re
import subprocess
import sys
from html import unescape

import pytest
import yaml
from assets import REPOSITORY

from lezo_ds.cli import COMMANDS
from lezo_ds.config.schema import READER

MAX_PAGES = 11
SETTINGS = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())
PAGES = sorted((REPOSITORY / "docs").glob("*.md"))


def build(settings, site):
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", settings, "--site-dir", site]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The text of each page of the site."""
    directory = tmp_path_factory.mktemp("site")
    finished = build(REPOSITORY / "mkdocs.yml", directory)
    assert finished.returncode == 0, finished.stderr
    return {path.stem: unescape(path.read_text()) for path in directory.glob("*.html")}


def test_every_page_is_in_the_site(site):
    assert {path.stem for path in PAGES} == site.keys() - {"404"}
    assert len(PAGES) <= MAX_PAGES


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Home\n\n[Away](away.md) and [down](#below)\n")
    wanted = SETTINGS | {"hooks": [], "nav": ["index.md"]}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(wanted))
    finished = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert finished.returncode != 0
    assert "'away.md'" in finished.stderr
    assert "'#below'" in finished.stderr


def test_the_configuration_has_every_key_as_the_help_has_it(site):
    rows = dict(re.findall(r"<td><code>([\w.]+)</code></td>\n<td>(.*)</td>\n<td>.", site["configuration"]))
    expected = {name: READER.accepted(name) for name in READER.keys}
    assert {name: rows[name] for name in expected} == expected


def test_the_commands_have_the_help_of_each(site):
    for name in COMMANDS:
        assert f"usage: lezo-ds {name} [-h]" in site["commands"]


def anchors(page):
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_a_page_outside_the_site_links_to_headings_that_exist(name):
    text = (REPOSITORY / name).read_text()
    for file, anchor in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", text):
        page = (REPOSITORY / file).read_text() if file else text
        assert anchor in anchors(page), f"{file}#{anchor}"
