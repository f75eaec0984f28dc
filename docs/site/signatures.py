"""Signatures that a reader understands without the source: an extension of Sphinx.

1. Classes that users don't make are shown without arguments: errors, lazy tensors, what a store tells of itself, and
   what other calls make, as their docstrings say.
2. A class whose base is mocked has the arguments of its own `__init__`; the mock takes any.
3. A constant of memstore as a default is shown as its value, and an alias of a type as what it stands for.
4. Private classes are shown as the public ones that people know: among types, and among the bases of errors.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Literal, get_origin

import torch
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.inspect import signature as signature_of
from sphinx.util.inspect import stringify_signature
from sphinx.util.typing import stringify_annotation

PUBLIC = {"HasView": "Store", "Opened": "AsyncStore", "Spec": "Any"}
CONSTANT = re.compile(r"(?<== )_?[A-Z][A-Z_]+(?=[,)])")
PRIVATE = re.compile(rf"(?:~?[\w.]+\.)?\b({'|'.join(PUBLIC)})\b")
TYPE = re.compile(r"(?<![\w.'\"])[A-Z]\w+(?![\w.'\"])")
OF_THE_CALLER = re.compile(r"~\w+\.~P\b|\[~P\]")  # a ParamSpec, which Sphinx can't read


def adapt(
    app: Sphinx, what: str, name: str, shown: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    if signature is None:
        return signature, returns
    if isinstance(shown, type) and is_made_by_others(shown):
        return "", None
    if isinstance(shown, type) and any(base.__module__.startswith(("torchrl", "vllm")) for base in shown.__mro__):
        signature = own_signature(shown)
    function = inspect.unwrap(shown.__init__ if isinstance(shown, type) else shown)
    if OF_THE_CALLER.search(signature):
        return without_types(function), None
    names = getattr(function, "__globals__", {})
    signature = CONSTANT.sub(lambda found: value_of(names, found[0]), signature)
    return with_types(names, signature), returns and with_types(names, returns)


def is_made_by_others(shown: type) -> bool:
    is_told = shown.__module__ == "memstore._info" or "Made by `" in (shown.__doc__ or "")
    return is_told or issubclass(shown, BaseException | torch.Tensor)


def own_signature(shown: type) -> str:
    """Of the `__init__` that a class of memstore's has; without one, it takes no arguments."""
    ours = [base for base in shown.__mro__ if base.__module__.startswith("memstore") and "__init__" in vars(base)]
    if not ours:
        return "()"
    return stringify_signature(signature_of(ours[0].__init__, bound_method=True), show_return_annotation=False)


def without_types(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    parameters = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def value_of(names: dict[str, Any], constant: str) -> str:
    value = names.get(constant, ...)
    return "..." if isinstance(value, frozenset) or value is ... else repr(value)


def with_types(names: dict[str, Any], text: str) -> str:
    """A signature, or what it returns, with public names in place of private ones and of aliases."""

    def written_out(found: re.Match[str]) -> str:
        alias = names.get(found[0])
        return stringify_annotation(alias, "smart") if get_origin(alias) in (Literal, Callable) else found[0]

    return TYPE.sub(written_out, PRIVATE.sub(lambda found: PUBLIC[found[1]], text))


def show_public_bases(app: Sphinx, name: str, shown: Any, options: Any, bases: list[Any]) -> None:
    """Instead of a private base, what that one is."""
    bases[:] = [
        one for base in bases for one in (base.__bases__ if getattr(base, "__name__", "").startswith("_") else (base,))
    ]


def hide_sentinels(app: Sphinx, doctree: nodes.document) -> None:
    """Shows that an argument of an overload may be left out: Sphinx takes its default from the function beside it."""
    for shown in doctree.findall(nodes.inline):
        if "default_value" in shown["classes"] and shown.astext() == "NO_DEFAULT":
            shown.children = [nodes.Text("...")]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-signature", adapt)
    app.connect("autodoc-process-bases", show_public_bases)
    app.connect("doctree-read", hide_sentinels)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
