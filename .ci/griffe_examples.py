"""An extension of griffe for the documentation: our docstrings say "Example:", griffe's section is "Examples:".

A doctest without a heading gets one, too; Markdown would read its ">>>" as three quotations.
"""

import re
from typing import Any

import griffe

BARE = re.compile(r"^>>> .*(?:\n.+)*", re.M)  # a doctest at the margin, up to the next empty line


class Examples(griffe.Extension):
    """Makes every example of a docstring a section with code, and not text."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring before it is parsed."""
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = BARE.sub(lambda found: "Examples:\n    " + found[0].replace("\n", "\n    "), text)
