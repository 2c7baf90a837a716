"""Whether sites can run a method: what its clients' hooks read has to be there.

Sites run the hooks that take clients, ``steps`` and ``parts``. The server runs all others, on a
callback of its own, so what these set is known at sites only where a declared state is sent.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator
from typing import Any

from fl_lightning.callback import FederatedCallback, ServerState
from fl_lightning.errors import UserError

AT_SITES = (
    "steps",
    "parts",
    "on_local_start",
    "perturbation",
    "local_output",
    "local_loss",
    "local_batch",
    "on_loss_gradient",
    "on_local_gradient",
    "on_local_step_end",
    "on_local_end",
    "transmit",
    "encode",
    "personal",
)
AT_SERVER = (
    "select",
    "on_round_start",
    "broadcast",
    "on_updates",
    "aggregate",
    "on_server_update",
    "evaluated",
    "on_round_end",
)


def check_hooks(callbacks: Collection[Any]) -> None:
    """Refuse methods whose clients' hooks read what the server alone knows.

    Raises:
        UserError: naming the method, the attribute and both hooks.
    """
    for callback in callbacks:
        if isinstance(callback, FederatedCallback):
            _check(callback)


def _check(callback: FederatedCallback) -> None:
    name = type(callback).__name__
    declared = callback.declarations()
    read: dict[str, str] = {}
    for hook in AT_SITES:
        for attribute in _attributes(callback, hook):
            read.setdefault(attribute, hook)
    for attribute, hook in read.items():
        state = declared.get(attribute)
        if isinstance(state, ServerState) and not state.sent:
            raise UserError(
                f"method: {name} reads its server state {attribute} in {hook}, which sites run, "
                f"and the state is not sent to them. Declare it with {attribute} = "
                "ServerState(sent=True), or simulate with `fl-lightning fit`."
            )
    for setter in AT_SERVER:
        for attribute in _assigned(callback, setter):
            if attribute in read and attribute not in declared:
                raise UserError(
                    f"method: {name} sets self.{attribute} in {setter}, which only the server "
                    f"runs, and reads it in {read[attribute]}, which sites run. Declare it with "
                    f"{attribute} = ServerState(sent=True), or simulate with `fl-lightning fit`."
                )


def _assigned(callback: FederatedCallback, hook: str) -> Iterator[str]:
    """The attributes of ``self`` that a hook assigns whatever the settings, under no condition."""
    if not callback.has(hook):
        return
    tree, own = _parsed(getattr(callback, hook))
    for function in ast.iter_child_nodes(tree):
        for statement in getattr(function, "body", []):
            for target in getattr(statement, "targets", [getattr(statement, "target", None)]):
                of_self = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)
                if of_self and target.value.id == own:
                    yield target.attr


def _attributes(callback: FederatedCallback, hook: str) -> Iterator[str]:
    """The attributes of ``self`` that a hook reads, in methods that it calls too."""
    if not callback.has(hook):
        return
    # A method may choose a hook of its own, so the one that it has is looked at.
    waiting = [getattr(callback, hook)]
    seen = set[str]()
    while waiting:
        tree, own = _parsed(waiting.pop())
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            if node.value.id != own:
                continue
            if isinstance(node.ctx, ast.Load):
                yield node.attr
            called = getattr(type(callback), node.attr, None)
            if inspect.isfunction(called) and node.attr not in seen:
                seen.add(node.attr)
                waiting.append(called)


def _parsed(function: Any) -> tuple[ast.AST, str]:
    """A function's source as a tree, empty where there is none, and its name for ``self``."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], []), ""
    names = getattr(function, "__code__").co_varnames  # noqa: B009  # any callable may stand here
    return tree, names[0] if names else ""
