"""The page's own files, served without a key: they hold no data."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files

from aiohttp import web

#: By path: file and media type.
ASSETS = {
    "/": ("page.html", "text/html"),
    "/static/page.css": ("page.css", "text/css"),
    "/static/page.js": ("page.js", "text/javascript"),
    "/static/charts.js": ("charts.js", "text/javascript"),
    "/static/uplot.js": ("uplot.js", "text/javascript"),
    "/static/uplot.css": ("uplot.css", "text/css"),
}
#: The page needs nothing from elsewhere, runs no script within itself, and nobody frames it.
_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def asset(request: web.Request) -> web.Response:
    """Return one of the page's files."""
    name, kind = ASSETS[request.path]
    headers = {
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return web.Response(text=_text(name), content_type=kind, charset="utf-8", headers=headers)


def read_assets() -> None:
    """Read all files now, so that no request needs a file descriptor for one."""
    for name, _ in ASSETS.values():
        _text(name)


@lru_cache
def _text(name: str) -> str:
    return files("pigou.gateway").joinpath("web", name).read_text(encoding="utf-8")
