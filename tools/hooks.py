"""MkDocs hook: add the changelog and the contributing guide, which are outside `docs`, to the site."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ADDED_PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in ADDED_PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files
