"""The docstrings below a class's attributes, read from the source when asked for: at import it would cost too much."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap


def attribute_docs(cls: type) -> dict[str, str]:
    """Attribute name to the string literal that follows its annotation."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
    return {
        statement.target.id: inspect.cleandoc(following.value.value)
        for statement, following in itertools.pairwise(body)
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
        and isinstance(following.value.value, str)
    }
