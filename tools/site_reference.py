"""MkDocs' hook for the site's reference: one page for each package of `graphdecode` that has public names."""

import ast
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
    """Return the public names by module, from the package's table: nothing is imported."""
    for node in ast.parse(PACKAGE.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_NAMES":
            return {f"graphdecode.{module}": list(names) for module, names in ast.literal_eval(node.value).items()}
    raise ValueError(f"{PACKAGE} has no table _NAMES")


def page_of(module: str) -> str:
    """Return a page's path in the site's sources."""
    return f"reference/{module.rpartition('.')[2]}.md"
