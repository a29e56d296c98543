"""The API of the package as pages of MyST markdown, one a chapter: signatures, docments and docstrings.

Read from the source, with ast and tokenize: nothing is imported, so it needs neither torch nor a device.
"""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST_VALUE = 80  # characters of a constant that is shown

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def comments_of(source: str) -> dict[int, str]:
    """Return the comment of each line, keyed by line number.

    A line without its own comment gets that of the comment lines directly above it, which is where a long comment on a
    field or a constant is written.
    """
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {
        token.start[0]: token.string.lstrip("# ").rstrip()
        for token in tokens
        if token.type == tokenize.COMMENT
    }
    above = []
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        # A line of a text may begin like a comment, and is none.
        if number in comments and text.startswith("# ") and not text.startswith("# %%"):
            above.append(comments[number])
        else:
            if text and above:
                comments.setdefault(number, " ".join(above))
            above = []
    return comments


def comment_on(node: ast.stmt, comments: dict[int, str]) -> str:
    """Return the comment at a statement's end, else the one on or above its first line, else an empty string."""
    return comments.get(node.end_lineno) or comments.get(node.lineno, "")


def parameters(node: ast.FunctionDef) -> list[tuple[ast.arg, ast.expr | None, str]]:
    """List every parameter with its default and its prefix: an empty string, * or **."""
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + args.defaults
    found = [(arg, default, "") for arg, default in zip(plain, defaults, strict=True)]
    found += [(args.vararg, None, "*")] if args.vararg else []
    found += [
        (arg, default, "") for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    return found + ([(args.kwarg, None, "**")] if args.kwarg else [])


def signature(node: ast.FunctionDef, method: bool) -> str:
    """Return a function's parameters and return type as Python source, without self or cls."""
    bare = ast.FunctionDef(
        name="f",
        args=ast.parse(ast.unparse(node.args).join(["def f(", "): 0"])).body[0].args,
        body=[ast.Pass()],
        decorator_list=[],
        returns=node.returns,
        lineno=0,
        type_params=[],
    )
    static = any(getattr(d, "id", "") == "staticmethod" for d in node.decorator_list)
    if method and not static and bare.args.args:
        bare.args.args = bare.args.args[1:]
        bare.args.defaults = bare.args.defaults[-len(bare.args.args) :] if bare.args.args else []
    for part in [
        *(arg for arg, _, _ in parameters(bare)),
        bare,
    ]:  # an annotation in quotes means what stands in them
        field = "returns" if part is bare else "annotation"
        if isinstance(note := getattr(part, field), ast.Constant) and isinstance(note.value, str):
            setattr(part, field, ast.parse(note.value, mode="eval").body)
    return ast.unparse(bare).splitlines()[0].removeprefix("def f").removesuffix(":")


def docments(node: ast.FunctionDef, comments: dict[int, str]) -> dict[str, str]:
    """Return the comments of the parameters, keyed by name, and that of the return value under the key `return`."""
    found = {}
    known = parameters(node)
    if (
        known and node.returns and node.returns.end_lineno == node.lineno
    ):  # on one line; a comment names what it means
        names = {arg.arg: stars + arg.arg for arg, _, stars in known}
        key = "return"
        said = [
            comments[line] for line in range(node.lineno, node.body[0].lineno) if line in comments
        ]
        for part in "; ".join(said).split("; ") if said else []:
            name, _, text = part.partition(": ")
            if name in names or part.startswith("returns "):
                key, part = (
                    (names[name], text)
                    if name in names
                    else ("return", part.removeprefix("returns "))
                )
            found[key] = f"{found[key]}; {part}" if key in found else part
        return found
    for arg, default, stars in known:
        last = (default or arg).end_lineno
        text = comments.get(last) or comments.get(arg.lineno)
        if text and arg.arg not in ("self", "cls"):
            found[stars + arg.arg] = text
    if node.returns and node.returns.end_lineno in comments:
        if not any(arg.end_lineno == node.returns.end_lineno for arg, _, _ in parameters(node)):
            found["return"] = comments[node.returns.end_lineno]
    return found


def plain(text: str) -> str:
    """Convert a docstring to Markdown: keep paragraphs, and escape everything that is not between backticks."""
    if "\n\n" in text:
        return "\n\n".join(plain(paragraph) for paragraph in text.split("\n\n"))
    parts = re.split(r"(`+[^`]*`+)", " ".join(text.split()))
    return "".join(
        part if part.startswith("`") else re.sub(r"([\\*_\[\]<>$#{}|~^])", r"\\\1", part)
        for part in parts
    )


def directive(
    kind: str, name: str, body: list[str], options: dict[str, str] | None = None, deep: int = 3
) -> str:
    """Format one object as a directive of Sphinx's Python domain."""
    fence = ":" * deep
    quoted = {
        key: "'" + value.replace("'", "''") + "'" if value else ""
        for key, value in (options or {}).items()
    }
    given = [f":{key}: {value}".rstrip() for key, value in quoted.items()]
    return "\n".join([f"{fence}{{py:{kind}}} {name}", *given, "", *body, fence])


def function(node: ast.FunctionDef, comments: dict[int, str], method: bool = False) -> str:
    """Format a function or a method as a directive."""
    said = docments(node, comments)
    fields = [f":param {name}: {plain(text)}" for name, text in said.items() if name != "return"]
    fields += [f":returns: {plain(said['return'])}"] if "return" in said else []
    marks = {getattr(d, "id", getattr(d, "attr", "")) for d in node.decorator_list}
    options = {word: "" for word in ("classmethod", "staticmethod") if word in marks}
    if isinstance(node, ast.AsyncFunctionDef):
        options["async"] = ""
    body = [plain(ast.get_docstring(node) or ""), "", *fields]
    if method and marks & {"property", "cached_property"}:
        kind = {"type": ast.unparse(node.returns)} if node.returns else {}
        return directive("property", node.name, [body[0]], kind)
    return directive(
        "method" if method else "function", node.name + signature(node, method), body, options
    )


def is_setting(value: ast.expr | None) -> bool:
    """Return True if a field is written as `setting(default, unit, source, text)`."""
    return (
        isinstance(value, ast.Call)
        and getattr(value.func, "id", "") == "setting"
        and len(value.args) >= 4
    )


def field(node: ast.AnnAssign, comments: dict[int, str]) -> str:
    """Format a field of a class, with its comment or the text of its `setting`."""
    options = {"type": ast.unparse(node.annotation)}
    text = comment_on(node, comments)
    value = node.value
    if is_setting(value):
        default, unit, _, words = value.args[:4]
        text = words.value if isinstance(words, ast.Constant) else text
        text += f" Unit: {unit.value}." if isinstance(unit, ast.Constant) and unit.value else ""
        value = default
    if value is not None and len(ast.unparse(value)) <= LONGEST_VALUE:
        options["value"] = ast.unparse(value)
    return directive("attribute", node.target.id, [plain(text)], options)


def public(nodes: list[ast.stmt], kind: type) -> list:
    """Return the statements of a class body that have the given type and a public name."""
    name = (lambda n: n.target.id) if kind is ast.AnnAssign else (lambda n: n.name)
    return [node for node in nodes if isinstance(node, kind) and not name(node).startswith("_")]


def whole_body(node: ast.ClassDef, tree: ast.Module) -> list[ast.stmt]:
    """Return the statements of a class body, preceded by those of its private bases."""
    bases = {
        base.id for base in node.bases if isinstance(base, ast.Name) and base.id.startswith("_")
    }
    above = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name in bases]
    return [part for base in above for part in whole_body(base, tree)] + node.body


def class_text(node: ast.ClassDef, comments: dict[int, str], tree: ast.Module) -> str:
    """Format a class with its fields and public methods."""
    body_nodes = whole_body(node, tree)
    start = next(
        (n for n in body_nodes if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None
    )
    bases = ", ".join(base for base in map(ast.unparse, node.bases) if not base.startswith("_"))
    body = [plain(ast.get_docstring(node) or ""), ""] + (
        [f"Bases: `{bases}`.", ""] if bases else []
    )
    if start:
        body += [
            f":param {name}: {plain(text)}" for name, text in docments(start, comments).items()
        ] + [""]
    for part in public(body_nodes, ast.AnnAssign):
        body += [field(part, comments), ""]
    for part in public(body_nodes, ast.FunctionDef):
        body += [function(part, comments, method=True), ""]
    return directive(
        "class",
        node.name + (signature(start, True).split(" -> ")[0] if start else ""),
        body,
        deep=4,
    )


def exported(tree: ast.Module) -> list[str]:
    """Return the names in `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [item.value for item in node.value.elts if isinstance(item, ast.Constant)]
    return []


def assigned(node: ast.stmt) -> list[tuple[str, ast.expr | None]]:
    """Return the names that a statement assigns, each with its value if it is a literal expression."""
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    found = [(target.id, node.value) for target in targets if isinstance(target, ast.Name)]
    for target in targets:
        if isinstance(target, ast.Tuple):
            values = (
                node.value.elts if isinstance(node.value, ast.Tuple) else [None] * len(target.elts)
            )
            found += [(name.id, value) for name, value in zip(target.elts, values, strict=True)]
    return found


@cache
def entries(path: Path) -> dict[str, str]:
    """Return the API text of each public name of a module, keyed by name."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    comments = comments_of(source)
    found = {}
    wanted = exported(tree)
    for node in tree.body:
        if isinstance(node, Definition) and node.name in wanted:
            is_class = isinstance(node, ast.ClassDef)
            found.setdefault(
                node.name,
                class_text(node, comments, tree) if is_class else function(node, comments),
            )
        for name, value in assigned(node):
            text = ast.unparse(value) if value else ""
            options = {"value": text} if text and len(text) <= LONGEST_VALUE else {}
            if name in wanted:
                found.setdefault(
                    name,
                    directive("data", name, [plain(comment_on(node, comments))], options),
                )
    return found


@cache
def members(path: Path) -> dict[str, list[str]]:
    """Return the public methods and fields of each public class of a module, keyed by class."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name: [part.target.id for part in public(node.body, ast.AnnAssign)]
        + [part.name for part in public(whole_body(node, tree), ast.FunctionDef)]
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in exported(tree)
    }


def module_of(path: Path) -> str:
    """Return the dotted module name of a file of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def chapter_page(title: str, modules: list[tuple[Path, str]]) -> str:
    """Build the API page of a chapter: for each module a link to its notebook, and its names."""
    blocks = [f"# {title}: API"]
    for path, made in modules:
        name = module_of(path)
        blocks += [f"## {name}", made, f":::{{py:module}} {name}\n:::", *entries(path).values()]
    return "\n\n".join(blocks) + "\n"
