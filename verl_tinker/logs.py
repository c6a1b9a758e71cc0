"""The server's log on standard error: text for people, or JSON with one object a line.

Owns the format. Does not decide what is logged.
"""

from __future__ import annotations

import logging

from pythonjsonlogger.json import JsonFormatter

from verl_tinker.core.request_log import FIELD


class TextFormatter(logging.Formatter):
    """Time, level, name and message; then the fields of an operation as name=value."""

    def __init__(self):
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, the name is the base class's.
        fields = getattr(record, FIELD, {})
        return " ".join([super().formatMessage(record), *(f"{k}={v}" for k, v in fields.items() if v is not None)])


def set_up(form: str, level: str) -> None:
    """`form` "text" or "json"; `level` is logging's name of the least important that is written."""
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter() if form == "text" else JsonFormatter(
        "{asctime}{levelname}{name}{message}{exc_info}", style="{", rename_fields={"asctime": "time", "levelname": "level"}))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("verl_tinker").setLevel(level.upper())
