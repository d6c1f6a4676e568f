"""A slide of a run, as a PNG."""

from __future__ import annotations

from raystate.core.formats.errors import ConfigError

_PIXELS = 2560  # wide


def png_of(svg: str) -> bytes:
    """Raises ConfigError: what draws it is not installed."""
    try:
        import resvg_py  # pyright: ignore[reportMissingImports] - an extra
    except ImportError:
        text = "--png needs the package resvg-py, which draws it: pip install 'raystate[png]'"
        raise ConfigError(text, field="png", got=None) from None
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, width=_PIXELS))
