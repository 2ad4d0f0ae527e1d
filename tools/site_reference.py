"""MkDocs' hook for the site's reference: one page for each package of `graphdecode` that has public names."""

import ast
from collections import defaultdict
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PACKAGE = Path(__file__).parents[1] / "graphdecode/__init__.py"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the pages to the navigation."""
    pages = [{module: page_of(module)} for module in public_names()]
    config.nav = [*(config.nav or []), {"Reference": pages}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make the pages: the docstrings of each public name."""
    for module, names in public_names().items():
        entries = "\n\n".join(f"::: {module}.{name}" for name in names)
        files.append(File.generated(config, page_of(module), content=f"# {module}\n\n{entries}\n"))
    return files


def public_names() -> dict[str, list[str]]:
    """Return the names that the package declares for type checkers, by module: nothing is imported."""
    names: dict[str, list[str]] = defaultdict(list)
    for node in ast.walk(ast.parse(PACKAGE.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("graphdecode."):
            names[node.module] += [each.name for each in node.names]
    return dict(names)


def page_of(module: str) -> str:
    """Return a page's path in the site's sources."""
    return f"reference/{module.rpartition('.')[2]}.md"
