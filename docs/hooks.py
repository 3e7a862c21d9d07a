"""What MkDocs does besides for this site: README.md and the guide for contributors are pages of it,
and nothing in it comes from another host.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ELSEWHERE = re.compile(
    r"""<(?:script|img|iframe|link(?![^>]*rel="?canonical))[^>]*(?:src|href)=["']?(?:https?:)?//"""
)

PAGES_ELSEWHERE = {"README.md": "index.md", ".github/CONTRIBUTING.md": "contributing.md"}
"""Files outside of docs/, by their names on the site."""


def on_files(files: Files, config: Any) -> Files:
    """Add README.md and the guide for contributors, their links as they are seen from docs/."""
    root = Path(config.config_file_path).parent
    for path, name in PAGES_ELSEWHERE.items():
        text = (root / path).read_text(encoding="utf-8")
        for other, other_name in PAGES_ELSEWHERE.items():
            text = text.replace(f"]({other}", f"]({other_name}")
        text = re.sub(r"\]\((?:\.\./)?docs/", "](", text)
        files.append(File.generated(config, name, content=text))
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
