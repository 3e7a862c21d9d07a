"""What MkDocs does besides for this site: README.md is its first page, and nothing in it comes from another host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ELSEWHERE = re.compile(
    r"""<(?:script|img|iframe|link(?![^>]*rel="?canonical))[^>]*(?:src|href)=["']?(?:https?:)?//"""
)


def on_files(files: Files, config: Any) -> Files:
    """Add README.md, its links as they are seen from docs/."""
    text = (Path(config.config_file_path).parent / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leave the names of folders and of code, which are not part of the site, as plain text."""
    markdown = re.sub(r"\[([^\]]*)\]\((?:\.\./)+rtx/[^)]*\)", r"\1", markdown)
    return re.sub(r"\[([^\]]*)\]\((?:\.\./)*(?:results/)?records/[^)]*\)", r"`\1`", markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that would load anything from another host."""
    if found := ELSEWHERE.search(output):
        raise PluginError(f"{page.file.src_uri}: loads from elsewhere: {found[0]}")
    return output
