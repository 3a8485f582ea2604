"""Hooks of MkDocs: roles of Sphinx in docstrings become plain code."""
from __future__ import annotations

import re
from typing import Any

ROLE = re.compile(r':(?:class|func|mod|data|meth|attr|exc):<code>(~?)([^<]*)</code>')


def on_page_content(html: str, **kwargs: Any) -> str:
    """Replace roles: ``:class:`~a.b.C``` becomes ``C``."""
    return ROLE.sub(lambda found: '<code>{}</code>'.format(
        found[2].rpartition('.')[2] if found[1] else found[2]), html)
