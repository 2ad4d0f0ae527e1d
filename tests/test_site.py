"""The documents as a site, and what a public forge reads."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import graphdecode

ROOT = Path(__file__).parent.parent
MAX_DESIGN_PAGES = 8


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_public_name_has_an_entry_in_the_reference(site: Path) -> None:
    entries = {
        name.rpartition(".")[2]
        for page in (site / "reference").rglob("index.html")
        for name in re.findall(r'id="(graphdecode[\w.]+)"', page.read_text())
    }
    assert {*graphdecode.__all__} - entries == set()


def test_every_document_is_a_page_and_asks_no_other_host_for_anything(site: Path) -> None:
    documents = [file.relative_to(ROOT / "docs").with_suffix("") for file in (ROOT / "docs").rglob("*.md")]
    pages = {name: site / ("" if name.name == "index" else name) / "index.html" for name in documents}
    assert [str(name) for name, page in pages.items() if not page.exists()] == []
    loaded = re.compile(r'<(?:script|link|img)[^>]*(?:src|href)="(?:https?:)?//[^"]*"')
    assert [found for page in pages.values() for found in loaded.findall(page.read_text())] == []


def test_the_navigation_names_every_document_once_and_design_is_short() -> None:
    (navigation,) = re.findall(r"^nav:\n(.*)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE | re.DOTALL)
    named = re.findall(r"[\w/-]+\.md", navigation)
    assert sorted(named) == sorted(str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*.md"))
    design = navigation.partition("- Design:\n")[2].partition("- Contributing:")[0]
    assert 1 < len(re.findall(r"\.md", design)) <= MAX_DESIGN_PAGES


def test_what_a_forge_reads_is_well_formed_and_names_files_and_versions_that_are_there() -> None:
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]
    read = {file.name: yaml.safe_load(file.read_text()) for file in files}
    steps = [step.get("run", "") for job in read["checks.yml"]["jobs"].values() for step in job["steps"]]
    assert any(".ci/run" in step for step in steps)
    assert (ROOT / ".ci/run").exists()
    pinned = (ROOT / "constraints.txt").read_text().split()
    hooks = [hook for repo in read[".pre-commit-config.yaml"]["repos"] for hook in repo["hooks"]]
    assert [each for hook in hooks for each in hook.get("additional_dependencies", []) if each not in pinned] == []
    assert "--version --debug" in read["bug.yml"]["body"][0]["attributes"]["description"]
