"""Two pages of the site stand beside the folder `docs`, where people look for them: they are brought in here."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
BROUGHT = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in BROUGHT.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files
