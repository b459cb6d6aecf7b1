"""What the site does with links that leave docs/: the files stay in the repository, so their names
stand as text.

mkdocs calls `on_page_markdown`; a link to a file that does not exist ends the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?:\.\./)+[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with links to files outside docs/ as text: `name (path/in/the/repository)`."""
    folder = Path(page.file.abs_src_path).parent

    def told(match: re.Match[str]) -> str:
        image, text, link = match.groups()
        path = (folder / link.partition("#")[0]).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return match[0]
        if not path.exists():
            raise FileNotFoundError(f"{page.file.src_path} links to {link}, which does not exist")
        name = str(path.relative_to(ROOT))
        return f"`{name}`" if image or text in (name, path.name) else f"{text} (`{name}`)"

    return _LINK.sub(told, markdown)
