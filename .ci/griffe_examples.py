"""An extension of griffe for the documentation: our docstrings say "Example:", griffe's section is "Examples:"."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Makes every example of a docstring a section with code, and not text."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
