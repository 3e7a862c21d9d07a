"""Files of reports and cards from the templates of this folder (`*.j2`)."""

import re
from pathlib import Path
from typing import Any

from rtx.errors import printable
from rtx.tables import DASH, MINUS, text_of

LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "-": "{-}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "[": "{[}",
    "*": "{*}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    DASH: r"\textendash{}",
    MINUS: "$-$",
    "±": r"$\pm$",
}
"""What to write in LaTeX for letters that have a meaning there, or that its fonts lack."""


def filled(template: str, **values: Any) -> str:
    """Return a template with its values; in HTML nothing of them is markup."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=".html." in template,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["escaped"] = escaped
    environment.filters["tex"] = tex
    text = environment.get_template(template).render(values, text_of=text_of)
    return text.rstrip() + "\n"


def escaped(text: object) -> str:
    """Return text on one line that is no markup in Markdown: no cell, tag, link, image or code."""
    line = printable(" ".join(str(text).split()))
    return re.sub(r"([\\|\[`])", r"\\\1", line).replace("<", "&lt;")


def tex(text: str) -> str:
    """Return text in which nothing is a command of LaTeX.

    A letter that its usual fonts lack becomes a question mark.
    """
    return "".join(tex_letter(letter) for letter in text)


def tex_letter(letter: str) -> str:
    """Return a letter in LaTeX."""
    if letter in LATEX:
        return LATEX[letter]
    is_ascii = " " <= letter <= "~"
    return letter if is_ascii else "?"
