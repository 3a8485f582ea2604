"""Format the text of a config once: MMEngine does it twice at the start and for every checkpoint.

YAPF takes seconds for the config of a detector. They count when a scheduler has announced the
end of a run and a checkpoint has to be written in time.
"""
from __future__ import annotations

import functools
from typing import Any

import mmengine.config.config as stock

MAX_TEXTS = 4  # a run has one or two


def cache_formatted_texts() -> None:
    """Make MMEngine's formatter cache its results. May be called again."""
    format_code = getattr(stock, 'FormatCode', None)
    if format_code is None or hasattr(format_code, '_mmrepro_texts'):
        return
    texts: dict[tuple[str, str], Any] = {}

    @functools.wraps(format_code)
    def cached(text: str, **style: Any) -> Any:
        key = text, repr(sorted(style.items()))
        if key not in texts:
            while len(texts) >= MAX_TEXTS:
                del texts[next(iter(texts))]
            texts[key] = format_code(text, **style)
        return texts[key]

    setattr(cached, '_mmrepro_texts', texts)  # noqa: B010
    stock.FormatCode = cached
