"""The script of a page: the charting library, our own code and the numbers that they draw, all inside the page.

`uPlot` is vendored in assets/ as its package on npm has it; `make vendor` fetches it again and checks it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from fedpmt.report.embedded import read_asset


@dataclass(frozen=True)
class Script:
    """What a page needs besides its text in order to be interactive."""

    data: dict[str, Any]
    stamp: str | None = None  # of the records, on a page that is updated while runs go on

    @property
    def attributes(self) -> str:
        """Attributes of the root element."""
        return "" if self.stamp is None else f' data-live="{self.stamp}"'

    @property
    def styles(self) -> str:
        """Rules for what the script makes."""
        return read_asset("uPlot.min.css") + "\n" + read_asset("script.css")

    @property
    def policy(self) -> str:
        """Let the browser run this script and no other, and ask nobody for anything but a live page its server."""
        connect = "" if self.stamp is None else " connect-src 'self';"
        rules = (
            f"default-src 'none'; script-src '{_digest()}'; style-src 'unsafe-inline'; img-src data: blob:;{connect}"
            " base-uri 'none'; form-action 'none'"
        )
        return f'<meta http-equiv="Content-Security-Policy" content="{rules}">'

    @property
    def elements(self) -> str:
        """The numbers and the code."""
        return (
            f'<script type="application/json" id="chart-data">{embed(self.data)}</script>\n'
            f"<script>{_code()}</script>"
        )


def embed(data: object) -> str:
    """JSON that no text in it can end early.

    >>> embed({"name": "</script>"})
    '{"name":"\\\\u003c/script>"}'
    """
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@cache
def _code() -> str:
    licence = f"/*! uPlot\n{read_asset('uPlot.LICENSE.txt').strip()}\n*/"
    return "\n".join(
        ["", licence, read_asset("uPlot.iife.min.js").strip(), read_asset("page.js").strip(), ""]
    )


@cache
def _digest() -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(_code().encode()).digest()).decode()
