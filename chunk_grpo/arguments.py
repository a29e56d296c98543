"""Arguments of the functions that scripts call, checked once, before anything is done, by their own annotations."""

import ast
import dataclasses
import difflib
import functools
import inspect
import io
import linecache
import reprlib
import textwrap
import tokenize
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

from . import InputError

Called = TypeVar("Called", bound=Callable)
Allowed = Any  # a type, as an annotation says it


def whole_number(
    low: int,  # smallest number
    words: str = "",  # what the numbers are; empty: a whole number
) -> Allowed:
    """Make the type of whole numbers from `low`."""
    from pydantic import Field

    return Annotated[int, Field(ge=low), words or f"a whole number from {low}"]


def number(
    above: float | None = None,  # smaller than all
    low: float | None = None,  # the smallest
    high: float | None = None,  # the largest
) -> Allowed:
    """Make the type of finite numbers between limits."""
    from pydantic import Field

    limits = {"gt": above, "ge": low, "le": high}
    words = {"gt": "above", "ge": "of at least", "le": "of at most"}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    said = " and ".join(f"{words[name]} {limit:g}" for name, limit in given.items())
    return Annotated[float, Field(**given), f"a finite number {said}".strip()]


def texts(
    fewest: int = 0,
) -> Allowed:
    """Make the type of lists of texts, of which none is empty."""
    from pydantic import Field

    return Annotated[
        Sequence[Annotated[str, Field(min_length=1)]],
        Field(min_length=fewest),
        "a list of texts that are not empty" + ", at least one" * bool(fewest),
    ]


def some(
    kind: Allowed,
    words: str,
    holds: Callable[[Any], bool],
) -> Allowed:
    """Make the type of those values of a kind for which something holds."""
    from pydantic import AfterValidator

    def check(value):
        if not holds(value):
            raise ValueError(words)
        return value

    return Annotated[kind, AfterValidator(check), words]


def text() -> Allowed:
    """Make the type of texts that are not empty."""
    return some(str, "a text that is not empty", lambda value: bool(value.strip()))


def path() -> Allowed:
    """Make the type of paths: a text that is not empty, or a Path."""
    return some(str | Path, "a path that is not empty", lambda value: bool(str(value).strip()))


def paths() -> Allowed:
    """Make the type of lists of paths, at least one."""
    return some(
        Sequence[str | Path],
        "a list of paths, at least one",
        lambda value: len(value) and all(map(str, value)),
    )


def _words(
    allowed: Allowed,
) -> str:
    """Say a type in words."""
    origin, parts = typing.get_origin(allowed), typing.get_args(allowed)
    if origin is Annotated:
        return next((part for part in parts[1:] if isinstance(part, str)), "") or _words(parts[0])
    if origin in (Union, types.UnionType):
        each = list(dict.fromkeys(_words(part) for part in parts))
        return ", ".join(each[:-1]) + f" or {each[-1]}" if len(each) > 1 else each[0]
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    if origin is tuple:
        return "a tuple"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        inner = {str: " of texts", int: " of whole numbers", float: " of finite numbers"}
        return "a list" + inner.get(parts[0], "")
    if origin is not None or allowed is Callable:
        return "a function"
    known = {
        int: "a whole number",
        float: "a finite number",
        bool: "True or False",
        str: "a text",
        Path: "a path",
        type(None): "None",
        None: "None",
        Any: "anything",
        Mapping: "a mapping",
        Sequence: "a list",
    }
    if isinstance(allowed, typing.Hashable) and allowed in known:
        return known[allowed]
    return f"a {getattr(allowed, '__name__', allowed)}"


def _shown(
    value: Any,
) -> str:
    """Say a value in at most some 80 characters of one line."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
    said = " ".join(reprlib.repr(value).split())
    return said if len(said) <= 80 else said[:77] + "..."


class _Nothing:
    """What no argument is."""


def _by_instance(
    allowed: Allowed,
) -> Allowed:
    """Take models and dataclasses as they are, without looking at their fields again."""
    from pydantic import BaseModel, InstanceOf

    if isinstance(allowed, type) and (
        issubclass(allowed, BaseModel) or dataclasses.is_dataclass(allowed)
    ):
        return InstanceOf[allowed]
    if typing.get_origin(allowed) in (Union, types.UnionType):
        return Union[tuple(_by_instance(part) for part in typing.get_args(allowed))]  # noqa: UP007
    return allowed


def _validators(
    called: Callable,
    given: Mapping[str, Allowed],  # types that say more than the annotations
) -> dict[str, tuple[Callable, Allowed]]:  # by parameter: raises ValidationError; the type
    """Build what checks each argument of a function."""
    from pydantic import ConfigDict, TypeAdapter

    rules = ConfigDict(arbitrary_types_allowed=True, strict=True, allow_inf_nan=False)
    hints = typing.get_type_hints(called, include_extras=True)
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [
        name
        for name, one in inspect.signature(called).parameters.items()
        if one.kind not in several
    ]
    found = {}
    for name in dict.fromkeys([*names, *given]):
        allowed = given[name] if name in given else hints.get(name, Any)
        allowed = allowed() if inspect.isfunction(allowed) else allowed  # what needs a later import
        schema = (
            _by_instance(allowed) | _Nothing
        )  # of a union, since that of one class takes no rules
        found[name] = (TypeAdapter(schema, config=rules).validator.validate_python, allowed)
    return found


def _bad_call(
    called: Callable,
    name: str,  # of the function
    args: tuple,
    kwargs: dict,
) -> InputError | None:  # None: all that it needs was given, and nothing else
    """Say what is missing or too much in a call."""
    signature = inspect.signature(called)
    unnamed = {
        key
        for key, one in signature.parameters.items()
        if one.kind is inspect.Parameter.POSITIONAL_ONLY
    }
    try:
        signature.bind(*args, **{key: value for key, value in kwargs.items() if key not in unnamed})
        return None
    except TypeError as error:
        said = str(error)
    takes = [known for known in signature.parameters if known not in ("self", "cls")]
    takes_more = any(
        one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values()
    )
    for given in () if takes_more else kwargs:
        if given not in takes:
            near = difflib.get_close_matches(given, takes, 1, 0.5)
            hint = (
                f"did you mean `{near[0]}`?" if near else f"it takes {', '.join(takes) or 'none'}"
            )
            return InputError(f"`{given}` is no argument of {name}; {hint}")
    return InputError(f"{name} takes {', '.join(takes) or 'no argument'}; {said}")


def _comments(source: str) -> tuple[dict[int, str], set[int]]:
    """Return the comments of a source by line, and the lines that hold nothing else."""
    comments = {}
    alone = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            comments[row] = token.string.lstrip("# ")
            if not token.line[:column].strip():
                alone.add(row)
    return comments, alone


def _signature_source(called: Callable) -> str:
    """Return the text of a function's signature, with `pass` as the body; raise OSError if there is none.

    Reading the signature alone takes a twentieth of the time that `inspect.getsource` takes.
    """
    code = called.__code__
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    start = next((i for i, line in enumerate(lines) if line.lstrip().startswith("def ")), None)
    if start is None:
        raise OSError("no source")
    indent = lines[start][: -len(lines[start].lstrip())]
    signature = []
    for line in lines[start:]:
        signature.append(line)
        code_part = line.partition("  #")[0].rstrip()
        is_last = line.startswith((f"{indent}def ", f"{indent})")) and code_part.endswith(":")
        if is_last:
            return textwrap.dedent("".join(signature)) + "    pass\n"
    raise OSError("no end of the signature")


def describe_parameters(called: Callable) -> str:
    """Return the comments beside a function's parameters and its result as a section of a docstring.

    Empty if the source cannot be read. The comment of a parameter stands on its line, or on the lines above it.
    """
    try:
        source = _signature_source(called)
        (definition,) = ast.parse(source).body
        comments, alone = _comments(source)
    except (OSError, SyntaxError, ValueError, tokenize.TokenError):
        return ""
    if not isinstance(definition, ast.FunctionDef):
        return ""
    arguments = definition.args
    lines = []
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        text = comments.get(argument.lineno, "")
        row = argument.lineno - 1
        above: list[str] = []
        while not text and row in alone:
            above.insert(0, comments[row])
            row -= 1
        text = (text or " ".join(above)).removeprefix(f"{argument.arg}: ")
        if text:
            lines.append(f"    {argument.arg}: {text}")
    section = "\n".join(["Args:", *lines]) if lines else ""
    # A comment on the line of a parameter is the parameter's.
    result = ""
    if definition.returns and definition.returns.end_lineno not in {
        argument.lineno for argument in arguments.args
    }:
        result = comments.get(definition.returns.end_lineno, "")
    if result:
        section += f"\n\nReturns:\n    {result}" if section else f"Returns:\n    {result}"
    return section


def checked(
    *rules: Callable[[Mapping[str, Any]], str | None],  # say what is wrong between arguments
    **given: Allowed,  # types that say more than the annotations, or functions that make them
) -> Callable[[Called], Called]:
    """Make a decorator that checks arguments and raises InputError with the argument, its value and what is allowed.

    A type is what the annotation says, read strictly: a whole number is no 1.0 and no True, a text no list of
    letters. The check takes some microseconds, so it stands before functions that are called from outside, not
    within a forward pass. A class is checked where it is made.
    """

    def decorate(called):
        if isinstance(called, type):
            called.__init__ = checked(*rules, **given)(called.__init__)
            return called
        name = called.__qualname__.removesuffix(".__init__")
        parameters = inspect.signature(called).parameters
        unnamed = {
            key for key, one in parameters.items() if one.kind is inspect.Parameter.POSITIONAL_ONLY
        }
        names = [
            key
            for key, one in parameters.items()
            if key in unnamed or one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        needed = [key for key in names if parameters[key].default is inspect.Parameter.empty]
        checks: dict[str, tuple[Callable, Allowed]] = {}

        def problem(args: tuple, kwargs: dict) -> InputError | None:
            if not checks:
                checks.update(_validators(called, given))
            more = kwargs
            if unnamed:  # a keyword of such a name is one of **more
                kwargs = {key: value for key, value in kwargs.items() if key not in unnamed}
            if (
                len(args) > len(names)
                or len(args) + len(kwargs) < len(needed)
                or not kwargs.keys() <= checks.keys()
                or needed[len(args) :]
                and not kwargs.keys() >= {*needed[len(args) :]}
                or not kwargs.keys().isdisjoint(names[: len(args)])
            ):
                bad = _bad_call(called, name, args, more)
                if bad:
                    return bad
            arguments = dict(zip(names, args, strict=False)) | kwargs
            for key, value in arguments.items():
                if key not in checks:  # one of **more
                    continue
                check, allowed = checks[key]
                try:
                    check(value)
                except (
                    Exception
                ):  # ValidationError, or what a strange object raises when it is asked
                    return InputError(
                        f"`{key}` of {name} must be {_words(allowed)}; got {_shown(value)}"
                    )
            for rule in rules:
                words = rule(arguments)
                if words:
                    return InputError(words)
            return None

        @functools.wraps(called)
        def with_check(*args, **kwargs):
            bad = problem(args, kwargs)
            if bad:
                raise bad
            return called(*args, **kwargs)

        section = describe_parameters(called)
        if section:
            with_check.__doc__ = f"{inspect.getdoc(called) or ''}\n\n{section}\n"
        return with_check

    return decorate
