#!/usr/bin/env python
"""Write docs/api.md from the docstrings of the public names.

python scripts/write_api_docs.py            # writes the file
python scripts/write_api_docs.py --check    # 1 if it is not up to date
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

PROPERTIES = (property, cached_property)
TARGET = Path(__file__).resolve().parents[1] / "docs" / "api.md"
MODULES = (
    "diffusers_ardiff",
    "diffusers_ardiff.recipes",
    "diffusers_ardiff.checkpoints",
    "diffusers_ardiff.conversion",
    "diffusers_ardiff.cache",
    "diffusers_ardiff.processors",
    "diffusers_ardiff.pipelines",
    "diffusers_ardiff.rope",
    "diffusers_ardiff.video_io",
)


def render() -> str:
    """The whole page."""
    lines = ["# API", "", "Written by `python scripts/write_api_docs.py` from the docstrings; don't edit.", ""]
    seen: set[int] = set()
    for name in MODULES:
        module = importlib.import_module(name)
        lines += [f"## {name}", "", *_quoted(module.__doc__), ""]
        for public, value in _public(module):
            if id(value) not in seen and (inspect.isclass(value) or inspect.isfunction(value)):
                seen.add(id(value))
                lines += _entry(public, value)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _public(module: Any) -> Iterator[tuple[str, Any]]:
    """The module's public names: `__all__`, or what is defined in it."""
    names = getattr(module, "__all__", None)
    for name in sorted(names or vars(module)):
        value = getattr(module, name)
        if names is not None or (not name.startswith("_") and getattr(value, "__module__", "") == module.__name__):
            yield name, value


def _entry(name: str, value: Any) -> list[str]:
    lines = [f"### {name}{_signature(value)}", "", *_quoted(value.__doc__), ""]
    if inspect.isclass(value):
        for member, attribute in _members(value):
            kind = "" if isinstance(attribute, PROPERTIES) else _signature(getattr(value, member))
            lines += [f"#### {name}.{member}{kind}", "", *_quoted(attribute.__doc__), ""]
    return lines


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Documented public methods and properties, inherited ones only from this package."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("diffusers_ardiff")]
    names = sorted({name for base in ours for name in vars(base) if not name.startswith("_") or name == "__call__"})
    for name in names:
        attribute = next(vars(base)[name] for base in ours if name in vars(base))
        plain = getattr(attribute, "__func__", attribute)
        if plain.__doc__ and (isinstance(plain, PROPERTIES) or inspect.isfunction(plain)):
            yield name, plain


def _signature(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    names = []
    for parameter in signature.parameters.values():
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        is_required = parameter.default is inspect.Parameter.empty or star
        names.append(star + parameter.name + ("" if is_required else f"={_default(parameter.default)}"))
    return f"({', '.join(name for name in names if name != 'self')})"


def _default(value: Any) -> str:
    text = getattr(value, "__name__", None) or repr(value)
    return text if " at 0x" not in text and not text.startswith("<") else "..."


def _quoted(document: str | None) -> list[str]:
    """A docstring as an indented block, in which nothing is markup."""
    return [f"    {line}".rstrip() for line in inspect.cleandoc(document or "Not documented.").splitlines()]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Write docs/api.md from docstrings.")
    parser.add_argument("--check", action="store_true", help="only say whether the file is up to date")
    page = render()
    if parser.parse_args(argv).check:
        is_current = TARGET.is_file() and TARGET.read_text(encoding="utf-8") == page
        print(f"{TARGET.name} is {'up to date' if is_current else 'old: run python scripts/write_api_docs.py'}")
        return 0 if is_current else 1
    TARGET.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
