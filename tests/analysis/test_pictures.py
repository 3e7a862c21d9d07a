"""Pictures of the patterns are what the patterns read."""

import inspect
import re
import runpy
from pathlib import Path

import rtx.attention

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_shows_what_every_pattern_reads_and_says_it_in_a_formula() -> None:
    drawing, page = runpy.run_path(str(DOCS / "pictures.py")), (DOCS / "attention.md").read_text(encoding="utf-8")
    patterns = drawing["patterns"]()
    for name, pattern in patterns.items():
        kept = (DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
        assert drawing["draw"](name, drawing["reads"](pattern)) == kept, "python docs/pictures.py"
        assert f"](pictures/{name}.svg)" in page
    kinds, every = {type(pattern).__name__ for pattern in patterns.values()}, vars(rtx.attention).items()
    public = {name for name, kind in every if inspect.isclass(kind) and issubclass(kind, rtx.attention.Pattern)}
    assert public - kinds == {"Pattern", "PositionPattern", "RandomBlocks"}
    parts = re.split(r"^## (.*)$", page, flags=re.MULTILINE)[1:]
    for name in kinds:
        own = [text for heading, text in zip(parts[::2], parts[1::2], strict=True) if f": `{name}" in heading]
        assert own and all("](pictures/" in text and re.search("S_i|[ko]_[ij] = ", text) for text in own), name
